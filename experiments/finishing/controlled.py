"""Runs whose truth is known: a policy of three parameters, of which training moves one.

A response writes three tokens a step, then check tokens whose number is geometric, and at the end
an answer and a stop token. `filler` is the logit of one more check token, `skill` moves the chance
to be right on every problem that the base can do, `new` is the logit of being right on the others.
So f and c, and with them every part of the split, have a closed form.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, nbdtr

from agentrl_jax.analysis.finishing import sweep
from agentrl_jax.analysis.samples import Samples, cut
from experiments.arms import Place
from experiments.finishing.config import Controlled
from experiments.finishing.measure import BUDGET, EXTENDED, measure

TOKENS_A_STEP, TOKENS_AT_THE_END = 3, 2


class Policy(NamedTuple):
  """Logits: of one more check token, of skill, and of being right where the base cannot."""

  filler: float
  skill: float
  new: float


class World(NamedTuple):
  """P problems: their number of steps, how much easier each is, and which the base cannot do."""

  steps: np.ndarray
  ease: np.ndarray
  outside: np.ndarray


def make_world(plan: Controlled, seed: int) -> World:
  rng = np.random.default_rng((seed, 0))
  count = plan.evaluation.problems
  outside = np.arange(count) < round(plan.evaluation.outside * count)
  return World(rng.integers(4, 9, count), rng.normal(0.0, plan.spread, count), outside)


def rates(world: World, policy: Policy, budget: int) -> tuple[np.ndarray, np.ndarray]:
  """Exact f and c of each problem."""
  room = budget - TOKENS_A_STEP * world.steps - TOKENS_AT_THE_END
  finished = np.where(
    room < 0, 0.0, nbdtr(np.maximum(room, 0), world.steps, 1 - expit(policy.filler))
  )
  correct = np.where(world.outside, expit(policy.new), expit(policy.skill + world.ease))
  return finished, correct


def true_parts(world: World, base: Policy, now: Policy, budget: int) -> dict[str, float]:
  """The split of the exact rates; reach is what is gained where the base could not."""
  (f0, c0), (f1, c1) = rates(world, base, budget), rates(world, now, budget)
  accuracy = (c1 - c0) * (f0 + f1) / 2
  return {
    "finishing": float(((f1 - f0) * (c0 + c1) / 2).mean()),
    "reliability": float(np.where(world.outside, 0.0, accuracy).mean()),
    "reach": float(np.where(world.outside, accuracy, 0.0).mean()),
  }


def draw(world: World, policy: Policy, samples: int, budget: int, rng: np.random.Generator):
  """Sampled responses, stopped at the budget."""
  problem = np.repeat(np.arange(len(world.steps)), samples)
  filler = rng.negative_binomial(world.steps[problem], 1 - expit(policy.filler))
  tokens = TOKENS_A_STEP * world.steps[problem] + filler + TOKENS_AT_THE_END
  finished = tokens <= budget
  right = rng.random(len(problem)) < rates(world, policy, budget)[1][problem]
  names = tuple(f"{index:05d}" for index in range(len(world.steps)))
  return Samples(names, problem, finished, finished & right, np.minimum(tokens, budget))


def ascend(world: World, policy: Policy, plan: Controlled) -> Policy:
  """One step up the exact gradient of pass@1, of fixed size, in the one parameter that is free."""

  def score(value: float) -> float:
    finished, correct = rates(world, policy._replace(**{plan.trained: value}), BUDGET)
    return float((finished * correct).mean())

  value = getattr(policy, plan.trained)
  up = np.sign(score(value + 1e-3) - score(value - 1e-3))
  return policy._replace(**{plan.trained: float(value + plan.rate * up)})


def run(plan: Controlled, place: Place) -> Mapping[str, Any]:
  """Trains, and measures against the truth at B, 2B and 4B, and along the way."""
  world, size = make_world(plan, place.seed), plan.evaluation
  rng = np.random.default_rng((place.seed, 1))
  base = now = Policy(plan.filler, plan.skill, plan.new)
  largest = 2 * EXTENDED
  before = draw(world, base, size.samples, largest, rng)
  extended = draw(world, base, size.samples, EXTENDED, rng)
  curve = []
  for step in range(1, plan.steps + 1):
    now = ascend(world, now, plan)
    if step % plan.every == 0:
      after = draw(world, now, size.samples, largest, rng)
      split = sweep(before, after, (BUDGET,), extended)[BUDGET]
      parts = {name: float(part.mean()) for name, part in split.parts._asdict().items()}
      null = float(split.null_split_half.mean())
      truth = true_parts(world, base, now, BUDGET)
      curve.append({"step": step, "truth": truth, "measured": parts, "null": null})
      place.save({"curve": curve})
      place.progress(step, plan.steps)
  after = draw(world, now, size.samples, largest, rng)
  again = draw(world, base, size.samples, largest, rng)
  fresh = [draw(world, policy, size.fresh, BUDGET, rng) for policy in (base, now)]

  def at(budget: int, other: Samples, pair: str) -> dict[str, Any]:
    both = cut(before, budget), cut(other, budget)
    options = {"extended": extended, "resamples": size.resamples}
    if budget == BUDGET:
      options |= {"fresh": tuple(fresh), "least": size.least}
    found = measure(pair, "steps", str(budget), *both, **options)
    return found | {"truth": true_parts(world, base, now if other is after else base, budget)}

  return {
    "policy": {"base": base._asdict(), "rl": now._asdict()},
    "splits": [at(b, after, f"only {place.arm}") for b in (BUDGET, EXTENDED, largest)],
    "control": at(BUDGET, again, "base against base"),
    "curve": curve,
  }
