"""Ready task sets: problems on disk, an environment around them, and how a model reads it."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl_jax.envs import calculator as calculator_env
from agentrl_jax.envs import gsm8k as gsm8k_env
from agentrl_jax.envs import ledger as ledger_env
from agentrl_jax.envs import turn_chain as turn_chain_env
from agentrl_jax.envs.datasets import TaskSource, store_tasks
from agentrl_jax.envs.mechanisms import draw as mechanisms_draw
from agentrl_jax.envs.mechanisms import environment as mechanisms_env
from agentrl_jax.envs.mechanisms import words as mechanisms_words
from agentrl_jax.orchestrate.experiment import Taskset
from agentrl_jax.rollout.chat import (
  ChatRenderer,
  Renderer,
  TranscriptRenderer,
  load_tokenizer,
  make_codec,
)
from agentrl_jax.rollout.records import Task
from agentrl_jax.rollout.symbols import SymbolRenderer

MakeRenderer = Callable[[Path], Renderer]


def transcript(argument: str = "expression") -> MakeRenderer:
  """Plain few-shot lines, one a turn: what a model can continue that was never taught to chat.

  A tool's one argument `argument` is written `tool(text)`, other arguments as JSON.
  """

  def make(directory: Path) -> Renderer:
    codec = make_codec(load_tokenizer(str(directory)), _vocab_size(directory))
    return TranscriptRenderer(codec, argument=argument)

  return make


def chat_template() -> MakeRenderer:
  """The model's own chat template and tool-call form."""

  def make(directory: Path) -> Renderer:
    tokenizer = load_tokenizer(str(directory))
    return ChatRenderer(tokenizer, make_codec(tokenizer, _vocab_size(directory)))

  return make


def calculator(
  *,
  train_tasks: int = 4096,
  held_out_tasks: int = 256,
  two_step: float = 0.2,
  finished: float = 0.1,
  tool: float = 0.0,
  examples: int = len(calculator_env.EXAMPLES),
  new_templates: bool = True,
  seed: int = 0,
  renderer: MakeRenderer | None = None,
  data_dir: str = "runs/tasks",
) -> Taskset:
  """Word problems with a calculator; train and held-out share no problem.

  Args:
    train_tasks: different training problems.
    held_out_tasks: different held-out problems.
    two_step: share of problems that need two operations.
    finished: reward for answering at all; a correct answer is 1 more.
    tool: reward for having used the calculator.
    examples: worked examples shown before the question.
    new_templates: held-out problems have templates and number ranges of their own; else they are
      further problems of the training kind, as fits a model that knows nothing else.
    seed: of the order of training problems.
    renderer: how the model reads; default `transcript()`.
    data_dir: where the problems are kept as array_record.

  Raises:
    ValueError: naming a number that makes no sense, or more problems than there are.
  """
  most = len(calculator_env.EXAMPLES)
  if not 0 <= examples <= most:
    raise ValueError(f"examples is {examples}, expected 0 to {most}")
  if train_tasks < 1 or held_out_tasks < 1:
    raise ValueError(
      f"train_tasks is {train_tasks}, held_out_tasks {held_out_tasks}, expected at least 1 of each"
    )
  _check_rewards(finished=finished, tool=tool)
  make = functools.partial(calculator_env.make_tasks, two_step=two_step)
  if new_templates:
    train, held_out = make("train", train_tasks), make("held_out", held_out_tasks)
  else:
    both = make("train", train_tasks + held_out_tasks)
    train, held_out = both[:train_tasks], both[train_tasks:]
  return Taskset(
    build=functools.partial(calculator_env.build, examples=calculator_env.EXAMPLES[:examples]),
    train=TaskSource(store_tasks(train, data_dir, "calculator-train"), seed),
    held_out=store_tasks(held_out, data_dir, "calculator-held_out"),
    renderer=renderer or transcript(),
    combine=functools.partial(calculator_env.combine, finished=finished, tool=tool),
  )


def gsm8k(
  path: str,
  *,
  finished: float = 0.1,
  tool: float = 0.0,
  seed: int = 0,
  renderer: MakeRenderer | None = None,
  data_dir: str = "runs/tasks",
) -> Taskset:
  """GSM8K with the calculator.

  Args:
    path: a directory with `train` and `test` as .jsonl or .parquet files of {question, answer}.
    finished: reward for answering at all; a correct answer is 1 more.
    tool: reward for having used the calculator.
    seed: of the order of training problems.
    renderer: how the model reads; default `chat_template()`.
    data_dir: where the problems are kept as array_record.

  Raises:
    FileNotFoundError, ValueError: naming the file, and the line of a bad row or the number of a
      problem that is in test twice, or in train and in test.
  """
  _check_rewards(finished=finished, tool=tool)
  splits = {split: _find(Path(path), split) for split in ("train", "test")}
  train, test = (gsm8k_env.load_tasks(file, split) for split, file in splits.items())
  _check_apart(train, test, splits)
  return Taskset(
    build=gsm8k_env.build,
    train=TaskSource(store_tasks(train, data_dir, "gsm8k-train"), seed),
    held_out=store_tasks(test, data_dir, "gsm8k-test"),
    renderer=renderer or chat_template(),
    combine=functools.partial(calculator_env.combine, finished=finished, tool=tool),
  )


def turn_chain(
  *, train_tasks: int = 4096, held_out_tasks: int = 256, family: str | None = None, seed: int = 0
) -> Taskset:
  """Short chains of calls in one protocol of symbols: search, tool use and automation by turns.

  Args:
    train_tasks: training tasks, kept in memory as each is a few numbers.
    held_out_tasks: held-out tasks; no instance is in both.
    family: only this one.
    seed: of the order of training tasks.
  """

  def renderer(directory: Path) -> Renderer:
    return SymbolRenderer(
      turn_chain_env.SYMBOLS,
      end=turn_chain_env.END,
      read=turn_chain_env.read_words,
      write=turn_chain_env.write_words,
      vocab_size=_vocab_size(directory),
    )

  return Taskset(
    build=turn_chain_env.build,
    train=TaskSource(turn_chain_env.make_tasks("train", train_tasks, family=family), seed),
    held_out=turn_chain_env.make_tasks("held_out", held_out_tasks, family=family),
    renderer=renderer,
    combine=turn_chain_env.combine,
  )


def ledger(
  *, train_tasks: int = 256, held_out_tasks: int = 128, first_seed: int = 0, seed: int = 0
) -> Taskset:
  """Running sums modulo 10, with a wrong rule to unlearn; no instance is in train and held-out.

  Args:
    train_tasks: training tasks, visited again and again.
    held_out_tasks: held-out tasks.
    first_seed: of the training tasks, so that demonstrations can be of others.
    seed: of the order of training tasks.
  """

  def renderer(directory: Path) -> Renderer:
    return SymbolRenderer(
      ledger_env.SYMBOLS,
      end=ledger_env.END,
      read=ledger_env.read_words,
      write=ledger_env.write_words,
      vocab_size=_vocab_size(directory),
    )

  return Taskset(
    build=ledger_env.build,
    train=TaskSource(ledger_env.make_tasks("train", train_tasks, first_seed=first_seed), seed),
    held_out=ledger_env.make_tasks("held_out", held_out_tasks),
    renderer=renderer,
    combine=ledger_env.combine,
  )


def mechanisms(
  *,
  families: Sequence[str] = ("inventory", "knapsack"),
  presentations: Sequence[str] = ("A",),
  train_tasks: int = 4096,
  held_out_tasks: int = 256,
  first_seed: int = 0,
  seed: int = 0,
  worded: bool = True,
  threshold: float = 1.0,
  renderer: MakeRenderer | None = None,
) -> Taskset:
  """Solved decision problems; no parameters are in train and held-out.

  Args:
    families: take turns from task to task.
    presentations: F, I or A; each is that of one round of the families, in turn.
    train_tasks: training tasks.
    held_out_tasks: held-out tasks, from seed 0 on.
    first_seed: of the training tasks, so that demonstrations can be of others.
    seed: of the order of training tasks.
    worded: told in the closed vocabulary of `envs.mechanisms.words`, else as a story with tools.
    threshold: the share of the way from the naive policy to the optimum that makes an episode a
      success; rewards do not depend on it.
    renderer: how the model reads a story; default `chat_template()`.
  """

  def words(directory: Path) -> Renderer:
    return SymbolRenderer(
      mechanisms_words.SYMBOLS,
      end=mechanisms_words.END,
      read=mechanisms_words.read_words,
      write=mechanisms_words.write_words,
      vocab_size=_vocab_size(directory),
    )

  def make(split: str, count: int, first: int) -> list[Task]:
    each = len(families)
    return [
      mechanisms_draw.make_task(
        families[i % each], presentations[i // each % len(presentations)], split, first + i
      )
      for i in range(count)
    ]

  return Taskset(
    build=mechanisms_words.build if worded else mechanisms_env.build,
    train=TaskSource(make("train", train_tasks, first_seed), seed),
    held_out=make("held_out", held_out_tasks, 0),
    renderer=words if worded else renderer or chat_template(),
    combine=mechanisms_env.combine,
    threshold=threshold,
  )


def _check_rewards(**rewards: float) -> None:
  for name, reward in rewards.items():
    if not math.isfinite(reward):
      raise ValueError(f"{name} is {reward}, expected a finite reward")


def _check_apart(train: Sequence[Task], test: Sequence[Task], files: Mapping[str, Path]) -> None:
  """Raises ValueError for a question twice in test, or in train and in test: scores would lie."""
  seen = {task.params["question"]: ("train", task.seed) for task in train}
  for task in test:
    question = task.params["question"]
    if question in seen:
      split, earlier = seen[question]
      raise ValueError(
        f"{files['test']}: problem {task.seed + 1} is problem {earlier + 1} of {files[split]} "
        f"again: {question[:60]!r}"
      )
    seen[question] = ("test", task.seed)


def _find(directory: Path, split: str) -> Path:
  for suffix in (".jsonl", ".parquet"):
    if (directory / f"{split}{suffix}").is_file():
      return directory / f"{split}{suffix}"
  raise FileNotFoundError(f"{directory} has no {split}.jsonl and no {split}.parquet")


def _vocab_size(directory: Path) -> int:
  return int(json.loads((directory / "config.json").read_text())["vocab_size"])
