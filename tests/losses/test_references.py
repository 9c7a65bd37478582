"""Every formula against its loop in `tests/reference/losses.py`, on ragged random batches."""

import functools
import math

import jax
import numpy as np
import pytest

from agentrl_jax.losses.advantages import (
  by_mean,
  by_others,
  by_shared_std,
  by_std,
  distillation,
  group_relative,
  group_relative_turns,
  step_groups,
  unscaled,
  weighted_sum,
  whiten,
)
from agentrl_jax.losses.anchors import observation_before
from agentrl_jax.losses.corrections import (
  banded_is,
  drop_covariant,
  drop_stale,
  masked_by_kl,
  masked_is,
  mismatch,
  truncated_is,
)
from agentrl_jax.losses.endpoint import endpoint_baseline, valid_endpoints
from agentrl_jax.losses.gae import (
  every_token,
  gae,
  kl_to_go,
  length_adaptive,
  relative_horizon,
  resolution_mix,
  reward_to_go,
  two_scale_gae,
)
from agentrl_jax.losses.ratios import (
  at_scale,
  at_scale_arithmetic,
  at_scale_product,
  mix,
  one_sided_clip,
  per_token,
  straight_through,
)
from agentrl_jax.losses.shaping import kl_in_reward, length_penalty
from agentrl_jax.losses.weights import (
  drop_truncated,
  fixed_length,
  mean_over,
  nested_mean,
  once_explained,
  sum_over,
)
from agentrl_jax.ops.scales import GROUP, TOKEN, TRAJ, TURN, fixed_chunks, marked_chunks
from agentrl_jax.types import Credit, LossBatch
from tests.reference import batches
from tests.reference import losses as loop

SEEDS = (1, 2)
SCALES = {
  "token": TOKEN,
  "chunk2": fixed_chunks(2),
  "marked3,4,5": marked_chunks([3, 4, 5]),
  "turn": TURN,
  "traj": TRAJ,
}
seeds = pytest.mark.parametrize("seed", SEEDS)
scales = pytest.mark.parametrize("scale", list(SCALES))


@functools.cache
def case(seed):
  """A packed layout of trajectories, and the trajectories."""
  made = batches.ragged(seed)
  layout = batches.place(made, rows=12, length=40, pad=1)
  return made, batches.pack(made, layout, order=list(range(len(made)))[::-1])


def same(ours, theirs, seed, atol=1e-5):
  made, packed = case(seed)
  np.testing.assert_allclose(ours, packed.layout.column(theirs, made), rtol=1e-5, atol=atol)


def advantage(member, seed):
  _, packed = case(seed)
  return jax.device_get(jax.jit(member)(packed.batch, packed.aux))


def columns(name, seed):
  return [one.actions(name) for one in case(seed)[0]]


def minus(a, b):
  return [[x - y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]


@seeds
@pytest.mark.parametrize(
  ("kind", "scale"),
  [("std", by_std()), ("centred", unscaled()), ("shared", by_shared_std()), ("mean", by_mean()),
   ("others", by_others())],
)  # fmt: skip
def test_group_relative(kind, scale, seed):
  credit = advantage(group_relative(scale), seed)
  same(credit.advantage, loop.group_relative(case(seed)[0], kind), seed)
  assert np.abs(credit.advantage).max() > 0.1


@seeds
def test_group_relative_turns(seed):
  theirs = loop.group_relative_turns(case(seed)[0], 0.8)
  same(advantage(group_relative_turns(0.8), seed).advantage, theirs, seed)


@seeds
def test_step_groups(seed):
  member = step_groups(observation_before, gamma=0.9)
  theirs = loop.step_groups(case(seed)[0], 0.9)
  same(advantage(member, seed).advantage, theirs, seed)
  assert max(abs(x) for a in theirs for x in a) > 0.1


@seeds
def test_observations_are_told_apart(seed):
  made, packed = case(seed)
  keys = np.stack(observation_before(packed.batch))
  seen = {}
  order = [t for t in reversed(range(len(made))) for _ in made[t].rewards]
  index = 0
  while index < len(order):
    one = made[order[index]]
    for k in range(len(one.rewards)):
      seen.setdefault(loop.anchor(one, k), set()).add(tuple(keys[:, index + k]))
    index += len(one.rewards)
  assert len(seen) < len(order), "no two turns share an observation"
  assert all(len(found) == 1 for found in seen.values())
  assert len({next(iter(found)) for found in seen.values()}) == len(seen)


@seeds
def test_a_stream_that_continues_none_observes_the_same(seed):
  """Its own id as its parent says the same as no parents at all."""
  _, packed = case(seed)
  alone = packed.batch.replace(parent=packed.batch.sample)
  for ours, theirs in zip(observation_before(alone), observation_before(packed.batch), strict=True):
    np.testing.assert_array_equal(ours, theirs)


@scales
@seeds
def test_gae(scale, seed):
  a, target = loop.gae(case(seed)[0], scale, 0.9, 0.7)
  credit = advantage(gae(SCALES[scale], gamma=0.9, lam=0.7, learners=every_token), seed)
  same(credit.advantage, a, seed)
  same(credit.value_target, target, seed)
  same(credit.value_weight, loop.mean_weights(case(seed)[0], scale), seed)


@seeds
def test_a_critic_learns_at_first_tokens_with_its_own_lambda(seed):
  made, packed = case(seed)
  credit = advantage(gae(TURN, gamma=0.9, lam=0.7, critic_lam=0.3), seed)
  _, target = loop.gae(made, "turn", 0.9, 0.3)
  total = sum(len(loop.units_of(one, "turn")) for one in loop.scored(made))
  where = []
  for one in made:
    first = {unit[0] for unit in loop.units_of(one, "turn")} if one.group >= 0 else set()
    where.append([float(j in first) for j in range(len(one.places()))])
  mark = packed.layout.column(where, made)
  np.testing.assert_allclose(credit.value_weight, mark / total, rtol=1e-6)
  np.testing.assert_allclose(
    credit.value_target, mark * packed.layout.column(target, made), rtol=1e-5, atol=1e-5
  )
  same(credit.advantage, loop.gae(made, "turn", 0.9, 0.7)[0], seed)


@seeds
def test_lambda_schedules(seed):
  made, _ = case(seed)
  adaptive = loop.gae(made, "token", 1.0, lambda n: max(0.0, 1 - 1 / (0.4 * n)))[0]
  same(advantage(gae(TOKEN, lam=length_adaptive(0.4)), seed).advantage, adaptive, seed)
  horizon = loop.gae(made, "turn", 1.0, lambda n: 0.3 ** (1 / (n - 1)) if n > 1 else 1.0)[0]
  same(advantage(gae(TURN, lam=relative_horizon(0.3)), seed).advantage, horizon, seed)


def test_relative_horizon_of_short_trajectories():
  np.testing.assert_allclose(relative_horizon(0.25)(np.float32([0, 1, 2, 3])), [0, 1, 0.25, 0.5])


@seeds
def test_two_scale_gae(seed):
  member = two_scale_gae(inner_gamma=0.95, inner_lam=0.8, outer_gamma=0.9, outer_lam=0.6)
  credit = advantage(member, seed)
  same(credit.advantage, loop.two_scale(case(seed)[0], (0.95, 0.8), (0.9, 0.6)), seed)
  targets = advantage(gae(TURN, gamma=0.9, lam=1.0), seed)
  np.testing.assert_allclose(credit.value_target, targets.value_target, atol=1e-6)
  np.testing.assert_allclose(credit.value_weight, targets.value_weight, atol=1e-6)


@seeds
def test_resolution_mix(seed):
  member = resolution_mix(0.9, 0.6, 0.3, gamma=0.95, lam=0.8)
  theirs = loop.resolution_mix(case(seed)[0], 0.9, 0.6, 0.3, 0.95, 0.8)
  same(advantage(member, seed).advantage, theirs, seed)


@seeds
def test_reward_to_go_and_whitening(seed):
  made, _ = case(seed)
  base = loop.reward_to_go(made, 0.8)
  same(advantage(reward_to_go(0.8), seed).advantage, base, seed)
  for scale in ("token", "turn"):
    white = advantage(whiten(reward_to_go(0.8), SCALES[scale]), seed).advantage
    same(white, loop.whiten(made, base, scale), seed)


def test_a_single_unit_is_centred_only():
  """Returns to go 3, 2 of one trajectory: their mean is 2.5, and there is no deviation."""
  one = batches.lay_out([batches.by_hand([0, 1], [1.0, 2.0])])
  white = whiten(reward_to_go(), TRAJ)(one.batch, one.aux).advantage
  np.testing.assert_allclose(white, [[0.5, -0.5]], atol=1e-6)
  flat = batches.lay_out([batches.by_hand([0, 0], [0.7])])
  assert (np.asarray(whiten(reward_to_go(), TRAJ)(flat.batch, flat.aux).advantage) == 0).all()


@seeds
def test_endpoint_baseline(seed):
  made, _ = case(seed)
  credit = advantage(endpoint_baseline(min_valid=3), seed)
  a, target = loop.endpoint(made, 3)
  same(credit.advantage, a, seed)
  has = [[float(not math.isnan(x)) for x in t] for t in target]
  known = [[0.0 if math.isnan(x) else x for x in t] for t in target]
  count = sum(map(sum, has))
  assert count
  same(credit.value_weight, [[x / count for x in t] for t in has], seed)
  same(credit.value_target, known, seed)


@seeds
def test_invalid_critic_values_are_replaced_and_get_no_weight(seed):
  made = batches.ragged(seed)
  cut = next(r for r, one in enumerate(made) if one.truncated and one.group >= 1)
  made[cut].streams[-1].old_value[-1] = math.nan
  packed = batches.pack(made, batches.place(made, rows=12, length=40))
  with jax.debug_nans(False):
    credit = jax.device_get(jax.jit(endpoint_baseline(min_valid=3))(packed.batch, packed.aux))
    weigh = jax.jit(valid_endpoints(mean_over(TOKEN)))
    weight = jax.device_get(weigh(packed.batch, packed.aux, credit))
  a, _ = loop.endpoint(made, 3)
  np.testing.assert_allclose(credit.advantage, packed.layout.column(a, made), atol=1e-5)
  plain = loop.mean_weights(made, "token")
  plain[cut] = [0.0] * len(plain[cut])
  np.testing.assert_allclose(weight, packed.layout.column(plain, made), rtol=1e-5)
  assert np.isfinite(credit.value_target).all()


@seeds
def test_distillation_and_sums_of_advantages(seed):
  made, _ = case(seed)
  apart = minus(columns("ref", seed), columns("old", seed))
  theirs = [[x * (one.group >= 0) for x in d] for one, d in zip(made, apart, strict=True)]
  same(advantage(distillation(), seed).advantage, theirs, seed)
  member = weighted_sum((2.0, distillation()), (0.5, gae(TURN, lam=0.7, gamma=0.9)))
  credit = advantage(member, seed)
  a = loop.gae(made, "turn", 0.9, 0.7)[0]
  both = [
    [2 * x + y / 2 for x, y in zip(p, q, strict=True)] for p, q in zip(theirs, a, strict=True)
  ]
  same(credit.advantage, both, seed)
  assert credit.value_target is not None


def reshaped(seed, change):
  """Trajectories whose rewards `change(one)` replaced."""
  made = batches.ragged(seed)
  for one in made:
    one.rewards = change(one)
  return made


@seeds
def test_kl_to_go(seed):
  made, _ = case(seed)
  theirs = []
  for one, apart in zip(made, minus(columns("old", seed), columns("ref", seed)), strict=True):
    to_go, left = 0.0, []
    for kl in reversed(apart):
      to_go = -kl + 0.8 * to_go
      left.append(to_go * (one.group >= 0))
    theirs.append(left[::-1])
  same(advantage(kl_to_go(0.8), seed).advantage, theirs, seed)


@seeds
def test_kl_in_reward(seed):
  def change(one):
    cost = [0.0] * len(one.rewards)
    for (s, i), old, ref in zip(one.places(), one.actions("old"), one.actions("ref"), strict=True):
      cost[one.streams[s].turn[i]] += 0.1 * (old - ref)
    return [r - c for r, c in zip(one.rewards, cost, strict=True)]

  theirs = loop.gae(reshaped(seed, change), "turn", 0.9, 0.7)[0]
  same(advantage(kl_in_reward(gae(TURN, gamma=0.9, lam=0.7), 0.1), seed).advantage, theirs, seed)


@seeds
@pytest.mark.parametrize("saturate", [False, True])
def test_length_penalty(saturate, seed):
  def change(one):
    over = max(0.0, len(one.places()) - (6 - 4)) / 4
    over = min(over, 1.0) if saturate else over
    return [*one.rewards[:-1], one.rewards[-1] - 0.5 * over] if one.rewards else []

  theirs = loop.gae(reshaped(seed, change), "turn", 0.9, 0.7)[0]
  base = gae(TURN, gamma=0.9, lam=0.7)
  member = length_penalty(base, limit=6, buffer=4, coef=0.5, saturate=saturate)
  same(advantage(member, seed).advantage, theirs, seed)


def ratio(member, seed):
  made, packed = case(seed)
  d = minus(columns("logp", seed), columns("old", seed))
  sign = [[1.0 if (r + j) % 2 else -1.0 for j in range(len(x))] for r, x in enumerate(d)]
  column = packed.layout.column
  credit = Credit(column(sign, made))
  batch = LossBatch(packed.batch, packed.aux, credit, np.ones_like(credit.advantage))
  ours = jax.jit(member)(column(d, made), batch)
  return np.where(packed.batch.action, ours, 0), d, sign


@scales
@seeds
def test_ratios_at_each_scale(scale, seed):
  made, _ = case(seed)
  for member, how in [(at_scale, "mean"), (at_scale_product, "sum"),
                      (at_scale_arithmetic, "arithmetic"), (straight_through, "mean")]:  # fmt: skip
    ours, d, _ = ratio(member(SCALES[scale]), seed)
    same(ours, loop.per_unit(made, d, scale, how), seed)


@seeds
def test_mixed_and_clipped_ratios(seed):
  made, _ = case(seed)
  ours, d, _ = ratio(mix((0.25, per_token()), (0.75, at_scale(TURN))), seed)
  coarse = loop.per_unit(made, d, "turn", "mean")
  mixed = [
    [x / 4 + y * 3 / 4 for x, y in zip(p, q, strict=True)] for p, q in zip(d, coarse, strict=True)
  ]
  same(ours, mixed, seed)
  ours, d, sign = ratio(one_sided_clip(0.1, 0.2), seed)
  bounded = [
    [min(x, 0.2) if s > 0 else max(x, -0.1) for x, s in zip(p, q, strict=True)]
    for p, q in zip(d, sign, strict=True)
  ]
  same(ours, loop.per_unit(made, bounded, "traj", "mean"), seed)


def test_ratio_mixture_must_sum_to_one():
  with pytest.raises(ValueError, match=r"sum to 0\.9, expected 1"):
    mix((0.5, per_token()), (0.4, at_scale(TURN)))


def weight(member, seed, credit=None):
  made, packed = case(seed)
  credit = credit or Credit(packed.layout.column([[0.0] * len(o.places()) for o in made], made))
  return jax.device_get(jax.jit(member)(packed.batch, packed.aux, credit))


@seeds
@pytest.mark.parametrize("scale", [*SCALES, "group"])
def test_mean_weights(scale, seed):
  ours = weight(mean_over(SCALES.get(scale, GROUP)), seed)
  same(ours, loop.mean_weights(case(seed)[0], scale), seed, atol=1e-7)
  assert ours.sum() == pytest.approx(1.0, abs=1e-6)


@seeds
def test_other_denominators(seed):
  made, _ = case(seed)
  same(weight(nested_mean(TRAJ, TURN), seed), loop.nested_weights(made), seed, atol=1e-7)
  live = sum(bool(one.places()) for one in loop.scored(made))
  each = lambda x: [[x * (one.group >= 0)] * len(one.places()) for one in made]  # noqa: E731
  same(weight(fixed_length(7.0), seed), each(1 / (7 * live)), seed, atol=1e-7)
  same(weight(sum_over(20.0), seed), each(1 / 20), seed, atol=1e-7)
  whole = [one if not one.truncated else batches.Trajectory(-1, True, one.rewards, one.streams)
           for one in made]  # fmt: skip
  same(weight(drop_truncated(mean_over(TURN)), seed), loop.mean_weights(whole, "turn"), seed)


@seeds
def test_the_policy_waits_until_the_critic_explains(seed):
  made, packed = case(seed)
  credit = advantage(gae(TURN, critic_lam=1.0), seed)
  learns = np.asarray(credit.value_weight) > 0
  value, target = packed.aux.value[learns], credit.value_target[learns]
  explained = 1.0 - np.var(target - value) / np.var(target)
  plain = loop.mean_weights(made, "token")
  for least, open_ in ((explained - 0.01, True), (explained + 0.01, False)):
    found = weight(once_explained(mean_over(TOKEN), float(least)), seed, credit)
    same(found, plain if open_ else [[0.0] * len(row) for row in plain], seed, atol=1e-7)
  with pytest.raises(ValueError, match="needs a critic"):
    weight(once_explained(mean_over(TOKEN)), seed)
  for known, open_ in ((0.21, True), (0.2, False)):  # a run's count goes before the batch's own
    aux = packed.aux.replace(explained=np.float32(known))
    found = once_explained(mean_over(TOKEN), 0.2)(packed.batch, aux, credit)
    same(found, plain if open_ else [[0.0] * len(row) for row in plain], seed, atol=1e-7)


@seeds
def test_corrections(seed):
  made, packed = case(seed)
  base = loop.mean_weights(made, "turn")
  apart = minus(columns("old", seed), columns("behavior", seed))
  coarse = {how: loop.per_unit(made, apart, "traj", how) for how in ("sum", "mean")}
  kl = loop.per_unit(made, [[math.exp(x) - x - 1 for x in d] for d in apart], "traj", "mean")
  sign = [[1.0 if r % 2 else -1.0] * len(d) for r, d in enumerate(apart)]
  credit = Credit(packed.layout.column(sign, made))

  def times(factor, over):
    return [
      [w * factor(x) for w, x in zip(p, q, strict=True)] for p, q in zip(base, over, strict=True)
    ]

  inside = lambda low, high: lambda x: float(low <= math.exp(x) <= high)  # noqa: E731
  cut = lambda x: min(max(math.exp(x), 0.8), 1.2)  # noqa: E731
  by_turn, by_product, by_mean_of = mean_over(TURN), at_scale_product(TRAJ), at_scale(TRAJ)
  for member, theirs in [
    (truncated_is(by_turn, 1.2, 0.8), times(cut, apart)),
    (truncated_is(by_turn, 1.2, 0.8, by_product), times(cut, coarse["sum"])),
    (banded_is(by_turn, 0.7, 1.4), times(lambda x: math.exp(x) * inside(0.7, 1.4)(x), apart)),
    (masked_is(by_turn, high=1.3), times(inside(0, 1.3), coarse["sum"])),
    (masked_is(by_turn, 0.9, 1.1, by_mean_of), times(inside(0.9, 1.1), coarse["mean"])),
    (masked_by_kl(by_turn, 0.05), times(lambda x: float(x <= 0.05), kl)),
  ]:
    ours = weight(member, seed)
    same(ours, theirs, seed, atol=1e-7)
    assert 0 < ours.sum() != pytest.approx(1.0, abs=1e-3)
  stale = [
    [w * (not (a < 0 and -x > 0.01)) for w, a, x in zip(p, q, d, strict=True)]
    for p, q, d in zip(base, sign, coarse["mean"], strict=True)
  ]
  same(weight(drop_stale(by_turn, 0.01), seed, credit), stale, seed, atol=1e-7)


@seeds
def test_drop_covariant(seed):
  made, packed = case(seed)
  a, old = loop.group_relative(made, "std"), columns("old", seed)
  live = [one.group >= 0 for one in made]
  flat = lambda x: [v for one, xs in zip(live, x, strict=True) if one for v in xs]  # noqa: E731
  mean_a, mean_old = (sum(flat(x)) / len(flat(x)) for x in (a, old))
  covariance = [
    [(x - mean_a) * (y - mean_old) for x, y in zip(p, q, strict=True)]
    for p, q in zip(a, old, strict=True)
  ]
  candidate = [
    [keep and 0.1 < c < 2.0 for c in cs] for keep, cs in zip(live, covariance, strict=True)
  ]
  budget = max(1, int(0.1 * len(flat(a))))
  credit = advantage(group_relative(), seed)
  drops = []
  for salt in (0, 1):
    ours = weight(drop_covariant(mean_over(TOKEN), 0.1, 0.1, 2.0, salt), seed, credit)
    dropped = (ours == 0) & (weight(mean_over(TOKEN), seed) > 0)
    assert dropped.sum() == min(budget, sum(flat(candidate)))
    assert (packed.layout.column(candidate, made)[dropped] == 1).all()
    drops.append(dropped)
  assert (drops[0] != drops[1]).any()


@seeds
def test_mismatch_statistics(seed):
  made, packed = case(seed)
  live = [one for one in made if one.group >= 0]
  apart = [
    x - y for one in live for x, y in zip(one.actions("old"), one.actions("behavior"), strict=True)
  ]
  rho = [math.exp(x) for x in apart]
  kept = [r if 0.8 <= r <= 1.3 else 0.0 for r in rho]
  n = len(rho)
  expected = {
    "out_of_band": sum(k == 0 for k in kept) / n,
    "kl": sum(r - 1 - x for r, x in zip(rho, apart, strict=True)) / n,
    "largest": max(map(abs, apart)),
    "effective": (sum(kept) / n) ** 2 / (sum(k * k for k in kept) / n),
    "spread": np.std(kept),
  }
  ours = mismatch(packed.batch, packed.aux, 0.8, 1.3)
  assert set(ours) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
