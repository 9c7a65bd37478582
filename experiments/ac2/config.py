"""The arms: one starting policy, five ways to begin, end and value its responses.

All numbers are those of the experiment's specification unless README.md lists them as ours.
"""

import re
from collections.abc import Callable, Mapping

import fiddle as fdl
from fiddle import printing

from agentrl_jax.envs import ledger
from agentrl_jax.learner import optim
from agentrl_jax.losses import recipes
from agentrl_jax.losses.advantages import group_relative, imitation
from agentrl_jax.losses.compose import policy_loss, with_clip_high
from agentrl_jax.losses.endpoint import endpoint_baseline, valid_endpoints
from agentrl_jax.losses.ratios import per_token
from agentrl_jax.losses.readiness import ClipController, RateController, Readiness
from agentrl_jax.losses.surrogates import clip, likelihood
from agentrl_jax.losses.weights import mean_over, nested_mean
from agentrl_jax.models import remat
from agentrl_jax.ops.scales import GROUP, TOKEN, TRAJ
from agentrl_jax.orchestrate import engines, supervised, tasksets, tiny
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.orchestrate.supervised import Supervised
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.types import AdvantageFn, Algorithm, Aux, Credit, TrajectoryBatch, WeightFn
from configs.engines import use_sglang
from configs.pods import models
from experiments.ac2 import base as bases
from experiments.ac2.memory import at_once, everywhere
from experiments.ac2.plan import CriticPlan, Plan

# Not arms: what they start from, what is read of a finished one, and what needs no training.
BASE, CRITIC, PROBE = "base", "critic", "probe"
RATE = 1e-4  # of the policy, and of its critic at the start


# --- algorithms -----------------------------------------------------------------------------------


def actor(
  advantage: AdvantageFn, weight: WeightFn, *, low: float = 0.2, dual: float = 3.0
) -> Algorithm:
  """Token ratios in a range whose upper end a controller of entropy moves; no penalties."""
  loss = with_clip_high(
    lambda high: policy_loss(per_token(), clip(low, high, dual=dual)), start=0.34
  )
  return Algorithm(advantage, weight, loss)


def relative() -> Algorithm:
  """GRPO's credit, over the standard deviation of the group."""
  return actor(group_relative(), mean_over(TOKEN))


def endpoints(*, min_valid: int = 8) -> Algorithm:
  """AC2's credit: centred worths, without weight where the critic's word was no value."""
  algorithm = actor(endpoint_baseline(min_valid=min_valid), valid_endpoints(mean_over(TOKEN)))
  return algorithm._replace(needs=frozenset({"value"}))


def value_lessons(*, divisor: float = 4.0) -> Algorithm:
  """Negative log-likelihood of the value and its end over `divisor`; mean over pairs of the mean
  over their prompts.
  """

  def weight(batch: TrajectoryBatch, aux: Aux, credit: Credit):
    return nested_mean(GROUP, TRAJ)(batch, aux, credit) * (2.0 / divisor)  # of two tokens each

  return Algorithm(imitation(), weight, policy_loss(per_token(), likelihood()))


def critic_optimizer(learning_rate: float) -> fdl.Config:
  def make(rate: float):
    return optim.adamw(rate, clip_norm=0.2)

  return fdl.Config(optim.with_rate, make, learning_rate)


# --- arms -----------------------------------------------------------------------------------------


def _critic(**changes: object) -> fdl.Config[CriticPlan]:
  """The critic ladder keeps its proportions: a quarter of the first rate is its floor."""
  config = fdl.Config(
    CriticPlan,
    trust=Readiness.ready,
    algorithm=fdl.Config(value_lessons),
    optimizer=critic_optimizer(RATE),
    rate=fdl.Config(RateController, rate=RATE, floor=RATE / 4),
    chunk=4,
    audit=0.25,
    stored=256,
    drawn=128,
    min_valid=8,
  )
  for name, value in changes.items():
    setattr(config, name, value)
  return config


Change = Callable[[fdl.Config[Plan]], None]


def _grpo(plan: fdl.Config[Plan]) -> None:
  plan.refill = 0


def _prefix_grpo(plan: fdl.Config[Plan]) -> None:
  del plan  # replayed prefixes, whole continuations


def _ac2(plan: fdl.Config[Plan]) -> None:
  plan.actor, plan.critic = fdl.Config(endpoints), _critic()


def _no_readiness(plan: fdl.Config[Plan]) -> None:
  plan.actor, plan.critic = fdl.Config(endpoints), _critic(trust=everywhere)


def _short_chunks(plan: fdl.Config[Plan]) -> None:
  plan.actor, plan.critic, plan.grid = fdl.Config(endpoints), _critic(chunk=1), 1


ARMS: Mapping[str, Change] = {
  "grpo": _grpo,
  "prefix_grpo": _prefix_grpo,
  "ac2": _ac2,
  "no_readiness": _no_readiness,
  "short_chunks": _short_chunks,
}


def base(scale: str, seed: int = 0) -> fdl.Config[Supervised]:
  """The starting policy; its demonstrations share no problem with training."""
  smoke = scale == "smoke"
  shape = {"embed": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffw": 128} if smoke else {}
  demonstrations, values = (128, 64) if smoke else (8192, 2048)
  tasks = fdl.Config(
    tasksets.ledger, train_tasks=demonstrations, held_out_tasks=1, first_seed=100_000, seed=seed
  )
  demonstrated = fdl.Config(
    supervised.demonstrated,
    tasks=tasks,
    policy=ledger.misled,
    count=demonstrations,
    limits=fdl.Config(Limits, turn_tokens=ledger.BUDGET, context_tokens=64),
  )
  return fdl.Config(
    Supervised,
    model="",  # beside the work directory, see `run.py`
    make_model=fdl.Config(tiny.symbol_llama, ledger.SYMBOLS, seed=seed, **shape),
    episodes=fdl.Config(bases.with_random_values, demonstrated, tasks, count=values, seed=seed),
    algorithm=fdl.Config(recipes.sft),
    optimizer=fdl.Config(optim.adamw, learning_rate=1e-2 if smoke else 3e-3, warmup_steps=20),
    steps=40 if smoke else 600,
    episodes_per_step=32 if smoke else 64,
    row_length=256,
    micro_rows=1,
    seed=seed,
  )


def plan(arm: str, scale: str, seed: int = 0) -> fdl.Config[Plan]:
  """An arm's run. Raises KeyError for an unknown arm."""
  smoke = scale == "smoke"
  made = fdl.Config(
    Plan,
    model="",  # the base's
    tasks=fdl.Config(
      tasksets.ledger,
      train_tasks=16 if smoke else 256,
      held_out_tasks=8 if smoke else 128,
      seed=seed,
    ),
    actor=fdl.Config(relative),
    optimizer=fdl.Config(optim.adamw, learning_rate=RATE, clip_norm=0.3, weight_decay=0.01),
    engine=fdl.Config(engines.embedded, slots=4 if smoke else 128),
    steps=2 if smoke else 120,
    groups=4 if smoke else 16,
    members=8,
    refill=4 if smoke else 16,
    capacity=16 if smoke else 64,
    grid=4,
    minibatches=2,
    temperature=0.8,
    clip=fdl.Config(ClipController, offset=0.06, base=0.28, target=0.28, step=0.02),
    evaluation=fdl.Config(
      Evaluation, tasks=8 if smoke else 128, samples=1 if smoke else 4, every=2 if smoke else 10
    ),
    seed=seed,
    checkpoint_every=1 if smoke else 10,
  )
  ARMS[arm](made)
  if smoke and made.critic is not None:
    made.critic.drawn, made.critic.trust = 8, at_once
  return made


def qwen3_4b() -> fdl.Config[Experiment]:
  """The actor's step at full scale, planned and not run: `--topology=v5:2x4x4`, or h200:32.

  192 starts x 16 continuations of up to 52,000 tokens with what they continue, two updates. A plan
  of `Experiment`: the critic, who is the policy itself with a second optimizer, is not in it.
  """
  plan = fdl.Config(
    Experiment,
    model="models/qwen3-4b",
    architecture=fdl.Config(models.qwen3_4b),
    tasks=fdl.Config(tasksets.ledger),
    algorithm=fdl.Config(relative),
    optimizer=fdl.Config(optim.adamw, learning_rate=2e-6, clip_norm=0.3, weight_decay=0.01),
    engine=fdl.Config(engines.embedded),
    steps=200,
    temperature=0.8,
    limits=fdl.Config(Limits, turn_tokens=50_000, context_tokens=53_247, seconds=7200.0),
    batch=fdl.Config(
      Batch,
      groups=192,
      members=16,
      row_length=53_248,
      micro_rows=1,
      minibatches=2,
      share_prompts=False,
    ),
    clip=fdl.Config(ClipController, offset=0.06, base=0.28, target=0.28, step=0.02),
    evaluation=fdl.Config(Evaluation, tasks=128, samples=4, every=10),
    mesh={"fsdp": 8, "tensor": 2, "context": 2},
    dtype="bfloat16",
    remat=remat.save_nothing,
    max_mismatch=0.5,
    concurrency=512,
  )
  use_sglang(plan)
  return plan


def settings(arm: str, scale: str) -> dict[str, str]:
  """A job's whole configuration as path -> value, to be kept with its result."""
  if arm == PROBE:
    return {"states": str(200 if scale == "smoke" else 2000)}
  config = base(scale) if arm == BASE else plan("ac2" if arm == CRITIC else arm, scale)
  lines = printing.as_str_flattened(config, include_types=False).splitlines()
  text = dict(line.split(" = ", 1) for line in lines)
  return {
    path.strip(): re.sub(r"<function ([\w.<>]+) at \w+>", r"\1", value)
    for path, value in text.items()
    if "[unset" not in value and "make_model.symbols" not in path
  }
