"""Staging on forced devices: any source mesh gives the same bytes, cast to nearest even, hashed."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import llama
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.transfer.engine_layout import expected_checksums
from agentrl_jax.transfer.layout import assemblies, assembly
from agentrl_jax.transfer.plan import plan, whole
from agentrl_jax.transfer.stage import allocate, check_replicas, leaves, source_layout, stage
from tests.reference import transfer as reference

MODEL = llama.bind(
  llama.Config(
    vocab_size=64, embed=16, ffw=24, layers=2, heads=4, kv_heads=2, head_dim=4, max_position=64
  )
)

W = "['w']"  # the path of the one leaf of {"w": ...}


def staged(weights, dtype="float32", bucket_bytes=4000, rules=None):
  layout = source_layout(weights)
  rules = rules or assemblies(MODEL.rules, {t.name: t.shape for t in layout})
  made = plan(layout, whole(rules, dtype), rules, bucket_bytes=bucket_bytes, split=False)
  return stage(made, weights, allocate(made), "round"), rules


@pytest.fixture(scope="module")
def weights():
  return reference.random_weights(MODEL)


def test_every_tensor_is_what_its_rule_says(weights):  # W1
  got, rules = staged(weights)
  arrays = {name: np.asarray(leaf) for name, leaf in leaves(weights).items()}
  for segment, rule in zip(got.plan.segments, sorted(rules, key=lambda r: r.dst), strict=True):
    assert segment.name == rule.dst
    np.testing.assert_array_equal(got.view(segment), reference.published(rule, arrays))


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 2}])
def test_the_source_mesh_does_not_change_a_byte(weights, mesh):  # W11
  spread = jax.device_put(weights, shardings(MODEL, make_mesh(**mesh)))
  plain, _ = staged(weights)
  got, _ = staged(spread, bucket_bytes=1 << 20)  # nor does the size of a bucket
  assert got.fingerprint == plain.fingerprint
  assert got.hashes == plain.hashes
  assert len({copy.src_rank for copy in got.plan.copies}) > 1  # more than one device sends


def test_identity_in_bfloat16_is_bitwise():  # W2
  bits = np.arange(1 << 16, dtype=np.uint16)
  bits = bits[(bits & 0x7F80) != 0x7F80]  # finite
  finite = jnp.asarray(bits.view(jnp.bfloat16))
  got, _ = staged({"w": finite}, "bfloat16", 1 << 20, [assembly("t", W, finite.shape)])
  np.testing.assert_array_equal(got.view(got.plan.segments[0]).view(np.uint16), bits)


def test_the_cast_rounds_to_nearest_even():  # W32
  high = np.concatenate([np.arange(0, 0x7F80), np.arange(0x8000, 0xFF80)]).astype(np.uint32) << 16
  low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
  bits = (high[:, None] | low[None, :]).ravel()
  values = bits.view(np.float32)
  rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # in integers: add half, ties to the even upper half
  want = (rounded >> 16).astype(np.uint16)
  keep = ((want & 0x7FFF) < 0x7F80) & ((np.abs(values) >= 2.0**-126) | (values == 0))
  values, want = values[keep], want[keep]
  got, _ = staged({"w": jnp.asarray(values)}, "bfloat16", 1 << 24, [assembly("t", W, values.shape)])
  np.testing.assert_array_equal(got.view(got.plan.segments[0]).view(np.uint16), want)


def test_one_changed_weight_changes_its_hash_and_the_fingerprint(weights):  # W18, W24
  before, _ = staged(weights)
  changed = weights.replace(final_norm=weights.final_norm.at[3].add(1.0))
  after, _ = staged(changed)
  assert after.fingerprint != before.fingerprint
  differing = [
    s.name
    for s, a, b in zip(before.plan.segments, before.hashes, after.hashes, strict=True)
    if a != b
  ]
  assert differing == ["model.norm.weight"]


def test_a_weight_that_is_not_finite_is_named(weights):
  bad = weights.replace(final_norm=weights.final_norm.at[0].set(jnp.inf))
  with pytest.raises(ValueError, match="final_norm has a value that is not finite"):
    staged(bad)


def test_checksums_of_ranks_are_of_their_rows():
  """Two ranks: query, key and value rows of a rank together; output projections by columns."""
  rng = np.random.default_rng(0)
  shapes = {
    "model.embed_tokens.weight": (128, 4), "model.norm.weight": (4,),
    "l.0.q_proj.weight": (8, 4), "l.0.k_proj.weight": (4, 4), "l.0.v_proj.weight": (4, 4),
    "l.0.o_proj.weight": (4, 8),
  }  # fmt: skip
  tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  got = expected_checksums(tensors, 2)

  def sha(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]

  for rank in range(2):
    rows = [np.split(tensors[f"l.0.{k}_proj.weight"], 2)[rank] for k in "qkv"]
    assert got[rank] == {
      "model.embed_tokens.weight": sha(np.split(tensors["model.embed_tokens.weight"], 2)[rank]),
      "model.norm.weight": sha(tensors["model.norm.weight"]),
      "l.0.qkv_proj.weight": sha(np.concatenate(rows)),
      "l.0.o_proj.weight": sha(np.split(tensors["l.0.o_proj.weight"], 2, axis=1)[rank]),
    }


def test_replicas_that_differ_are_named():  # W25
  mesh = make_mesh(fsdp=2)
  placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  good = np.arange(6, dtype=np.float32)
  check_replicas({"norm": jax.device_put(good, placed)})
  for bad in (good + np.float32(1e-6), good[[1, 0, 2, 3, 4, 5]]):  # a last bit, a swap
    parts = [jax.device_put(a, d) for a, d in zip((good, bad), jax.devices()[:2], strict=True)]
    array = jax.make_array_from_single_device_arrays((6,), placed, parts)
    with pytest.raises(ValueError, match="norm: the copy on device 1 differs from that on 0"):
      check_replicas({"norm": array})
