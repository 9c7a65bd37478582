"""The arms: one starting policy, seven ways to give it credit. Everything else is shared.

All numbers are those of the experiment's specification unless README.md lists them as ours.
"""

import re
from collections.abc import Callable, Mapping

import fiddle as fdl
from fiddle import printing

from agentrl_jax.envs import turn_chain
from agentrl_jax.learner import critic, optim
from agentrl_jax.losses import recipes
from agentrl_jax.losses.corrections import truncated_is
from agentrl_jax.losses.gae import gae, two_scale_gae
from agentrl_jax.losses.weights import once_explained
from agentrl_jax.models import remat
from agentrl_jax.models.model import Model
from agentrl_jax.ops.scales import TOKEN, TURN, Scale
from agentrl_jax.orchestrate import engines, supervised, tasksets, tiny
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.orchestrate.supervised import Supervised
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.types import AdvantageFn, Algorithm
from configs.engines import use_fp8, use_sglang
from configs.pods import models as pods

# Lower and upper clip for each scale of the ratio, which clip about 2 % in results/pilot.json.
CLIP: Mapping[str, tuple[float, float]] = {
  "token": (0.021, 0.028),
  "turn": (0.025, 0.033),
  "trajectory": (0.015, 0.02),
}
BASE, CRITIC = "base", "critic"  # not arms: what they start from, and what is read of one


def with_critic(advantage: AdvantageFn, ratio: Scale, low: float, high: float) -> Algorithm:
  """An arm with a critic; the actor waits until the critic explains something."""
  algorithm = recipes.mpo(advantage=advantage, scale=ratio, low=low, high=high, coef=1.0)
  return algorithm._replace(weight=once_explained(algorithm.weight))


def _arm(
  advantage: fdl.Config[AdvantageFn], ratio: Scale, clip: str
) -> Callable[[], fdl.Config[Algorithm]]:
  low, high = CLIP[clip]
  return lambda: fdl.Config(with_critic, advantage, ratio, low=low, high=high)


def _token_gae() -> fdl.Config[AdvantageFn]:
  return fdl.Config(gae, TOKEN, gamma=1.0, lam=0.95, critic_lam=1.0)


def _turn_gae() -> fdl.Config[AdvantageFn]:
  return fdl.Config(gae, TURN, gamma=1.0, lam=0.95, critic_lam=1.0)


def _grpo() -> fdl.Config[Algorithm]:
  low, high = CLIP["token"]
  return fdl.Config(recipes.grpo, low=low, high=high)


def _gspo() -> fdl.Config[Algorithm]:
  low, high = CLIP["trajectory"]
  return fdl.Config(recipes.gspo, low=low, high=high)


# Names of the 2 x 2 are advantage_ratio: turn_token is Turn-PPO, token_token is PPO.
ARMS: Mapping[str, Callable[[], fdl.Config[Algorithm]]] = {
  "mpo": _arm(fdl.Config(two_scale_gae), TURN, "turn"),
  "turn_turn": _arm(_turn_gae(), TURN, "turn"),
  "turn_token": _arm(_turn_gae(), TOKEN, "token"),
  "token_turn": _arm(_token_gae(), TURN, "turn"),
  "token_token": _arm(_token_gae(), TOKEN, "token"),
  "grpo": _grpo,
  "gspo": _gspo,
}


def limits() -> fdl.Config[Limits]:
  return fdl.Config(Limits, turn_tokens=6, context_tokens=64)


def base(scale: str, seed: int = 0) -> fdl.Config[Supervised]:
  """The starting policy: demonstrations that follow a wrong rule in a third of situations."""
  smoke = scale == "smoke"
  tasks = fdl.Config(tasksets.turn_chain, train_tasks=256 if smoke else 3072, seed=seed)
  shape = {"embed": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffw": 128} if smoke else {}
  return fdl.Config(
    Supervised,
    model="",  # beside the work directory, see `run.py`
    make_model=fdl.Config(tiny.symbol_llama, turn_chain.SYMBOLS, seed=seed, **shape),
    episodes=fdl.Config(
      supervised.demonstrated,
      tasks=tasks,
      policy=turn_chain.misled,
      count=128 if smoke else 3072,
      limits=limits(),
    ),
    algorithm=fdl.Config(recipes.sft),
    optimizer=fdl.Config(optim.adamw, learning_rate=1e-2 if smoke else 3e-3, warmup_steps=20),
    steps=40 if smoke else 400,
    episodes_per_step=32,
    row_length=256,
    micro_rows=1,
    seed=seed,
  )


def experiment(arm: str, scale: str, seed: int = 0) -> fdl.Config[Experiment]:
  """An arm's run. Raises KeyError for an unknown arm."""
  smoke = scale == "smoke"
  algorithm = ARMS[arm]()
  actor = fdl.Config(optim.adamw, learning_rate=3e-4, b2=0.95)
  if "value" in fdl.build(algorithm).needs:
    values = fdl.Config(optim.adamw, learning_rate=1e-3, b2=0.95)
    actor = fdl.Config(optim.with_critic, actor, values)
  return fdl.Config(
    Experiment,
    model="",  # the base's
    tasks=fdl.Config(
      tasksets.turn_chain,
      train_tasks=256 if smoke else 4096,
      held_out_tasks=16 if smoke else 256,
      seed=seed,
    ),
    algorithm=algorithm,
    optimizer=actor,
    engine=fdl.Config(engines.embedded, slots=4 if smoke else 128),
    steps=2 if smoke else 60,
    limits=limits(),
    batch=fdl.Config(
      Batch,
      groups=4 if smoke else 16,
      members=4 if smoke else 8,
      row_length=256,
      micro_rows=1,
      minibatches=2 if smoke else 4,
      least_rows=4 if smoke else 32,  # of up to 56 tokens an episode, in up to 8 turns
      least_turns=128 if smoke else 1024,
      share_prompts=False,
    ),
    evaluation=fdl.Config(Evaluation, tasks=256, samples=1, every=2 if smoke else 10),
    concurrency=16 if smoke else 128,
    seed=seed,
    checkpoint_every=2 if smoke else 10,
    critic=critic.of_its_own,
  )


# --- full scale: planned, not run
# -----------------------------------------------------------------------------------


def full(*, low: float = 3e-3, high: float = 4e-3) -> Algorithm:
  """MPO with the specification's clip of turns; what engine and trainer differ by is truncated."""
  algorithm = recipes.mpo(low=low, high=high, coef=1.0)
  return algorithm._replace(weight=truncated_is(algorithm.weight, cap=2.0))


def qwen3_4b() -> fdl.Config[Experiment]:
  """`--topology=v5:2x4x4`, or h200:32; a second Qwen3-4B as critic."""
  mesh = {"fsdp": 16, "tensor": 2}
  return _full_scale(pods.qwen3_4b, "models/qwen3-4b", mesh)


def qwen3_30b_a3b() -> fdl.Config[Experiment]:
  """`--topology=h200:64`; FP8 rollouts, and a second Qwen3-30B-A3B as critic."""
  mesh = {"fsdp": 8, "expert": 8}
  plan = _full_scale(pods.qwen3_30b_a3b, "models/qwen3-30b-a3b", mesh)
  use_fp8(plan)
  return plan


def _full_scale(
  architecture: Callable[[], Model], directory: str, mesh: Mapping[str, int]
) -> fdl.Config[Experiment]:
  """64 tasks x 8 episodes of up to 24,576 tokens and 32 turns, two updates; SGLang elsewhere."""
  plan = fdl.Config(
    Experiment,
    model=directory,
    architecture=fdl.Config(architecture),
    tasks=fdl.Config(tasksets.turn_chain),
    algorithm=fdl.Config(full),
    optimizer=fdl.Config(
      optim.with_critic,
      fdl.Config(optim.adamw, learning_rate=1e-6, b2=0.95),
      fdl.Config(optim.adamw, learning_rate=1e-5, b2=0.95),
    ),
    engine=fdl.Config(engines.embedded),
    steps=200,
    limits=fdl.Config(Limits, turn_tokens=4096, context_tokens=24_575, turns=32, seconds=3600.0),
    batch=fdl.Config(
      Batch,
      groups=64,
      members=8,
      row_length=24_576,
      micro_rows=1,
      minibatches=2,
      share_prompts=False,
    ),
    evaluation=fdl.Config(Evaluation, tasks=256, samples=1, every=20),
    mesh=dict(mesh),
    dtype="bfloat16",
    remat=remat.save_nothing,
    max_mismatch=0.5,
    concurrency=512,
    critic=critic.of_its_own,
  )
  use_sglang(plan)
  return plan


def settings(arm: str, scale: str) -> dict[str, str]:
  """A job's whole configuration as path -> value, to be kept with its result."""
  config = base(scale) if arm == BASE else experiment("mpo" if arm == CRITIC else arm, scale)
  lines = printing.as_str_flattened(config, include_types=False).splitlines()
  text = dict(line.split(" = ", 1) for line in lines)
  return {
    path.strip(): re.sub(r"<function (\w+) at \w+>", r"\1", value)
    for path, value in text.items()
    if "[unset" not in value and "make_model.symbols" not in path
  }
