"""Every recipe as a whole, off-policy, against its paper's formula put together from plain loops.

The members have tests of their own; these notice a recipe that takes another scale, denominator,
clip or coefficient than its docstring says. Values and gradients, with respect to log-probs and to
a critic's values.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
import pytest

from agentrl_jax.learner.step import make_prepare
from tests.losses.members import RECIPES
from tests.reference import batches
from tests.reference import losses as loop
from tests.reference.batches import Trajectory

Lists = list[list[float]]


@dataclasses.dataclass(frozen=True)
class Formula:
  """A recipe's five slots as loops; `targets` are a critic's at first tokens of `value_scale`."""

  advantage: Callable[[list[Trajectory]], Lists]
  weight: Callable[[list[Trajectory]], Lists]
  surrogate: tuple[str, dict[str, float]] | None
  ratio: str = "token"
  kl: float = 0.0
  imitate: float = 0.0
  targets: Callable[[list[Trajectory]], Lists] | None = None
  coef: float = 0.5
  value_clip: float = math.inf
  value_scale: str = "token"


def group(kind: str) -> Callable[[list[Trajectory]], Lists]:
  return lambda made: loop.group_relative(made, kind)


def critic(scale: str, gamma: float, lam, part: int) -> Callable[[list[Trajectory]], Lists]:
  return lambda made: loop.gae(made, scale, gamma, lam)[part]


def mean(scale: str) -> Callable[[list[Trajectory]], Lists]:
  return lambda made: loop.mean_weights(made, scale)


def constant(length: float) -> Callable[[list[Trajectory]], Lists]:
  """1 / (trajectories x length)."""

  def weights(made: list[Trajectory]) -> Lists:
    live = sum(bool(one.places()) for one in loop.scored(made))
    return [[(one.group >= 0) / (live * length)] * len(one.places()) for one in made]

  return weights


def together(made: list[Trajectory], name: str, other: str, f: Callable[[float, float], float]):
  """`f` of two columns at the action tokens."""
  return [
    [f(x, y) for x, y in zip(one.actions(name), one.actions(other), strict=True)] for one in made
  ]


def each(f: Callable[..., float], *lists: Lists) -> Lists:
  return [[f(*xs) for xs in zip(*rows, strict=True)] for rows in zip(*lists, strict=True)]


def with_rewards(made: list[Trajectory], change: Callable[[Trajectory], list[float]]):
  return [dataclasses.replace(one, rewards=change(one)) for one in made]


def overlong(one: Trajectory) -> list[float]:
  """DAPO, eq. 13: from 4 tokens on the last reward falls by a quarter a token."""
  over = max(0.0, len(one.places()) - 4) / 4
  return [*one.rewards[:-1], one.rewards[-1] - over] if one.rewards else []


def kl_charged(one: Trajectory) -> list[float]:
  """Each turn's reward less a tenth of its tokens' old - ref."""
  rewards = list(one.rewards)
  for (s, i), old, ref in zip(one.places(), one.actions("old"), one.actions("ref"), strict=True):
    rewards[one.streams[s].turn[i]] -= 0.1 * (old - ref)
  return rewards


def without_truncated(made: list[Trajectory]) -> Lists:
  whole = [dataclasses.replace(one, group=-1) if one.truncated else one for one in made]
  return loop.mean_weights(whole, "token")


def reinforce_pp(made: list[Trajectory]) -> Lists:
  """Returns to go less a tenth of the KL to go, whitened over tokens."""
  to_go = loop.reward_to_go(made, 1.0)
  apart = together(made, "ref", "old", lambda ref, old: ref - old)
  later = [[sum(d[j:]) for j in range(len(d))] for d in apart]
  return loop.whiten(made, each(lambda r, d: r + 0.1 * d, to_go, later), "token")


def minirl_weight(made: list[Trajectory]) -> Lists:
  rho = together(made, "old", "behavior", lambda old, behavior: math.exp(old - behavior))
  return each(lambda w, r: w * r, constant(1.0)(made), rho)


def gigpo(made: list[Trajectory]) -> Lists:
  return each(lambda a, b: a + b, loop.group_relative(made, "std"), loop.step_groups(made, 0.95))


def distillation(made: list[Trajectory]) -> Lists:
  apart = together(made, "ref", "old", lambda ref, old: ref - old)
  return [[x * (one.group >= 0) for x in d] for one, d in zip(made, apart, strict=True)]


def ones(made: list[Trajectory]) -> Lists:
  return [[float(one.group >= 0)] * len(one.places()) for one in made]


def clip(low: float, high: float, **dual: float) -> tuple[str, dict[str, float]]:
  return "clip", {"low": low, "high": high, **dual}


def mpo(advantage, ratio: str, low: float, high: float, critic_of: tuple[str, float], kl=0.0):
  """`critic_of` is the critic's scale and the lambda of its targets."""
  scale, lam = critic_of
  return Formula(
    advantage, mean("token"), clip(low, high, dual=3.0), ratio, kl=kl,
    targets=critic(scale, 1.0, lam, 1), value_scale=scale,
  )  # fmt: skip


def two_scale(made: list[Trajectory]) -> Lists:
  return loop.two_scale(made, (1.0, 1.0), (1.0, 0.95))


def mixed(made: list[Trajectory]) -> Lists:
  return loop.resolution_mix(made, 1.0, 1.0, 0.0, 1.0, 0.95)


TURNS = "turn, straight"
BY_TURN, BY_TOKEN = critic("turn", 1.0, 0.95, 0), critic("token", 1.0, 0.95, 0)
FORMULAS = {
  "grpo": Formula(group("std"), mean("token"), clip(0.2, 0.28)),
  "grpo-kl": Formula(group("std"), mean("token"), clip(0.2, 0.28), kl=0.1),
  "dr_grpo": Formula(group("centred"), constant(10.0), clip(0.2, 0.2)),
  "dapo": Formula(
    lambda made: loop.group_relative(with_rewards(made, overlong), "std"),
    without_truncated,
    clip(0.2, 0.28),
  ),
  "rloo": Formula(
    lambda made: loop.group_relative(with_rewards(made, kl_charged), "others"),
    constant(1.0),
    ("reinforce", {}),
  ),
  "reinforce_pp": Formula(reinforce_pp, mean("token"), clip(0.2, 0.2)),
  "reinforce_pp_baseline": Formula(
    lambda made: loop.whiten(made, loop.group_relative(made, "centred"), "token"),
    mean("token"),
    clip(0.2, 0.2),
    kl=0.1,
  ),
  "maxrl": Formula(group("mean"), mean("token"), ("reinforce", {})),
  "gtpo": Formula(
    lambda made: loop.group_relative_turns(made, 0.9), mean("token"), clip(0.2, 0.2)
  ),
  "gspo": Formula(group("std"), mean("traj"), clip(3e-4, 4e-4), "traj"),
  "gspo_token": Formula(group("std"), mean("traj"), clip(3e-4, 4e-4), "traj, straight"),
  "gmpo": Formula(group("std"), mean("traj"), ("unclipped", {}), "bounded 0.4"),
  "cispo": Formula(group("std"), mean("token"), ("reinforce", {"cap": 1.28})),
  "sapo": Formula(
    group("std"), mean("traj"), ("soft_gate", {"positive": 1.0, "negative": 1.05})
  ),
  "minirl": Formula(group("centred"), minirl_weight, ("gated", {"low": 0.2, "high": 0.2})),
  "ppo": Formula(
    BY_TOKEN, mean("token"), clip(0.2, 0.2, dual=3.0), value_clip=0.2,
    targets=critic("token", 1.0, 0.95, 1),
  ),
  "turn_ppo": Formula(
    BY_TURN, mean("token"), clip(0.2, 0.28, dual=3.0), targets=critic("turn", 1.0, 1.0, 1),
    value_scale="turn",
  ),
  "vapo": Formula(
    critic("token", 1.0, lambda n: max(0.0, 1 - 1 / (0.05 * n)), 0), mean("token"),
    clip(0.2, 0.28), imitate=0.1, targets=critic("token", 1.0, 1.0, 1),
  ),
  "gigpo": Formula(gigpo, mean("token"), clip(0.2, 0.2)),
  "mpo": mpo(two_scale, TURNS, 3e-3, 4e-3, ("turn", 1.0), kl=0.1),
  "mpo_mix": mpo(mixed, TURNS, 3e-3, 4e-3, ("token", 1.0)),
  "mpo-token_token": mpo(BY_TOKEN, "token", 0.2, 0.28, ("token", 0.95)),
  "mpo-token_turn": mpo(BY_TOKEN, TURNS, 3e-3, 4e-3, ("token", 0.95)),
  "mpo-turn_token": mpo(BY_TURN, "token", 0.2, 0.28, ("turn", 0.95)),
  "mpo-turn_turn": mpo(BY_TURN, TURNS, 3e-3, 4e-3, ("turn", 0.95)),
  "ac2": Formula(
    lambda made: loop.endpoint(made, 2)[0], mean("token"), clip(0.2, 0.34, dual=3.0),
    targets=lambda made: loop.endpoint(made, 2)[1], value_scale="traj",
  ),
  "canopy": Formula(group("std"), mean("token"), clip(0.2, 0.2), kl=1e-4),
  "opd": Formula(distillation, mean("token"), ("reinforce", {"cap": 2.0})),
  "critic_only": Formula(
    BY_TOKEN, mean("token"), None, coef=1.0, targets=critic("token", 1.0, 1.0, 1)
  ),
  "sft": Formula(ones, mean("token"), ("likelihood", {})),
}  # fmt: skip


def log_ratios(one: Trajectory, d: list[float], a: list[float], kind: str):
  """Each token's log-ratio, and d[i][j]: that of token i by the log-prob of token j."""
  n, name = len(d), kind.split(",")[0]
  if kind.startswith("bounded"):
    limit = float(kind.split()[1])
    keep = [x < limit if s > 0 else x > -limit for x, s in zip(d, a, strict=True)]
    d = [min(x, limit) if s > 0 else max(x, -limit) for x, s in zip(d, a, strict=True)]
    return [sum(d) / n for _ in d], [[k / n for k in keep] for _ in d]
  (coarse,) = loop.per_unit([one], [d], name, "mean")
  slopes = [[0.0] * n for _ in range(n)]
  for unit in loop.units_of(one, "token" if kind.endswith("straight") else name):
    for i in unit:
      for j in unit:
        slopes[i][j] = 1 / len(unit)
  return coarse, slopes


def policy_term(formula: Formula, made: list[Trajectory]) -> tuple[float, Lists]:
  """The loss of the policy, and its slope at each action token."""
  total, out = 0.0, []
  rows = zip(made, formula.advantage(made), formula.weight(made), strict=True)
  for one, advantage, weight in rows:
    logp, slope = one.actions("logp"), [0.0] * len(one.places())
    d = [x - y for x, y in zip(logp, one.actions("old"), strict=True)]
    log_ratio, by = log_ratios(one, d, advantage, formula.ratio)
    for i, w in enumerate(weight):
      if formula.surrogate is None or not w:
        continue
      name, parameters = formula.surrogate
      r = math.exp(log_ratio[i])
      loss, coefficient, _ = loop.surrogate(name, r, advantage[i], log_ratio[i], **parameters)
      total += w * loss
      for j in range(len(slope)):
        slope[j] += w * coefficient * by[i][j]
      apart = logp[i] - one.actions("ref")[i]  # value of k3, gradient of k2
      total += w * formula.kl * (math.exp(-apart) - 1 + apart)
      slope[i] += w * formula.kl * apart
      if sum(one.rewards) > 0:
        total -= w * formula.imitate * logp[i]
        slope[i] -= w * formula.imitate
    out.append(slope)
  return total, out


def value_term(formula: Formula, made: list[Trajectory]) -> tuple[float, Lists]:
  """The loss of the critic, and its slope at each action token."""
  if formula.targets is None:
    return 0.0, [[0.0] * len(one.places()) for one in made]
  total, out = 0.0, []
  targets = formula.targets(made)
  learners = [
    [unit[0] for unit in loop.units_of(one, formula.value_scale) if not math.isnan(t[unit[0]])]
    if one.group >= 0
    else []
    for one, t in zip(made, targets, strict=True)
  ]
  count = sum(map(len, learners))
  for one, target, places in zip(made, targets, learners, strict=True):
    slope = [0.0] * len(target)
    for j in places:
      v, old = one.actions("value")[j], one.actions("old_value")[j]
      near = old + min(max(v - old, -formula.value_clip), formula.value_clip)
      error, near_error = (v - target[j]) ** 2, (near - target[j]) ** 2
      total += formula.coef / count * 0.5 * max(error, near_error)
      if error >= near_error:
        slope[j] = formula.coef / count * (v - target[j])
      elif near == v:
        slope[j] = formula.coef / count * (near - target[j])
    out.append(slope)
  return total, out


@functools.cache
def case(seed: int) -> tuple[list[Trajectory], batches.Made]:
  made = batches.ragged(seed)
  return made, batches.pack(made, batches.place(made, rows=12, length=40))


def test_every_recipe_has_its_formula():
  assert set(FORMULAS) == set(RECIPES)


@pytest.mark.parametrize("name", list(FORMULAS))
def test_a_recipe_is_its_papers_formula(name):
  algorithm, formula = RECIPES[name], FORMULAS[name]
  made, packed = case(1)
  prepared = make_prepare(algorithm)(packed.batch, packed.aux)
  ours, slopes = jax.jit(
    jax.value_and_grad(lambda policy, batch: algorithm.loss(policy, batch)[0])
  )(packed.policy, prepared)
  policy, by_logp = policy_term(formula, made)
  critic_, by_value = value_term(formula, made)
  assert float(ours) == pytest.approx(policy + critic_, rel=2e-5, abs=2e-6)
  column = packed.layout.column
  np.testing.assert_allclose(slopes.logp, column(by_logp, made), rtol=2e-5, atol=2e-6)
  np.testing.assert_allclose(slopes.value, column(by_value, made), rtol=2e-5, atol=2e-6)
  told = max(np.abs(column(by_logp, made)).max(), np.abs(column(by_value, made)).max())
  assert told > 1e-3, "this batch tells nothing"
