"""Chunked log-probs and entropies against the dense formula: value, gradient, memory, sharding."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.analysis.planning import hlo, hlo_cost
from agentrl_jax.models.sharding import batch_sharding, make_mesh
from agentrl_jax.ops import logprobs
from agentrl_jax.ops.logprobs import token_logprobs

ROWS, LENGTH, WIDTH, VOCAB = 3, 37, 8, 64


def made(seed=0, rows=ROWS, length=LENGTH, width=WIDTH, vocab=VOCAB):
  """Two streams a row with padding between, and a mask that also asks for what cannot be given."""
  rng = np.random.default_rng(seed)
  sample = np.full((rows, length), -1, np.int32)
  for b in range(rows):
    cut = int(rng.integers(3, length // 2))
    sample[b, :cut] = 2 * b
    sample[b, cut + b : length - b] = 2 * b + 1
  return dict(
    hidden=rng.normal(0, 1, (rows, length, width)).astype(np.float32),
    unembedding=rng.normal(0, 0.5, (width, vocab)).astype(np.float32),
    tokens=rng.integers(0, vocab, (rows, length)).astype(np.int32),
    sample=sample,
    mask=rng.random((rows, length)) < 0.5,
  )


def dense(hidden, unembedding, tokens, sample, mask, temperature=1.0):
  """The formula with a [B, T, V] array; positions that have no predecessor are zero."""
  rows, length = tokens.shape
  ok = np.zeros((rows, length), bool)
  for b in range(rows):
    for t in range(1, length):
      ok[b, t] = mask[b, t] and sample[b, t] >= 0 and sample[b, t] == sample[b, t - 1]
  b, t = np.nonzero(ok)
  logits = jnp.einsum("btd,dv->btv", hidden.astype(jnp.float32), unembedding.astype(jnp.float32))
  log_p = jax.nn.log_softmax(logits[b, t - 1] / np.float32(temperature), axis=-1)
  put = lambda x: jnp.zeros((rows, length)).at[b, t].set(x)  # noqa: E731
  return put(log_p[np.arange(len(b)), tokens[b, t]]), put(-(jnp.exp(log_p) * log_p).sum(-1))


def weighted(function, args, cotangents, **options):
  """A scalar whose gradient tests both outputs at once."""
  a, b = cotangents

  def total(hidden, unembedding):
    logp, entropy = function(**args | dict(hidden=hidden, unembedding=unembedding), **options)
    return (a * logp).sum() + (b * entropy).sum()

  return jax.value_and_grad(total, argnums=(0, 1))(args["hidden"], args["unembedding"])


def cotangents(seed=1, shape=(ROWS, LENGTH)):
  return np.random.default_rng(seed).normal(0, 1, (2, *shape)).astype(np.float32)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 37, 100])
def test_values_and_gradients_equal_dense(chunk, temperature, kept, monkeypatch):
  """Whether the logits are kept for the backward pass or computed again."""
  if not kept:
    monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", 0)
  args = made()
  ours = token_logprobs(**args, temperature=temperature, chunk=chunk)
  theirs = dense(**args, temperature=temperature)
  np.testing.assert_allclose(ours, theirs, atol=1e-5)
  value, gradient = weighted(
    token_logprobs, args, cotangents(), temperature=temperature, chunk=chunk
  )
  value0, gradient0 = weighted(dense, args, cotangents(), temperature=temperature)
  np.testing.assert_allclose(value, value0, rtol=1e-5)
  for g, g0 in zip(gradient, gradient0, strict=True):
    np.testing.assert_allclose(g, g0, atol=1e-5)


def test_by_hand():
  """Two tokens of a vocabulary of two, logits (0, ln 3): p = (1/4, 3/4), H = ln 4 - 3/4 ln 3."""
  hidden = np.array([[[np.log(3.0)], [0.0], [9.0]]], np.float32)
  head = np.array([[0.0, 1.0]], np.float32)
  tokens, sample = np.array([[0, 1, 0]], np.int32), np.zeros((1, 3), np.int32)
  logp, entropy = token_logprobs(hidden, head, tokens, sample, np.ones((1, 3), bool))
  np.testing.assert_allclose(logp, [[0, np.log(3 / 4), np.log(1 / 2)]], atol=1e-6)
  np.testing.assert_allclose(entropy, [[0, np.log(4) - 0.75 * np.log(3), np.log(2)]], atol=1e-6)


def test_zero_where_there_is_no_predecessor_or_no_wish():
  args = made()
  logp, entropy = token_logprobs(**args)
  sample = args["sample"]
  before = np.pad(sample[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  silent = ~args["mask"] | (sample < 0) | (sample != before)
  assert silent[:, 0].all() and silent.any(1).all() and (~silent).any(1).all()
  assert (np.asarray(logp)[silent] == 0).all() and (np.asarray(entropy)[silent] == 0).all()
  assert (np.asarray(logp)[~silent] < 0).all() and (np.asarray(entropy)[~silent] > 0).all()


def test_hidden_states_that_are_not_asked_for_are_not_read():
  args = made()
  args["mask"][:] = False
  args["mask"][0, 2] = True  # reads hidden[0, 1] only
  hidden = np.full_like(args["hidden"], np.nan)
  hidden[0, 1] = args["hidden"][0, 1]
  expected = token_logprobs(**args)
  cot = cotangents()
  _, (clean, head) = weighted(token_logprobs, args, cot)
  with jax.debug_nans(False):
    ours = token_logprobs(**args | dict(hidden=hidden))
    _, (poisoned, poisoned_head) = weighted(token_logprobs, args | dict(hidden=hidden), cot)
  np.testing.assert_array_equal(ours, expected)
  np.testing.assert_array_equal(poisoned, clean)
  np.testing.assert_array_equal(poisoned_head, head)
  assert np.flatnonzero(np.abs(clean).sum((0, 2))).tolist() == [1]


def test_a_stray_infinity_is_not_hidden():
  args = made()
  args["hidden"][:] = np.inf
  with jax.debug_nans(False):
    logp, _ = token_logprobs(**args)
  assert not np.isfinite(logp).all()


def test_bfloat16_hidden_states_give_float32_results():
  args = made()
  half = args | {k: jnp.asarray(args[k], jnp.bfloat16) for k in ("hidden", "unembedding")}
  ours = token_logprobs(**half)
  assert all(x.dtype == jnp.float32 for x in ours)
  np.testing.assert_allclose(ours, dense(**half), atol=1e-5)  # products of bf16 are exact in f32
  _, gradient = weighted(token_logprobs, half, cotangents())
  _, gradient0 = weighted(dense, half, cotangents())
  for g, g0 in zip(gradient, gradient0, strict=True):
    assert g.dtype == jnp.bfloat16
    g, g0 = np.asarray(g, np.float32), np.asarray(g0, np.float32)
    np.testing.assert_allclose(g, g0, atol=2**-7 * np.abs(g0).max())  # logit gradients are bf16


def test_never_positive_however_sure():
  args = made()
  args["hidden"] *= 200
  logp, entropy = token_logprobs(**args)
  assert (np.asarray(logp) <= 0).all() and np.isfinite(entropy).all()
  assert (np.asarray(entropy) > -1e-3).all()


def test_temperature_must_be_positive():
  with pytest.raises(ValueError, match=r"temperature is 0.0, expected > 0"):
    token_logprobs(**made(), temperature=0.0)


def sized(hlo, least):
  """Shapes in an HLO text with at least `least` elements."""
  shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", hlo)}
  return sorted(shape for shape in shapes if np.prod(shape) >= least)


def test_no_buffer_of_all_logits(monkeypatch):
  """Compiled with gradient, nothing is as large as [B, T, V] where that is more than may be kept;
  the peak is an eighth of dense.
  """
  rows, length, width, vocab = 2, 256, 16, 4096
  monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", rows * length * vocab - 1)
  args = made(rows=rows, length=length, width=width, vocab=vocab)
  cot = cotangents(shape=(rows, length))

  def simple(hidden, unembedding, tokens, sample, mask):
    logits = jnp.einsum("btd,dv->btv", hidden, unembedding)[:, :-1]
    log_p = jax.nn.log_softmax(logits, axis=-1)
    logp = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    pad = ((0, 0), (1, 0))
    return jnp.pad(logp, pad), jnp.pad(-(jnp.exp(log_p) * log_p).sum(-1), pad)

  compiled = {}
  for name, function in [("ours", token_logprobs), ("dense", simple)]:
    options = dict(chunk=16) if name == "ours" else {}
    run = jax.jit(
      lambda h, u, f=function, o=options: weighted(
        f, args | dict(hidden=h, unembedding=u), cot, **o
      )
    )
    compiled[name] = run.lower(args["hidden"], args["unembedding"]).compile()
  assert not sized(compiled["ours"].as_text(), rows * (length - 1) * vocab)
  assert sized(compiled["dense"].as_text(), rows * (length - 1) * vocab)
  ours, theirs = (compiled[k].memory_analysis().temp_size_in_bytes for k in ("ours", "dense"))
  assert ours <= theirs / 8, (ours, theirs)


@pytest.mark.parametrize("axes", [("vocab",), ("rows", "vocab")], ids=str)
def test_sharded_vocabulary_equals_whole(axes):
  sizes = (8,) if len(axes) == 1 else (2, 4)
  mesh = Mesh(np.array(jax.devices()).reshape(sizes), axes)
  args = made(rows=4)
  cot = cotangents(shape=(4, LENGTH))
  run = lambda h, u: weighted(token_logprobs, args | dict(hidden=h, unembedding=u), cot, chunk=16)  # noqa: E731
  value, (d_hidden, d_head) = jax.jit(run)(args["hidden"], args["unembedding"])
  head = NamedSharding(mesh, PartitionSpec(None, "vocab"))
  rows = NamedSharding(mesh, PartitionSpec("rows") if "rows" in axes else PartitionSpec())
  sharded = jax.jit(run, out_shardings=(None, (rows, head)))
  placed = jax.device_put(args["hidden"], rows), jax.device_put(args["unembedding"], head)
  compiled = sharded.lower(*placed).compile()
  value1, (d_hidden1, d_head1) = compiled(*placed)
  np.testing.assert_allclose(value1, value, rtol=1e-5)
  np.testing.assert_allclose(d_hidden1, d_hidden, atol=1e-5)
  np.testing.assert_allclose(d_head1, d_head, atol=1e-5)
  gathered = [
    x for x in compiled.as_text().splitlines() if re.search(rf" all-gather.*\b{VOCAB}\]", x)
  ]
  assert not gathered, "the vocabulary must stay sharded"


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize(
  "axes",
  [{"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 2, "expert": 2}, {"fsdp": 2, "context": 4}],
  ids=str,
)
def test_on_a_mesh_the_head_moves_once(axes, chunk):
  """Values and gradients are those of one device; loop steps send nothing of the head's size."""
  rows, length, width, vocab = 8, 128, 16, 1024
  mesh = make_mesh(**axes)
  args, cot = made(rows=rows, length=length, vocab=vocab, width=width), cotangents(shape=(8, 128))

  def run(spread, hidden, unembedding):
    both = dict(hidden=hidden, unembedding=unembedding)
    return weighted(token_logprobs, args | both, cot, chunk=chunk, spread=spread)

  expected = run(None, args["hidden"], args["unembedding"])
  hidden = NamedSharding(mesh, PartitionSpec(*batch_sharding(mesh).spec, None))
  head = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
  jitted = jax.jit(lambda *a: run(batch_sharding(mesh), *a), out_shardings=(None, (hidden, head)))
  placed = jax.device_put(args["hidden"], hidden), jax.device_put(args["unembedding"], head)
  compiled = jitted.lower(*placed).compile()
  value, gradients = compiled(*placed)
  np.testing.assert_allclose(value, expected[0], rtol=1e-5)
  for ours, theirs in zip(gradients, expected[1], strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)

  program = hlo.parse(compiled.as_text())

  def sent(steps):
    cost = hlo_cost.count(program, dict(mesh.shape), trips=lambda _: steps)
    return sum(found.nbytes for found in cost.collectives)

  share = 1 - 1 / mesh.shape["fsdp"]
  assert sent(1) > width * vocab * 4 / mesh.shape["tensor"] * share  # it is gathered
  if chunk is not None:  # in 8 steps, none of which sends a part of it
    assert sent(2) - sent(1) < width * vocab * 4 / 8
