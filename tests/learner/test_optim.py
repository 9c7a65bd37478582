import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentrl_jax.learner.optim import adamw, decayed, only
from agentrl_jax.learner.state import abstract_state, make_state
from agentrl_jax.models.sharding import make_mesh
from tests.learner.toy import ToyWeights, toy_model


@pytest.fixture(autouse=True)
def _optax_is_not_strict():
  with jax.numpy_dtype_promotion("standard"):
    yield


def weights():
  return ToyWeights(embedding=jnp.ones((4, 2)), norm=jnp.ones(2), head=jnp.full((2, 4), 2.0))


def test_what_decays():
  assert decayed(weights()) == ToyWeights(embedding=False, norm=False, head=True)
  assert decayed({"unembedding": 0, "embedding": 0}) == {"unembedding": True, "embedding": False}
  zero = jax.tree.map(jnp.zeros_like, weights())
  optimizer = adamw(0.5, weight_decay=0.1)
  updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(weights()), weights())
  np.testing.assert_allclose(updates.head, -0.5 * 0.1 * 2.0)  # rate x decay x weight
  assert not updates.embedding.any() and not updates.norm.any()


def test_warmup_rises_to_the_learning_rate():
  """A gradient of one makes Adam's direction one, so an update shows the rate."""
  one = {"w": jnp.ones(1)}
  optimizer = adamw(0.8, warmup_steps=4, clip_norm=float("inf"), eps=0.0)
  state, rates = optimizer.init(one), []
  for _ in range(6):
    updates, state = optimizer.update(one, state, one)
    rates.append(-float(updates["w"][0]))
  np.testing.assert_allclose(rates, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=2e-5)


def test_only_trains_what_is_marked_and_clips_by_it_alone():
  mark = lambda w: ToyWeights(embedding=False, norm=False, head=True)  # noqa: E731
  optimizer = only(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), mark)
  huge = ToyWeights(embedding=jnp.full((4, 2), 1e6), norm=jnp.ones(2), head=jnp.full((2, 4), 0.1))
  updates, _ = optimizer.update(huge, optimizer.init(weights()), weights())
  np.testing.assert_allclose(updates.head, -0.1, rtol=1e-6)  # its own norm is below the limit
  assert not updates.embedding.any() and not updates.norm.any()
  # Frozen weights have no moments, and the state still finds its shardings.
  optimizer = only(adamw(1e-3), mark)
  mesh = make_mesh(fsdp=2, tensor=2)
  abstract = abstract_state(toy_model(), optimizer, mesh)
  matrices = [leaf for leaf in jax.tree.leaves(abstract.opt_state) if leaf.shape]
  assert [leaf.shape for leaf in matrices] == [(8, 16)] * 2
  assert all(leaf.sharding.shard_shape(leaf.shape) == (4, 8) for leaf in matrices)
  state = make_state(toy_model(), optimizer, mesh)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)


@pytest.mark.parametrize(
  ("options", "message"),
  [({"clip_norm": 0.0}, "clip_norm is 0.0"), ({"warmup_steps": -1}, "warmup_steps is -1")],
)
def test_values_out_of_range_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    adamw(1e-3, **options)
