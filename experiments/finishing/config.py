"""Settings of the finishing study, as Fiddle configurations: one function an arm, three scales."""

import dataclasses
from typing import Any

import fiddle as fdl
from fiddle import selectors

from agentrl_jax.learner import optim
from agentrl_jax.losses import recipes
from agentrl_jax.models import remat
from agentrl_jax.orchestrate import engines, tasksets
from agentrl_jax.orchestrate import experiment as runs
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.types import Algorithm
from configs.engines import use_sglang
from configs.pods import models
from experiments.finishing.measure import BUDGET, CONTROLLED, RECIPES, RECORDED


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """`problems` held-out problems, `samples` of each; survival asks `least` successes of `fresh`."""

  problems: int = 200
  samples: int = 32
  fresh: int = 64
  least: int = 4  # as 8 of 128 in the full-scale protocol
  outside: float = 0.15  # share of problems beyond what the base was shown
  resamples: int = 2000


@dataclasses.dataclass(frozen=True)
class Controlled:
  """A policy of three parameters of which only `trained` moves, by `rate` a step.

  The base's filler goes on with chance .6 (mean 1.5 tokens), it is right with a chance that differs
  from problem to problem, and on outside problems once in 8,000 answers.
  """

  trained: str
  rate: float
  steps: int = 30
  every: int = 5
  filler: float = 0.405  # logits of the base
  skill: float = -0.5
  new: float = -9.0
  spread: float = 1.5  # of skill over problems
  evaluation: Evaluation = Evaluation()


@dataclasses.dataclass(frozen=True)
class Start:
  """The supervised base: verbose demonstrations of which a part follows a wrong rule."""

  widths: tuple[int, ...] = (48, 128)  # about 2,400 and 6,400 parameters
  steps: int = 400
  tokens_per_step: int = 512
  rate: float = 1e-2
  filler: tuple[float, float] = (1.5, 3.5)  # mean check tokens a step: maths, physics
  wrong: tuple[tuple[int, float], ...] = ((7, 0.75), (3, 0.4))  # operand, share of demonstrations
  evaluation: Evaluation = Evaluation()


@dataclasses.dataclass(frozen=True)
class Reinforced:
  """RL of every base of the seed with one algorithm."""

  algorithm: Algorithm
  start: Start
  steps: int = 30
  groups: int = 16
  members: int = 8
  rate: float = 1e-2


@dataclasses.dataclass(frozen=True)
class Logs:
  """Recorded samples: real models that this study did not train."""

  kind: str
  evaluation: Evaluation = Evaluation()


_RATES = {"finishing": ("filler", 0.1), "reliability": ("skill", 0.05), "reach": ("new", 0.32)}
_ARGUMENTS = {"dr_grpo": {"length": float(BUDGET)}, "dapo": {"limit": BUDGET, "buffer": 10}}


def controlled(arm: str) -> fdl.Config[Controlled]:
  trained, rate = _RATES[arm]
  return fdl.Config(Controlled, trained=trained, rate=rate, evaluation=fdl.Config(Evaluation))


def base() -> fdl.Config[Start]:
  return fdl.Config(Start, evaluation=fdl.Config(Evaluation))


def reinforced(recipe: str) -> fdl.Config[Reinforced]:
  algorithm = fdl.Config(getattr(recipes, recipe), **_ARGUMENTS.get(recipe, {}))
  return fdl.Config(Reinforced, algorithm=algorithm, start=base())


def logs(arm: str) -> fdl.Config[Logs]:
  return fdl.Config(Logs, kind=arm, evaluation=fdl.Config(Evaluation))


def smoke(config: fdl.Config[Any]) -> None:
  """Fiddler: small enough for a test."""
  small = {
    Evaluation: {"problems": 30, "samples": 8, "fresh": 8, "least": 1, "resamples": 100},
    Controlled: {"steps": 10},
    Start: {"widths": (48,), "steps": 60},
    Reinforced: {"steps": 2, "groups": 4},
  }
  for kind, values in small.items():
    selectors.select(config, kind, check_nonempty=False).set(**values)


def arm_config(arm: str, scale: str) -> fdl.Config[Any]:
  """The configuration of an arm. Raises ValueError for one that is not there."""
  if arm in CONTROLLED:
    config = controlled(arm)
  elif arm == "base":
    config = base()
  elif arm in RECIPES:
    config = reinforced(arm)
  elif arm in RECORDED:
    config = logs(arm)
  else:
    raise ValueError(f"no arm {arm!r}")
  if scale == "smoke":
    smoke(config)
  return config


# --- The full scale. Not run here: it needs released weights and pods.

FULL_EVALUATION = {
  "name": "finishing_eval_pairs",
  "devices": 32,
  "engine": "SGLang, bfloat16",
  "samples": 64,
  "fresh": 128,
  "least": 8,
  "budgets": (4096, 16384, 32768),
  "temperatures": (0.6, 1.0),
  "top_p": 1.0,
}


def finishing_8b_run() -> fdl.Config[runs.Experiment]:
  """Qwen3-8B, planned and not run: `--topology=v5:2x4x4`, or h200:32; SGLang elsewhere.

  64 x 16 episodes of one answer of up to 8,192 tokens; returns centred, not divided.
  """
  plan = fdl.Config(
    runs.Experiment,
    model="models/qwen3-8b",
    architecture=fdl.Config(models.qwen3_8b),
    tasks=fdl.Config(tasksets.gsm8k, path="data/gsm8k"),
    algorithm=fdl.Config(recipes.dr_grpo, length=8192.0),
    optimizer=fdl.Config(optim.adamw, learning_rate=1e-6),
    engine=fdl.Config(engines.embedded),
    steps=200,
    limits=fdl.Config(Limits, turn_tokens=8192, context_tokens=9215, seconds=3600.0),
    batch=fdl.Config(
      runs.Batch, groups=64, members=16, row_length=9216, micro_rows=1, share_prompts=False
    ),
    evaluation=fdl.Config(runs.Evaluation, tasks=256, samples=4, every=20),
    mesh={"fsdp": 16, "tensor": 2},
    dtype="bfloat16",
    remat=remat.save_nothing,
    max_mismatch=0.5,
    concurrency=512,
  )
  use_sglang(plan)
  return plan
