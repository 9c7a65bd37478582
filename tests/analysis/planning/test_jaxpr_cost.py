"""Products of traced programs against the arithmetic of a transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.analysis.planning import jaxpr_cost
from agentrl_jax.analysis.planning.jaxpr_cost import known_leaves, path_of
from agentrl_jax.models import attention, llama, remat
from agentrl_jax.ops.logprobs import token_logprobs

CONFIG = llama.Config(
  vocab_size=64, embed=16, ffw=48, layers=3, heads=4, kv_heads=2, head_dim=8, max_position=64,
  tied=True,
)  # fmt: skip
MODEL = llama.bind(CONFIG)
ROWS, LENGTH = 2, 32


def flops(function, *args):
  return jaxpr_cost.count(jax.make_jaxpr(function)(*args), known_leaves(args)).flops


def transformer():
  """(FLOPs of a forward pass, of its weights' products alone), in the field's own arithmetic."""
  d, f, n, k, h = CONFIG.embed, CONFIG.ffw, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim
  weights = 2 * d * h * (n + k) + 3 * d * f  # query and output, key and value, gate up down
  tokens = ROWS * LENGTH
  products = CONFIG.layers * 2 * tokens * weights
  scores = CONFIG.layers * 2 * 2 * ROWS * n * LENGTH**2 * h  # every pair: plain attention
  # The angles of the rotary embedding are written as an outer product of positions.
  angles = 2 * tokens * h / 2
  return products + scores + angles, products + scores


def weights():
  return jax.tree.map(
    lambda s: np.zeros(s.shape, np.float32), MODEL.abstract(), is_leaf=lambda s: hasattr(s, "axes")
  )


def batch():
  sample = np.zeros((ROWS, LENGTH), np.int32)
  position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
  return sample, sample, position


def run(w, tokens, sample, position, **options):
  return MODEL.forward(w, tokens, sample, position, **options).sum()


def test_forward_and_backward_of_a_transformer():
  """Backward is twice forward, and with nothing saved the layers are computed once more, but for
  their last product, whose result no gradient asks for.
  """
  everything, layers = transformer()
  args = weights(), *batch()
  assert flops(run, *args) == everything
  assert flops(jax.grad(run), *args) == everything + 2 * layers
  down = CONFIG.layers * 2 * ROWS * LENGTH * CONFIG.ffw * CONFIG.embed
  kept_none = lambda *a: run(*a, remat=remat.save_nothing)  # noqa: E731
  assert flops(jax.grad(kept_none), *args) == everything + 3 * layers - down
  kept_products = lambda *a: run(*a, remat=remat.save_products)  # noqa: E731
  assert layers < flops(jax.grad(kept_products), *args) - everything - layers < 2 * layers


@pytest.mark.parametrize(("lengths", "blocks"), [([512], 10), ([256, 256], 6), ([128] * 4, 4)])
def test_blocks_that_attention_skips_are_not_counted(lengths, blocks):
  """Of 4 x 4 blocks of 128: the triangle of one sample, of two, of four; 2 products a block."""
  sample = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)[None]
  query, key = np.zeros((1, 512, 4, 8), np.float32), np.zeros((1, 512, 2, 8), np.float32)
  found = flops(attention.attend_blockwise, query, key, key, sample)
  assert found == blocks * 2 * 2 * 4 * 128 * 128 * 8


def test_what_the_data_does_not_tell_is_named_and_counted_once():
  def until(x):
    return jax.lax.while_loop(lambda h: h.sum() < 1e3, lambda h: h @ h, x)

  args = (jax.ShapeDtypeStruct((8, 8), jnp.float32),)
  counts = jaxpr_cost.count(jax.make_jaxpr(until)(*args), known_leaves(args))
  assert counts.flops == 2 * 8**3 and list(counts.unknown) == ["while"]


@pytest.mark.parametrize("differentiate", [False, True])
def test_loops_on_data_not_known_run_as_long_as_those_of_the_fullest_batch(differentiate):
  """Attention in blocks and log-probs say so, of rows that are one sample of actions."""
  rows, length, width, words = 2, 512, 16, 64
  head = np.ones((width, words), np.float32)

  def f(hidden, tokens, sample, action):
    heads = hidden.reshape(rows, length, 2, 8)
    mixed = attention.attend_blockwise(heads, heads, heads, sample).reshape(hidden.shape)
    logp, entropy = token_logprobs(mixed, head, tokens, sample, action, chunk=128)
    return (logp + entropy).sum()

  g = jax.grad(f) if differentiate else f
  hidden = jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
  tokens = np.zeros((rows, length), np.int32)
  known = hidden, tokens, tokens, np.ones((rows, length), bool)
  jaxpr = jax.make_jaxpr(g)(*known)
  told, untold = (
    jaxpr_cost.count(jaxpr, known_leaves(args))
    for args in (known, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), known))
  )
  assert told.flops == untold.flops and not untold.unknown
  for name, iterations in (
    ("jit(f)/jvp(at_most_4_iterations)/while", 4),
    ("jit(f)/while/body/triangle_of_4_blocks/while", 2.5),
    ("jit(f)/at_most_4_iterations/while/body/while", None),
  ):
    assert untold.iterations(name) == iterations


def test_the_branch_taken_or_the_dearest():
  def choose(i, x):
    return jax.lax.switch(i, [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x], x)

  x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  each = 2 * 8**3
  for index, expected in ((0, 0), (1, each), (2, 2 * each)):
    assert flops(choose, np.int32(index), x) == expected
  assert flops(choose, jax.ShapeDtypeStruct((), jnp.int32), x) == 2 * each


def test_mean_iterations_are_found_by_the_name_that_xla_gives():
  """An inner loop that runs 0, 1, 2, 3 times runs 1.5 times in the mean."""

  def f(x):
    def outer(h, i):
      return jax.lax.fori_loop(0, i, lambda _, g: g @ x, h), None

    with jax.named_scope("attention"):
      return jax.lax.scan(outer, x, jnp.arange(4))[0]

  x = np.ones((8, 8), np.float32)
  counts = jaxpr_cost.count(jax.make_jaxpr(f)(x), known_leaves((x,)))
  assert counts.flops == 6 * 2 * 8**3
  name = "jit(f)/jit(main)/attention/while/body/eval_jaxpr/while"
  assert counts.iterations(name) == 1.5 and counts.iterations("jit(f)/while") is None
  assert path_of("jit(step)/while/body/transpose(jvp(x))/mlp/while;jit(a)/b") == (
    "while/transpose/mlp/while"
  )
