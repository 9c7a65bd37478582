"""The arms: one starting policy; what it practises, and what it is rewarded for.

All numbers are those of the experiment's specification unless README.md lists them as ours.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping

import fiddle as fdl
import optax
from fiddle import printing

from agentrl_jax.envs.mechanisms import scripted, words
from agentrl_jax.envs.mechanisms.environment import problem_of
from agentrl_jax.learner import optim
from agentrl_jax.losses.advantages import group_relative, unscaled
from agentrl_jax.losses.compose import policy_loss
from agentrl_jax.losses.ratios import per_token
from agentrl_jax.losses.recipes import sft
from agentrl_jax.losses.surrogates import clip
from agentrl_jax.losses.weights import mean_over
from agentrl_jax.models import remat
from agentrl_jax.ops.scales import TOKEN
from agentrl_jax.orchestrate import engines, supervised, tasksets, tiny
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.orchestrate.supervised import Supervised
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.rollout.records import Task
from agentrl_jax.rollout.scripted import Policy
from agentrl_jax.types import Algorithm
from configs.engines import use_fp8, use_sglang
from configs.pods import models
from experiments.vhd_play.checklist import checklist

BASE = "base"  # also the arm that has supervised training alone
FAMILIES = ("inventory", "knapsack")
ORACLES = 0.1  # share of acting demonstrations that are the oracle's; others are naive
FIRST_DEMONSTRATION = 1_000_000  # seed; practice has none of the demonstrations'
ANSWER_GROUPS = 20  # so that answers make as many tokens as acting does in 8 groups


def centred(*, low: float = 0.2, high: float = 0.28) -> Algorithm:
  """Return minus the group's mean, not divided; no critic, no KL."""
  return Algorithm(
    group_relative(unscaled()), mean_over(TOKEN), policy_loss(per_token(), clip(low, high))
  )


def cooled(
  *, rate: float = 3e-3, warmup: int = 20, hold: int = 600, steps: int = 1200, last: float = 1e-4
) -> optax.GradientTransformation:
  """Adam whose rate rises in `warmup` steps, holds until `hold`, then falls linearly to `last`."""
  schedule = optax.join_schedules(
    [
      optax.linear_schedule(rate / warmup, rate, warmup - 1),
      optax.linear_schedule(rate, last, steps - hold),
    ],
    [hold],
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(),
    optax.scale_by_learning_rate(schedule),
  )


def demonstrator(task: Task) -> Policy:
  """Whole answers are optimal; who acts follows the naive rule, and the oracle's script in one
  task of ten, by a hash of the task.
  """
  problem = problem_of(task)
  key = f"{task.family}/{task.split}/{task.seed}".encode()
  expert = int.from_bytes(hashlib.sha256(key).digest()[:4], "big") < ORACLES * 2**32
  calls = scripted.oracle_calls if problem.presentation == "F" or expert else scripted.naive_calls
  return scripted.in_words(problem, calls(problem))


# --- arms -----------------------------------------------------------------------------------------

Change = Callable[[fdl.Config[Experiment]], None]


def _mechanism(plan: fdl.Config[Experiment]) -> None:
  del plan  # acting, for the mechanism's own reward


def _answers(plan: fdl.Config[Experiment]) -> None:
  plan.tasks.presentations = ("F",)
  plan.batch.groups = plan.batch.groups * ANSWER_GROUPS // 8


def _checklist(plan: fdl.Config[Experiment]) -> None:
  plan.tasks = fdl.Config(checklist, plan.tasks)


ARMS: Mapping[str, Change] = {
  "mechanism": _mechanism,
  "answers": _answers,
  "checklist": _checklist,
}


def limits() -> fdl.Config[Limits]:
  return fdl.Config(Limits, turn_tokens=16, context_tokens=192)


def base(scale: str, seed: int = 0) -> fdl.Config[Supervised]:
  """The starting policy: half answers with the optimum, half acting by the naive rule."""
  smoke = scale == "smoke"
  count = 128 if smoke else 16_384
  shape = {"embed": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffw": 128} if smoke else {
    "layers": 4
  }  # fmt: skip
  tasks = fdl.Config(
    tasksets.mechanisms,
    families=FAMILIES,
    presentations=("F", "I", "F", "A"),
    train_tasks=count,
    held_out_tasks=1,
    first_seed=FIRST_DEMONSTRATION,
    seed=seed,
  )
  return fdl.Config(
    Supervised,
    model="",  # beside the work directory, see `run.py`
    make_model=fdl.Config(
      tiny.symbol_llama, words.SYMBOLS, vocab_size=128, max_position=200, seed=seed, **shape
    ),
    episodes=fdl.Config(
      supervised.demonstrated, tasks=tasks, policy=demonstrator, count=count, limits=limits()
    ),
    algorithm=fdl.Config(sft),
    optimizer=fdl.Config(cooled, **({"rate": 1e-2, "hold": 10, "steps": 20} if smoke else {})),
    steps=20 if smoke else 1200,
    episodes_per_step=32 if smoke else 64,
    row_length=256,
    micro_rows=1,
    seed=seed,
  )


def experiment(arm: str, scale: str, seed: int = 0) -> fdl.Config[Experiment]:
  """An arm's run. Raises KeyError for an unknown arm."""
  smoke = scale == "smoke"
  plan = fdl.Config(
    Experiment,
    model="",  # the base's
    tasks=fdl.Config(
      tasksets.mechanisms,
      families=FAMILIES,
      presentations=("A",),
      train_tasks=64 if smoke else 2048,
      held_out_tasks=1,
      seed=seed,
    ),
    algorithm=fdl.Config(centred),
    optimizer=fdl.Config(optim.adamw, learning_rate=3e-4, b2=0.95),
    engine=fdl.Config(engines.embedded, slots=4 if smoke else 64),
    steps=2 if smoke else 60,
    limits=limits(),
    batch=fdl.Config(
      Batch,
      groups=2 if smoke else 8,
      members=4 if smoke else 8,
      row_length=256,
      micro_rows=1,
      least_rows=4 if smoke else 32,
      least_turns=128 if smoke else 1024,
      share_prompts=False,
    ),
    evaluation=fdl.Config(Evaluation, tasks=0),  # `run.py` measures what it needs
    concurrency=16 if smoke else 64,
    seed=seed,
    checkpoint_every=2 if smoke else 20,
  )
  ARMS[arm](plan)
  return plan


@dataclasses.dataclass(frozen=True)
class Measured:
  """What is measured of a policy: held-out tasks in each form, and acting in an unseen family."""

  tasks: int = 200
  unseen: str = "routing"
  nodes: int = 4


MEASURED = {"cpu": Measured(), "smoke": Measured(tasks=8)}


# --- full scale -----------------------------------------------------------------------------------


def pod() -> fdl.Config[Experiment]:
  """Qwen3-30B-A3B on 128 devices, FP8 rollouts from SGLang: `--topology=h200:128`.

  64 tasks x 18 rollouts, contexts of 65,536 tokens, at most 1,000 turns, learning rate 2e-6.
  """
  plan = fdl.Config(
    Experiment,
    model="models/qwen3-30b-a3b",
    architecture=fdl.Config(models.qwen3_30b_a3b),
    tasks=fdl.Config(
      tasksets.mechanisms,
      families=("inventory", "routing", "facility"),
      presentations=("A",),
      train_tasks=2200,
      held_out_tasks=300,
      worded=False,
    ),
    algorithm=fdl.Config(centred),
    optimizer=fdl.Config(optim.adamw, learning_rate=2e-6),
    engine=fdl.Config(engines.embedded),
    steps=34,
    limits=fdl.Config(
      Limits, turn_tokens=16_384, context_tokens=65_535, turns=1000, seconds=7200.0
    ),
    batch=fdl.Config(
      Batch, groups=64, members=18, row_length=65_536, micro_rows=1, share_prompts=False
    ),
    evaluation=fdl.Config(Evaluation, tasks=300, samples=1, every=17),
    mesh={"data": 4, "fsdp": 8, "expert": 4},
    dtype="bfloat16",
    remat=remat.save_nothing,
    max_mismatch=0.5,
    concurrency=512,
  )
  use_sglang(plan)
  use_fp8(plan)
  return plan


def settings(arm: str, scale: str) -> dict[str, str]:
  """A job's whole configuration as path -> value, to be kept with its result."""
  config = base(scale) if arm == BASE else experiment(arm, scale)
  lines = printing.as_str_flattened(config, include_types=False).splitlines()
  text = dict(line.split(" = ", 1) for line in lines)
  return {
    path.strip(): re.sub(r"<function ([\w.<>]+) at \w+>", r"\1", value)
    for path, value in text.items()
    if "[unset" not in value and "make_model.symbols" not in path
  }
