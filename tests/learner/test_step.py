import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo, gspo, sft
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux
from tests.learner.toy import forward, random_batch, toy_model
from tests.reference.learner import adam_step, toy_gradient

MODEL = toy_model()
SGD = optax.sgd(1.0)  # weights move by minus the gradient, so a step shows it


def one_device():
  return make_mesh(data=1)


def lossy(algorithm, batch, seed=0):
  """A LossBatch off-policy: old log-probs differ from the model's."""
  rng = np.random.default_rng(seed)
  old = batch.behavior_logp + rng.normal(0, 0.1, batch.tokens.shape).astype(np.float32)
  return make_prepare(algorithm)(batch, Aux(old_logp=np.where(batch.action, old, 0.0)))


def moved(algorithm, batch, *, micro_rows, mesh=None, optimizer=SGD):
  mesh = one_device() if mesh is None else mesh
  state = make_state(MODEL, optimizer, mesh, seed=3)
  before = jax.device_get(state.weights)
  step = make_step(MODEL, optimizer, algorithm, mesh, micro_rows=micro_rows)
  state, metrics = step(state, batch)
  after = jax.device_get(state.weights)
  return jax.tree.map(np.subtract, after, before), jax.device_get(metrics)


@pytest.mark.parametrize("algorithm", [grpo(), gspo(), sft()], ids=["grpo", "gspo", "sft"])
def test_micro_batches_sum_to_the_whole(algorithm):
  batch = lossy(algorithm, random_batch(1))
  whole, whole_metrics = moved(algorithm, batch, micro_rows=8)
  for rows in (4, 1):
    parts, metrics = moved(algorithm, batch, micro_rows=rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts, whole)
    for name in whole_metrics:
      np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-5, atol=1e-6)
  assert max(np.abs(x).max() for x in jax.tree.leaves(whole)) > 1e-3


@pytest.mark.parametrize(
  "axes", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str
)
def test_eight_devices_equal_one(axes):
  batch = lossy(grpo(), random_batch(2, rows=16))
  one, one_metrics = moved(grpo(), batch, micro_rows=16)
  mesh = make_mesh(**axes)
  rows = 16 // (8 // axes.get("tensor", 1)) // 2  # two micro-batches
  many, metrics = moved(grpo(), batch, micro_rows=rows, mesh=mesh)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), many, one)
  for name in one_metrics:
    np.testing.assert_allclose(metrics[name], one_metrics[name], rtol=1e-5, atol=1e-6)


def test_two_steps_equal_numpy():
  batch = random_batch(4)
  loss_batch = lossy(sft(), batch)
  optimizer = adamw(0.1, clip_norm=0.05, b2=0.99, eps=1e-6, weight_decay=0.3, warmup_steps=2)
  state = make_state(MODEL, optimizer, one_device(), seed=5)
  expected = {k: np.asarray(v, np.float64) for k, v in vars(jax.device_get(state.weights)).items()}
  moments = [{k: np.zeros_like(v) for k, v in expected.items()} for _ in range(2)]
  step = make_step(MODEL, optimizer, sft(), one_device(), micro_rows=2, temperature=0.7)
  for k in range(2):
    loss, gradient = toy_gradient(expected, batch, temperature=0.7)
    state, metrics = step(state, loss_batch)
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    np.testing.assert_allclose(metrics["gradient_norm"].total, norm, rtol=1e-5)
    before = expected
    expected = adam_step(
      expected, gradient, moments, k, rate=0.1 * (k + 1) / 2, clip=0.05, b1=0.9, b2=0.99, eps=1e-6,
      decay={"head": 0.3},
    )  # fmt: skip
    change = np.sqrt(sum(((expected[n] - before[n]) ** 2).sum() for n in expected))
    np.testing.assert_allclose(metrics["update_norm"].total, change, rtol=1e-4)
    for name, value in expected.items():
      np.testing.assert_allclose(getattr(state.weights, name), value, rtol=1e-4, atol=1e-5)
  # sft's loss is relative to old_logp: sum of w (old - logp)
  shift = (np.asarray(loss_batch.weight) * np.asarray(loss_batch.aux.old_logp)).sum()
  np.testing.assert_allclose(metrics["loss"].total - shift, loss, rtol=1e-5)
  assert int(state.step) == 2 and int(state.skipped) == 0


def test_state_is_donated_and_compiled_once():
  optimizer = adamw(1e-3)
  step = make_step(MODEL, optimizer, grpo(), one_device(), micro_rows=4)
  state = make_state(MODEL, optimizer, one_device())
  old = jax.tree.leaves(state)
  with jax.debug_nans(False):  # which keeps what is donated, to run again without jit
    for seed in range(3):
      state, _ = step(state, lossy(grpo(), random_batch(seed)))
    assert all(leaf.is_deleted() for leaf in old)
    assert step._cache_size() == 1
    step(state, lossy(grpo(), random_batch(7, length=20)))
    assert step._cache_size() == 2


def test_a_step_that_is_not_finite_is_skipped_and_counted():
  optimizer = adamw(1e-2, weight_decay=0.1)
  step = make_step(MODEL, optimizer, grpo(), one_device(), micro_rows=4)
  state = make_state(MODEL, optimizer, one_device())
  good = lossy(grpo(), random_batch(8))
  state, metrics = step(state, good)
  assert metrics["skipped"].total == 0
  before = jax.device_get(state)
  poisoned = good.credit.replace(advantage=jnp.full_like(good.credit.advantage, 1e38))
  state, metrics = step(state, good.replace(credit=poisoned, weight=good.weight * 1e6))
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, after.weights, before.weights)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
  assert (after.step, after.skipped) == (2, 1)
  assert metrics["skipped"] == (1, 1) and metrics["loss"] == (0, 0)
  assert metrics["gradient_norm"] == (0, 0) and metrics["entropy"] == (0, 0)
  state, _ = step(state, good)
  assert (int(state.step), int(state.skipped)) == (3, 1)
  assert not np.array_equal(state.weights.head, before.weights.head)


def test_an_update_that_is_not_finite_is_skipped_and_counted():
  step = make_step(MODEL, optax.sgd(float("nan")), grpo(), one_device(), micro_rows=4)
  state = make_state(MODEL, optax.sgd(float("nan")), one_device())
  before = jax.device_get(state.weights)
  with jax.debug_nans(False):
    state, metrics = step(state, lossy(grpo(), random_batch(8)))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.weights), before)
  assert metrics["skipped"] == (1, 1) and metrics["update_norm"] == (0, 0)


def test_micro_batches_without_loss_are_not_run():
  """A model that would give NaN there shows that it was never asked."""

  def fragile(config, weights, tokens, sample, position, *, dtype):
    hidden = forward(config, weights, tokens, sample, position, dtype=dtype)
    return hidden / (tokens != 15).all().astype(dtype)

  model = toy_model(fragile)
  batch = random_batch(9, rows=6)
  tokens = np.minimum(batch.tokens, 14)
  tokens[2:4] = 15
  action = batch.action.copy()
  action[2:4] = False
  batch = batch.replace(tokens=tokens, action=action)
  loss_batch = lossy(grpo(), batch)
  state = make_state(model, SGD, one_device())
  evaluate = make_evaluate(model, one_device(), rows=2)
  policy = evaluate(state.weights, batch)
  assert np.isfinite(policy.logp).all() and (np.asarray(policy.logp)[2:4] == 0).all()
  assert (np.asarray(policy.logp)[batch.action] < 0).all()
  step = make_step(model, SGD, grpo(), one_device(), micro_rows=2)
  state, metrics = step(state, loss_batch)
  metrics = jax.device_get(metrics)
  assert metrics["skipped"].total == 0 and metrics["entropy"].count == batch.action.sum()
  # A whole batch without loss: nothing to add up, nothing moves.
  before = jax.device_get(state.weights)
  state, metrics = step(state, loss_batch.replace(weight=jnp.zeros_like(loss_batch.weight)))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.weights), before)
  assert metrics["loss"] == (0, 1) and metrics["entropy"] == (0, 0)


def test_bfloat16_compute_keeps_float32_state_and_a_close_gradient():
  batch = lossy(sft(), random_batch(10))
  exact, _ = moved(sft(), batch, micro_rows=8)
  state = make_state(MODEL, SGD, one_device(), seed=3)
  before = jax.device_get(state.weights)
  step = make_step(MODEL, SGD, sft(), one_device(), micro_rows=2, dtype=jnp.bfloat16)
  state, _ = step(state, batch)
  for name, change in vars(exact).items():
    value = getattr(state.weights, name)
    assert value.dtype == jnp.float32
    got = np.asarray(value) - getattr(before, name)
    np.testing.assert_allclose(got, change, atol=0.02 * np.abs(change).max())


def test_errors_name_the_value():
  batch = random_batch(11, rows=6)
  aux = Aux(old_logp=batch.behavior_logp)
  with pytest.raises(ValueError, match="needs ref_logp, which Aux does not hold"):
    make_prepare(grpo(kl=0.1))(batch, aux)
  with pytest.raises(ValueError, match="needs refs; Aux has old_logp, ref_logp, value"):
    make_prepare(grpo()._replace(needs=frozenset({"refs"})))
  loss_batch = make_prepare(grpo())(batch, aux)
  mesh = make_mesh(data=2)
  state = make_state(MODEL, SGD, mesh)
  message = r"6 rows, expected a multiple of 4 \(micro_rows 2 x 2 data shards\)"
  with pytest.raises(ValueError, match=message):
    make_step(MODEL, SGD, grpo(), mesh, micro_rows=2)(state, loss_batch)
  with pytest.raises(ValueError, match=message):
    make_evaluate(MODEL, mesh, rows=2)(state.weights, batch)
  with pytest.raises(ValueError, match="micro_rows is 0"):
    make_step(MODEL, SGD, grpo(), mesh, micro_rows=0)(state, loss_batch)
