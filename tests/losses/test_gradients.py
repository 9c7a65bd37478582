"""Gradients off-policy, in closed form: at ratio one every surrogate is REINFORCE, and hides bugs.

Includes one test for each stop_gradient of the package, and the identities between members.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.losses.advantages import group_relative, unscaled
from agentrl_jax.losses.compose import add, policy_loss, with_clip_high
from agentrl_jax.losses.corrections import banded_is
from agentrl_jax.losses.gae import gae, resolution_mix, two_scale_gae
from agentrl_jax.losses.penalties import (
  entropy_bonus,
  imitate_successes,
  kl_to_old,
  kl_to_ref,
  off_policy,
  value_and_gradient,
)
from agentrl_jax.losses.ratios import (
  at_scale,
  freeze_stale,
  one_sided_clip,
  per_token,
  straight_through,
)
from agentrl_jax.losses.surrogates import (
  clip,
  gated_reinforce,
  likelihood,
  reinforce,
  soft_gate,
  unclipped,
)
from agentrl_jax.losses.weights import mean_over
from agentrl_jax.ops.scales import TOKEN, TRAJ, TURN
from agentrl_jax.ops.stats import k1, k2, k3, mean
from agentrl_jax.types import Credit, LossBatch
from tests.reference import batches
from tests.reference import losses as loop

RATIOS = (0.3, 0.75, 0.95, 1.0, 1.05, 1.25, 2.5, 12.0)  # below, inside and above every band

SURROGATES = {
  "reinforce": (reinforce(), "reinforce", {}),
  "reinforce_capped": (reinforce(0.9, 1.2), "reinforce", {"low": 0.9, "cap": 1.2}),
  "clip": (clip(0.2, 0.28), "clip", {"low": 0.2, "high": 0.28}),
  "clip_dual": (clip(0.2, 0.28, 3.0), "clip", {"low": 0.2, "high": 0.28, "dual": 3.0}),
  "gated": (gated_reinforce(0.2, 0.28), "gated", {"low": 0.2, "high": 0.28}),
  "soft_gate": (soft_gate(1.0, 1.3), "soft_gate", {"positive": 1.0, "negative": 1.3}),
  "unclipped": (unclipped(), "unclipped", {}),
  "likelihood": (likelihood(), "likelihood", {}),
}


@pytest.mark.parametrize("name", list(SURROGATES))
def test_surrogates_off_policy(name):
  member, formula, parameters = SURROGATES[name]
  grid = [(r, a) for r in RATIOS for a in (1.7, -0.6, 0.0)]
  d = jnp.log(jnp.array([r for r, _ in grid], jnp.float32))
  advantage = jnp.array([a for _, a in grid], jnp.float32)
  losses, clipped = member(d, advantage)
  slopes = jax.grad(lambda d: member(d, advantage)[0].sum())(d)
  for i, (r, a) in enumerate(grid):
    expected = loop.surrogate(formula, r, a, math.log(r), **parameters)
    ours = (float(losses[i]), float(slopes[i]), bool(clipped[i]))
    assert ours[:2] == pytest.approx(expected[:2], abs=1e-5, rel=1e-5), (name, r, a)
    if a:
      assert ours[2] == expected[2], (name, r, a)


@pytest.mark.parametrize("name", list(SURROGATES))
def test_surrogates_on_policy_are_reinforce(name):
  member, _, _ = SURROGATES[name]
  advantage = jnp.array([1.5, -0.5], jnp.float32)
  slope = jax.grad(lambda d: member(d, advantage)[0].sum())(jnp.zeros(2))
  np.testing.assert_allclose(slope, -advantage, atol=1e-6)
  assert not member(jnp.zeros(2), advantage)[1].any()


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: clip(1.0, 0.2), "low=1.0, high=0.2"),
    (lambda: clip(0.2, -0.1), "low=0.2, high=-0.1"),
    (lambda: clip(0.2, 0.2, dual=1.0), "dual clip is 1.0, expected > 1"),
    (lambda: reinforce(2.0, 1.0), "low=2.0, cap=1.0"),
  ],
)
def test_impossible_ranges_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@functools.cache
def case():
  made = batches.ragged(3)
  return made, batches.pack(made, batches.one_a_row(made, rows=24, length=40))


def loss_batch(advantage=None, weight=None):
  """Everything with the given per-token advantages (default: alternating inside turns)."""
  made, packed = case()
  if advantage is None:
    advantage = [[(-1.0) ** j * (1 + j / 3) for j in range(len(o.places()))] for o in made]
  credit = Credit(packed.layout.column(advantage, made))
  weight = weight or mean_over(TOKEN)
  return LossBatch(packed.batch, packed.aux, credit, weight(packed.batch, packed.aux, credit))


def gradient(loss, batch):
  _, packed = case()
  return jax.device_get(jax.grad(lambda policy: loss(policy, batch)[0])(packed.policy))


def flat(lists):
  return list(itertools.chain.from_iterable(lists))


def log_ratios():
  made, _ = case()
  return [
    [p - o for p, o in zip(one.actions("logp"), one.actions("old"), strict=True)] for one in made
  ]


def weights_and_advantages(batch):
  made, packed = case()
  read = lambda x: [packed.layout.actions(np.asarray(x), r, one) for r, one in enumerate(made)]  # noqa: E731
  return read(batch.weight), read(batch.credit.advantage)


@pytest.mark.parametrize("scale", ["turn", "traj"])
def test_unit_ratio_shares_credit_and_straight_through_does_not(scale):
  """For -min(s A, ...), s = exp(mean d): at_scale gives each token the unit's mean of w A s."""
  made, packed = case()
  scales = {"turn": TURN, "traj": TRAJ}
  batch, d = loss_batch(), log_ratios()
  w, a = weights_and_advantages(batch)
  shared, own = [], []
  for one, ws, as_, ds in zip(made, w, a, d, strict=True):
    first, second = [0.0] * len(ds), [0.0] * len(ds)
    for unit in loop.units_of(one, scale):
      s = math.exp(sum(ds[j] for j in unit) / len(unit))
      for j in unit:
        first[j] = -sum(ws[i] * as_[i] * s for i in unit) / len(unit)
        second[j] = -ws[j] * as_[j] * s
    shared.append(first)
    own.append(second)
  for ratio, expected in [(at_scale, shared), (straight_through, own)]:
    g = gradient(policy_loss(ratio(scales[scale]), unclipped()), batch)
    np.testing.assert_allclose(g.logp, packed.layout.column(expected, made), atol=1e-6)
  assert np.abs(np.subtract(flat(shared), flat(own))).max() > 1e-3


def test_unit_ratio_and_straight_through_agree_where_credit_is_constant():
  made, _ = case()
  constant = [[(-1.0) ** r] * len(o.places()) for r, o in enumerate(made)]
  batch = loss_batch(constant, mean_over(TURN))
  for surrogate in (unclipped(), clip(0.02, 0.03)):
    one = gradient(policy_loss(at_scale(TURN), surrogate), batch)
    other = gradient(policy_loss(straight_through(TURN), surrogate), batch)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-6)


def test_clipped_turns_have_no_gradient_on_any_token():
  made, packed = case()
  constant = [[1.0] * len(o.places()) for o in made]
  batch = loss_batch(constant)
  g = gradient(policy_loss(at_scale(TURN), clip(0.01, 0.01)), batch).logp
  outside = loop.per_unit(made, log_ratios(), "turn", "mean")
  beyond = [[float(math.exp(x) > 1.01) for x in d] for d in outside]
  live = packed.layout.column([[float(o.group >= 0)] * len(o.places()) for o in made], made)
  expected = (live > 0) & (packed.layout.column(beyond, made) == 0)
  np.testing.assert_array_equal(g != 0, expected)
  assert 0 < sum(map(sum, beyond)) < live.sum()


def test_one_sided_clip_silences_only_the_clipped_tokens():
  """-A exp(mean of bounded d): each unclipped token gets -w_unit A s / n, clipped ones 0."""
  made, packed = case()
  constant = [[1.0 if r % 2 else -1.0] * len(o.places()) for r, o in enumerate(made)]
  batch = loss_batch(constant, mean_over(TRAJ))
  g = gradient(policy_loss(one_sided_clip(0.1, 0.15), unclipped()), batch).logp
  w, _ = weights_and_advantages(batch)
  expected = []
  for ds, as_, ws in zip(log_ratios(), constant, w, strict=True):
    bounded = [min(x, 0.15) if a > 0 else max(x, -0.1) for x, a in zip(ds, as_, strict=True)]
    s = math.exp(sum(bounded) / len(bounded)) if bounded else 1.0
    expected.append(
      [-wt * a * s * (x == b) for wt, a, x, b in zip(ws, as_, ds, bounded, strict=True)]
    )
  np.testing.assert_allclose(g, packed.layout.column(expected, made), atol=1e-6)
  assert any(
    x == 0 for e, w_ in zip(expected, w, strict=True) for x, y in zip(e, w_, strict=True) if y
  )


def test_freeze_stale_silences_negative_advantages_of_drifted_trajectories():
  made, packed = case()
  batch = loss_batch()
  plain = gradient(policy_loss(per_token(), unclipped()), batch).logp
  ours = gradient(policy_loss(freeze_stale(per_token(), 0.01), unclipped()), batch).logp
  _, a = weights_and_advantages(batch)
  drift = [[-x for x in d] for d in loop.per_unit(made, log_ratios(), "traj", "mean")]
  stale = [
    [float(x > 0.01 and adv < 0) for x, adv in zip(xs, as_, strict=True)]
    for xs, as_ in zip(drift, a, strict=True)
  ]
  mask = packed.layout.column(stale, made)
  np.testing.assert_allclose(ours, plain * (1 - mask), atol=1e-7)
  assert 0 < mask.sum() < packed.batch.action.sum()


def test_kl_penalties_off_policy():
  """d/dlogp of k1, k2, k3 is 1, delta, 1 - exp(-delta); (k3, k2) has k3's value and k2's slope."""
  made, packed = case()
  batch = loss_batch()
  w, _ = weights_and_advantages(batch)
  delta = [[p - q for p, q in zip(o.actions("logp"), o.actions("ref"), strict=True)] for o in made]
  ratio = [[math.exp(x) for x in d] for d in log_ratios()]
  value = {k1: lambda x: x, k2: lambda x: x * x / 2, k3: lambda x: math.exp(-x) - 1 + x}
  slope = {k1: lambda x: 1.0, k2: lambda x: x, k3: lambda x: 1 - math.exp(-x)}

  def of(*penalties):
    loss = policy_loss(per_token(), lambda d, a: (0.0 * d, jnp.zeros(d.shape, bool)), *penalties)
    return float(loss(packed.policy, batch)[0]), gradient(loss, batch).logp

  both = {**{e: (e, e) for e in (k1, k2, k3)}, value_and_gradient(k3, k2): (k3, k2)}
  for estimator, (v, s) in both.items():
    total, g = of(kl_to_ref(0.3, estimator))
    expected = sum(
      wt * 0.3 * value[v](x) for ws, xs in zip(w, delta, strict=True)
      for wt, x in zip(ws, xs, strict=True)
    )  # fmt: skip
    assert total == pytest.approx(expected, abs=1e-5)
    slopes = [
      [wt * 0.3 * slope[s](x) for wt, x in zip(ws, xs, strict=True)]
      for ws, xs in zip(w, delta, strict=True)
    ]
    np.testing.assert_allclose(g, packed.layout.column(slopes, made), atol=1e-6)
  # r k2, differentiated: r (k2 + delta).
  _, g = of(off_policy(kl_to_ref(0.3, k2)))
  slopes = [
    [wt * 0.3 * r * (x * x / 2 + x) for wt, r, x in zip(ws, rs, xs, strict=True)]
    for ws, rs, xs in zip(w, ratio, delta, strict=True)
  ]
  np.testing.assert_allclose(g, packed.layout.column(slopes, made), atol=1e-6)
  # k2 does not tell the direction, k3 does.
  for estimator, slope in ((k2, lambda x: x), (k3, lambda x: 1 - math.exp(-x))):
    old = [
      [wt * 0.3 * slope(x) for wt, x in zip(ws, xs, strict=True)]
      for ws, xs in zip(w, log_ratios(), strict=True)
    ]
    _, g = of(kl_to_old(0.3, estimator))
    np.testing.assert_allclose(g, packed.layout.column(old, made), atol=1e-6)


def test_on_policy_expectations_of_kl_gradients():
  """On a categorical, by enumeration: k2 gives grad KL(p||q), k3 grad KL(q||p), k1 nothing."""
  theta = jnp.array([0.3, -0.4, 0.9, 0.0])
  reference = jax.nn.log_softmax(jnp.array([-0.2, 0.5, 0.1, 0.7]))
  p = jax.nn.softmax(theta)

  def expected_penalty(estimator):
    per_sample = lambda t: (p * estimator(jax.nn.log_softmax(t) - reference)).sum()  # noqa: E731
    return jax.grad(per_sample)(theta)

  forward = jax.grad(lambda t: (jax.nn.softmax(t) * (jax.nn.log_softmax(t) - reference)).sum())
  backward = jax.grad(lambda t: (jnp.exp(reference) * (reference - jax.nn.log_softmax(t))).sum())
  np.testing.assert_allclose(expected_penalty(k1), jnp.zeros(4), atol=1e-6)
  np.testing.assert_allclose(expected_penalty(k2), forward(theta), atol=1e-6)
  np.testing.assert_allclose(expected_penalty(k3), backward(theta), atol=1e-6)
  mixed = value_and_gradient(k3, k2)
  np.testing.assert_allclose(expected_penalty(mixed), forward(theta), atol=1e-6)


def test_entropy_and_imitation_penalties():
  made, packed = case()
  batch = loss_batch()
  silent = lambda d, a: (0.0 * d, jnp.zeros(d.shape, bool))  # noqa: E731
  g = gradient(policy_loss(per_token(), silent, entropy_bonus(0.2)), batch)
  np.testing.assert_allclose(g.entropy, -0.2 * batch.weight, atol=1e-7)
  assert (g.logp == 0).all()
  g = gradient(policy_loss(per_token(), silent, imitate_successes(0.2, above=0.6)), batch)
  good = [[float(sum(o.rewards) > 0.6 and o.group >= 0)] * len(o.places()) for o in made]
  expected = -0.2 * np.asarray(batch.weight) * packed.layout.column(good, made)
  np.testing.assert_allclose(g.logp, expected, atol=1e-7)
  assert 0 < sum(map(sum, good)) < packed.batch.action.sum()


def test_a_token_of_weight_0_is_still_of_its_ratios_unit():
  """Its own ratio: no gradient, NaN unread. The trajectory's: the mean of the unit's w A."""
  packed = batches.lay_out([batches.by_hand([0, 0, 0], [1.0], behavior=[-1.0, -9.0, -1.0])])
  credit = Credit(np.float32(packed.batch.action))
  weight = banded_is(mean_over(TOKEN))(packed.batch, packed.aux, credit)
  np.testing.assert_allclose(weight, [[1 / 3, 0.0, 1 / 3]], atol=1e-7)
  batch = LossBatch(packed.batch, packed.aux, credit, weight)

  def slope(ratio, policy):
    return jax.grad(lambda p: policy_loss(ratio, clip())(p, batch)[0])(policy).logp

  broken = packed.policy.replace(logp=np.where(weight == 0, np.float32("nan"), packed.policy.logp))
  with jax.debug_nans(False):
    own, coarse = slope(per_token(), broken), slope(at_scale(TRAJ), broken)
  np.testing.assert_allclose(own, [[-1 / 3, 0.0, -1 / 3]], atol=1e-6)
  assert np.isnan(coarse).all()
  shared = slope(at_scale(TRAJ), packed.policy)
  np.testing.assert_allclose(shared, [[-2 / 9] * 3], atol=1e-6)


def test_a_controlled_clip_reads_the_controller():
  _, packed = case()
  batch = loss_batch()
  build = lambda high: policy_loss(per_token(), clip(0.2, high))  # noqa: E731
  ours = with_clip_high(build, start=0.1)
  set_to = batch.replace(aux=batch.aux.replace(clip_high=jnp.float32(0.3)))
  for given, high in [(batch, 0.1), (set_to, 0.3)]:
    value, metrics = ours(packed.policy, given)
    assert float(value) == pytest.approx(float(build(high)(packed.policy, batch)[0]), abs=1e-6)
    assert float(mean(metrics["clip_high"])) == pytest.approx(high)
  assert float(ours(packed.policy, batch)[0]) != float(ours(packed.policy, set_to)[0])


def test_added_losses_pool_their_metrics():
  _, packed = case()
  batch = loss_batch()
  one = policy_loss(per_token(), clip())
  value, metrics = one(packed.policy, batch)
  twice, pooled = add(one, one)(packed.policy, batch)
  assert float(twice) == pytest.approx(2 * float(value), abs=1e-6)
  for name in metrics:
    np.testing.assert_allclose(np.array(pooled[name]), 2 * np.array(metrics[name]), rtol=1e-6)


# Reduction identities


def advantage(member, made):
  packed = batches.lay_out(made)
  a = np.asarray(jax.jit(member)(packed.batch, packed.aux).advantage)
  return [packed.layout.actions(a, r, one) for r, one in enumerate(made)]


def close(ours, theirs):
  np.testing.assert_allclose(flat(ours), flat(theirs), atol=1e-5)


def shaped(turns, seed=0):
  """Scored trajectories with the given turn lengths, every other one truncated."""
  rng = np.random.default_rng(seed)
  return [
    batches.trajectory(rng, 0, lengths, truncated=bool(i % 2)) for i, lengths in enumerate(turns)
  ]


def test_one_token_a_turn_is_token_gae():
  made = shaped([[1] * 4, [1] * 3, [1] * 5])
  token = advantage(gae(TOKEN, gamma=0.9, lam=0.7), made)
  close(advantage(gae(TURN, gamma=0.9, lam=0.7), made), token)
  mixed = two_scale_gae(inner_lam=0.1, inner_gamma=0.2, outer_gamma=0.9, outer_lam=0.7)
  close(advantage(mixed, made), token)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_one_turn_is_return_plus_bootstrap_minus_first_value(lam):
  made = shaped([[4], [2], [3]])
  expected = [
    [sum(o.rewards) + 0.9 * o.bootstrap() - o.actions("old_value")[0]] * len(o.places())
    for o in made
  ]
  close(advantage(gae(TURN, gamma=0.9, lam=lam), made), expected)


def test_lambda_one_telescopes_and_lambda_zero_is_the_difference():
  made = shaped([[2, 1, 3], [1, 4], [2, 2, 2, 1]])
  starts = [[o.actions("old_value")[u[0]] for u in loop.units_of(o, "turn")] for o in made]
  one, zero = [], []
  for o, v in zip(made, starts, strict=True):
    ahead = [*v[1:], o.bootstrap()]
    for out, values in [
      (one, [sum(o.rewards[k:]) + o.bootstrap() - v[k] for k in range(len(v))]),
      (zero, [o.rewards[k] + ahead[k] - v[k] for k in range(len(v))]),
    ]:
      units = loop.units_of(o, "turn")
      out.append([values[k] for k, unit in enumerate(units) for _ in unit])
  close(advantage(gae(TURN, lam=1.0), made), one)
  close(advantage(gae(TURN, lam=0.0), made), zero)


def test_no_critic_and_a_terminal_reward_is_the_return_everywhere():
  made = [batches.by_hand([-1, 0, 0, -1, 1], [0.0, 0.7]), batches.by_hand([0, 1, 1], [0.0, 0.2])]
  for scale in (TOKEN, TURN, TRAJ):
    close(advantage(gae(scale, lam=1.0), made), [[0.7] * 3, [0.2] * 3])


def test_two_scales_meet_turn_gae_at_first_tokens_and_everywhere_if_values_are_flat():
  made = batches.ragged(5)
  two = advantage(two_scale_gae(outer_gamma=0.9, outer_lam=0.6), made)
  turn = advantage(gae(TURN, gamma=0.9, lam=0.6), made)
  first = lambda a, o: [a[u[0]] for u in loop.units_of(o, "turn")]  # noqa: E731
  close([first(a, o) for a, o in zip(two, made, strict=True)],
        [first(a, o) for a, o in zip(turn, made, strict=True)])  # fmt: skip
  assert (
    max(abs(x - y) for a, b in zip(two, turn, strict=True) for x, y in zip(a, b, strict=True)) > 0.1
  )
  for one in made:
    for piece in one.streams:
      piece.old_value[:-1] = [float(k) for k in piece.turn[:-1]]
  close(*[advantage(m, made) for m in (two_scale_gae(outer_lam=0.6), gae(TURN, lam=0.6))])
  equal = two_scale_gae(inner_gamma=0.9, inner_lam=0.8, outer_gamma=0.9, outer_lam=0.8)
  close(advantage(equal, made), advantage(gae(TOKEN, gamma=0.9, lam=0.8), made))


def test_resolution_mix_recombines():
  made = batches.ragged(5)
  token = advantage(gae(TOKEN, lam=0.8), made)
  close(advantage(resolution_mix(1.0, 1.0, 1.0, lam=0.8), made), token)
  parts = [advantage(resolution_mix(*w, lam=0.8), made) for w in np.eye(3).tolist()]
  close([[sum(x) for x in zip(*a, strict=True)] for a in zip(*parts, strict=True)], token)


@pytest.mark.parametrize("scale", [TOKEN, TURN])
def test_truncated_minus_terminated(scale):
  """A_k differs by gamma (gamma lambda)^(K - 1 - k) times the bootstrap value."""
  turn, values = [-1, 0, 0, -1, 1, 2, 2, 2, -1], [0.3, 1, 2, 9, -1, 0.5, 0.2, 0.1, 4.0]
  made = [
    batches.by_hand(turn, [0.1, 0.0, 1.0], truncated=cut, old_value=values) for cut in (True, False)
  ]
  cut, whole = advantage(gae(scale, gamma=0.9, lam=0.7), made)
  steps = [0, 0, 1, 2, 2, 2] if scale is TURN else list(range(6))
  last = steps[-1]
  expected = [0.9 * (0.9 * 0.7) ** (last - k) * 4.0 for k in steps]
  np.testing.assert_allclose(np.subtract(cut, whole), expected, atol=1e-5)


def test_reward_shifts_and_scales():
  made = batches.ragged(6)
  for one in made:
    one.rewards = one.rewards or [0.0]
  made = [one for one in made if one.places()]
  base = {
    kind: advantage(group_relative(kind() if kind else None), made) for kind in (None, unscaled)
  }
  for one in made:
    one.rewards[-1] += 3.0
  close(advantage(group_relative(), made), base[None])
  close(advantage(group_relative(unscaled()), made), base[unscaled])
  for one in made:
    one.rewards = [2.0 * r for r in one.rewards]
  close(advantage(group_relative(), made), base[None])
  close(advantage(group_relative(unscaled()), made), [[2 * x for x in a] for a in base[unscaled]])
