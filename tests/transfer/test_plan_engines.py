"""Plans into SGLang's own parameters: fused, stacked, repeated heads, quantised; and at scale."""

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.ops.quantize import OCP, Quantization
from agentrl_jax.transfer.engine_layout import (
  direct_target,
  expected_checksums,
  parameters,
  quantized_weights,
)
from agentrl_jax.transfer.layout import apply, assembly, check, full, invert
from agentrl_jax.transfer.plan import Shard, Tensor, plan, whole, with_dtypes
from agentrl_jax.transfer.stage import allocate, segment_view, source_layout, stage
from tests.reference import quantize as quantize_reference
from tests.reference import transfer as reference
from tests.transfer import large

EXPERTS, WIDTH, EMBED = 4, 6, 4


def experts(layer=1):
  """Published tensors of one layer's experts, and their stacked sources [layers, experts, ...]."""
  shapes = {
    "gate": (2, EXPERTS, EMBED, WIDTH), "up": (2, EXPERTS, EMBED, WIDTH),
    "down": (2, EXPERTS, WIDTH, EMBED),
  }  # fmt: skip
  made = [
    assembly(f"l.mlp.experts.{e}.{k}_proj.weight", k, shape, index=(layer, e), perm=(1, 0))
    for e in range(EXPERTS)
    for k, shape in shapes.items()
  ]
  return shapes, made


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_stacked_and_cut_as_the_engine_does(ranks):  # W17
  shapes, made = experts()
  rng = np.random.default_rng(0)
  arrays = {k: rng.normal(size=shape) for k, shape in shapes.items()}
  w13, w2 = parameters(made, ranks)
  assert [(p.assembly.dst, p.axis) for p in (w13, w2)] == [
    ("l.mlp.experts.w13_weight", 1), ("l.mlp.experts.w2_weight", 2),
  ]  # fmt: skip
  gate, up, down = (arrays[k][1].transpose(0, 2, 1) for k in ("gate", "up", "down"))
  by_rank = [np.split(part, ranks, axis=1) for part in (gate, up)]
  want = np.concatenate([part[r] for r in range(ranks) for part in by_rank], axis=1)
  check(w13.assembly, shapes)
  np.testing.assert_array_equal(apply(w13.assembly, arrays), want)
  np.testing.assert_array_equal(apply(w2.assembly, arrays), down)
  back = {k: np.where(np.arange(2)[:, None, None, None] == 1, 0, a) for k, a in arrays.items()}
  for parameter, value in ((w13, want), (w2, down)):
    invert(parameter.assembly, value, back)
  for k in arrays:
    np.testing.assert_array_equal(back[k], arrays[k])


def test_experts_out_of_order_or_incomplete_are_refused():  # W7
  _, made = experts()
  with pytest.raises(ValueError, match=r"l\.mlp\.experts needs gate_proj, up_proj, down_proj"):
    parameters([a for a in made if "up_proj" not in a.dst], 1)
  gone = [a for a in made if ".1.gate_proj" not in a.dst]
  with pytest.raises(ValueError, match=r"experts\.2\.gate_proj\.weight is not element 1 after"):
    parameters(gone, 1)


def test_checksums_of_experts_are_of_the_stacked_parameters():
  shapes, made = experts()
  rng = np.random.default_rng(1)
  arrays = {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
  tensors = {a.dst: apply(a, arrays) for a in made}
  got = expected_checksums(tensors, 2)
  for rank, checksums in enumerate(got):
    for parameter in parameters(made, 2):
      (target,) = direct_target([parameter], "float32", 2)
      index = tuple(slice(*span) for span in target.shards[rank].index)
      part = np.ascontiguousarray(apply(parameter.assembly, arrays)[index])
      assert checksums[target.name] == quantize_reference.sha(part)


def test_checksums_of_blocks_are_of_their_products():
  """Two ranks of one fused matrix of two blocks each, as SGLang hashes them."""
  rng = np.random.default_rng(2)
  tensors, parts = {}, []
  for name in ("gate_proj", "up_proj"):
    values = rng.normal(size=(256, 130)).astype(ml_dtypes.bfloat16).astype(np.float32)
    coded, scales = quantize_reference.quantize(values, *OCP)
    tensors[f"l.{name}.weight"] = coded.view(ml_dtypes.float8_e4m3fn)
    tensors[f"l.{name}.weight_scale_inv"] = scales
    table = quantize_reference.TABLES["float8_e4m3fn"].astype(np.float32)
    exact = [
      [table[coded[i, j]] * scales[i // 128, j // 128] for j in range(130)] for i in range(256)
    ]
    parts.append(np.array(exact, np.float32).astype(ml_dtypes.bfloat16))
  got = expected_checksums(tensors, 2, block=(128, 128))
  for rank in range(2):
    want = np.concatenate([np.split(part, 2)[rank] for part in parts])
    assert got[rank] == {"l.gate_up_proj.weight": quantize_reference.sha(want)}


def test_heads_are_repeated_where_there_are_fewer_than_ranks():
  """Two key-value heads of 2 rows on 4 ranks: ranks 0 and 1 hold the first, 2 and 3 the second."""
  shapes = {"q": (4, 8), "k": (4, 4), "v": (4, 4)}
  arrays = {k: np.arange(np.prod(s), dtype=float).reshape(s) + 100 * i
            for i, (k, s) in enumerate(shapes.items())}  # fmt: skip
  made = [assembly(f"l.{k}_proj.weight", k, s, perm=(1, 0)) for k, s in shapes.items()]
  (qkv,) = parameters(made, 4, kv_heads=2)
  check(qkv.assembly, shapes)
  got = np.split(apply(qkv.assembly, arrays), 4)
  for rank, value in enumerate(got):
    q, k, v = (arrays[name].T for name in "qkv")
    head = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    want = np.concatenate([q[2 * rank : 2 * rank + 2], k[head], v[head]])
    np.testing.assert_array_equal(value, want)
  with pytest.raises(ValueError, match=r"l.q_proj.weight of shape .* does not fuse over 3 ranks"):
    parameters(made, 3, kv_heads=2)


@pytest.mark.parametrize(
  "mesh", [{"fsdp": 4, "tensor": 2, "expert": 2}, {"expert": 8}, {"fsdp": 3, "tensor": 1}]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_mesh_paints_any_ranks_once(mesh, ranks, small):  # W1
  routed, _ = large_plan(mesh, ranks, layers=1, replicas=2)
  rng = np.random.default_rng(0)
  arrays = {t.name: rng.normal(size=t.shape) for t in large.source(mesh, layers=1)}
  held = {
    (t.name, s.rank): (s.index, arrays[t.name][tuple(slice(*span) for span in s.index)])
    for t in large.source(mesh, layers=1)
    for s in t.shards
  }
  got, paint = reference.run(routed, held)
  assert all((p == 1).all() for p in paint)
  want = {
    p.assembly.dst: apply(p.assembly, arrays)
    for p in parameters(large.published(1), ranks, kv_heads=large.KV_HEADS)
  }
  for segment, value in zip(routed.segments, got, strict=True):
    index = tuple(slice(*span) for span in segment.index)
    np.testing.assert_array_equal(value, want[segment.name][index])


@pytest.fixture
def small(monkeypatch):
  """The same tree with tiny sizes, so that loops over elements are short."""
  sizes = {"EMBED": 12, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 2, "EXPERTS": 8, "WIDTH": 8,
           "VOCAB": 64}  # fmt: skip
  for name, value in sizes.items():
    monkeypatch.setattr(large, name, value)
  monkeypatch.setattr(large, "TREE", large.tree())


def large_plan(mesh, ranks, layers, replicas):
  source, published = large.source(mesh, layers), large.published(layers)
  made = parameters(published, ranks, kv_heads=large.KV_HEADS)
  target = direct_target(made, "bfloat16", ranks, replicas)
  start = time.process_time()
  routed = plan(source, target, [p.assembly for p in made], bucket_bytes=1 << 28)
  return routed, time.process_time() - start


def test_a_model_of_thirty_billion_from_64_ranks_to_32():
  """Qwen3-30B-A3B from fsdp 4 x tensor 2 x expert 8 into TP8 x 4 replicas: under 10 s on a core."""
  routed, seconds = large_plan({"fsdp": 4, "tensor": 2, "expert": 8}, 8, large.LAYERS, 4)
  assert seconds < 10
  # Written by hand: two bytes an element; heads, experts, MLPs and vocabulary are cut over ranks,
  # key and value heads (4) are on two ranks each, norms and routers on all.
  attention = 2 * large.EMBED * large.HEADS * large.HEAD_DIM
  key_value = 2 * 2 * large.EMBED * large.KV_HEADS * large.HEAD_DIM
  expert = 3 * large.EXPERTS * large.EMBED * large.WIDTH
  everywhere = 8 * (large.EMBED * large.EXPERTS + 2 * large.EMBED + 2 * large.HEAD_DIM)
  layer = attention + key_value + expert + everywhere
  outside = 2 * large.VOCAB * large.EMBED + 8 * large.EMBED
  assert routed.nbytes == 4 * 2 * (large.LAYERS * layer + outside)
  assert sum(copy.nbytes for copy in routed.copies) == routed.nbytes
  sent = np.bincount([c.src_rank for c in routed.copies], [c.nbytes for c in routed.copies])
  assert sent.max() < 1.1 * sent.mean()  # of replicated sources all ranks send alike


def test_replicated_sources_are_balanced_over_all_their_holders():
  source = [Tensor("w", (64, 8), "float32", tuple(Shard(r, full((64, 8))) for r in range(5)))]
  rules = [assembly(f"t{n}", "w", (64, 8)) for n in range(50)]
  routed = plan(source, whole(rules, "float32"), rules, bucket_bytes=1 << 20)
  assert np.bincount([c.src_rank for c in routed.copies]).tolist() == [10] * 5


# Quantised targets.

SIZES = {"q_proj": (128, 256), "o_proj": (256, 256), "norm": (256,)}


def source_tree(seed=0, sizes=SIZES):
  rng = np.random.default_rng(seed)
  return {
    name: jnp.asarray(rng.normal(size=shape[::-1]), jnp.float32) for name, shape in sizes.items()
  }


def rules_of(tree):
  return [
    assembly(f"l.0.{name}.weight", f"['{name}']", array.shape, perm=(1, 0)[-array.ndim :])
    if array.ndim == 2
    else assembly(f"l.0.{name}.weight", f"['{name}']", array.shape)
    for name, array in tree.items()
  ]


def staged(tree, how, bucket_bytes=1 << 20, split=False):
  rules = rules_of(tree)
  quantized = quantized_weights(rules, how)
  made = plan(
    source_layout(tree), whole(rules, "bfloat16", quantized=quantized), rules,
    bucket_bytes=bucket_bytes, split=split, quantized=quantized,
  )  # fmt: skip
  done = stage(made, tree, allocate(made), "round")
  parts = {}
  for segment in made.segments:
    parts.setdefault(segment.name, []).append(
      segment_view(done.buffers[segment.rank, segment.bucket], segment)
    )
  return done, {n: v[0] if len(v) == 1 else np.concatenate(v) for n, v in parts.items()}


@pytest.mark.parametrize(
  "how", [OCP, Quantization(scale="power_of_two"), Quantization(block=None)], ids=str
)
def test_staged_bytes_and_scales_are_those_of_an_offline_conversion(how):  # W23
  tree = source_tree()
  _, got = staged(tree, how)
  scale = "weight_scale" if how.block is None else "weight_scale_inv"
  assert sorted(got) == sorted(
    ["l.0.norm.weight", *(f"l.0.{m}.{k}" for m in ("q_proj", "o_proj") for k in ("weight", scale))]
  )
  for name in ("q_proj", "o_proj"):
    values = np.asarray(tree[name].astype(jnp.bfloat16).astype(jnp.float32)).T
    coded, scales = quantize_reference.quantize(values, *how)
    np.testing.assert_array_equal(got[f"l.0.{name}.weight"].view(np.uint8), coded)
    np.testing.assert_array_equal(got[f"l.0.{name}.{scale}"], scales)


def test_where_sources_and_buckets_are_cut_does_not_change_a_byte():  # W11
  tree = source_tree(sizes={"q_proj": (160, 200), "norm": (200,)})
  plain, want = staged(tree, OCP)
  mesh = make_mesh(fsdp=2, tensor=2)
  spread = {
    name: jax.device_put(
      a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*("fsdp", "tensor")[: a.ndim]))
    )
    for name, a in tree.items()
  }  # 200 / 2 and 160 / 2: every block is cut
  done, _ = staged(spread, OCP)
  assert done.fingerprint == plain.fingerprint
  assert len({copy.src_rank for copy in done.plan.copies}) == 4
  cut, parts = staged(spread, OCP, bucket_bytes=10_000, split=True)
  assert max(segment.part[1] for segment in cut.plan.segments) == 4
  for name, value in want.items():
    np.testing.assert_array_equal(parts[name].view(np.uint8), value.view(np.uint8))


def test_ranks_get_their_own_blocks_and_cut_blocks_are_refused():
  tree = source_tree()
  rules = rules_of(tree)
  made = parameters([r for r in rules if "q_proj" not in r.dst], 2)
  names = {p.assembly.dst: OCP for p in made if "o_proj" in p.assembly.dst}
  target = with_dtypes(direct_target(made, "bfloat16", 2), names)
  routed = plan(
    source_layout(tree), target, [p.assembly for p in made], bucket_bytes=1 << 20, quantized=names,
    drop={"['q_proj']"},
  )  # fmt: skip
  done = stage(routed, tree, allocate(routed), "round")
  values = np.asarray(tree["o_proj"].astype(jnp.bfloat16).astype(jnp.float32)).T
  coded, scales = quantize_reference.quantize(values, *OCP)
  for segment in routed.segments:
    view = segment_view(done.buffers[segment.rank, segment.bucket], segment)
    rank = segment.rank
    if segment.name.endswith("o_proj.weight"):
      np.testing.assert_array_equal(view.view(np.uint8), np.split(coded, 2, axis=1)[rank])
    elif segment.name.endswith("scale_inv"):
      np.testing.assert_array_equal(view, np.split(scales, 2, axis=1)[rank])
  four = with_dtypes(direct_target(parameters(rules[1:2], 4), "bfloat16", 4), names)
  with pytest.raises(ValueError, match=r"l.0.o_proj.weight: shard .* cuts a block of \(128, 128\)"):
    plan(source_layout(tree)[1:2], four, rules[1:2], bucket_bytes=1 << 20, quantized=names,
         drop={"['q_proj']", "['norm']"})  # fmt: skip


def test_a_weight_that_is_not_finite_is_named_before_it_is_quantised():
  tree = source_tree()
  tree["o_proj"] = tree["o_proj"].at[200, 3].set(jnp.inf)
  with jax.debug_nans(False), pytest.raises(ValueError, match=r"o_proj.* that is not finite"):
    staged(tree, OCP)


def test_what_is_quantised_is_declared():
  def names(*published, how=OCP):
    return set(quantized_weights([assembly(n, n, s) for n, s in published], how))

  big, small = (256, 128), (64, 256)
  assert names(
    ("m.embed_tokens.weight", big), ("m.0.q_proj.weight", big), ("m.0.q_proj.bias", (256,)),
    ("m.0.k_proj.weight", small), ("m.0.input_layernorm.weight", (128,)),
    ("m.0.mlp.gate.weight", big), ("m.0.mlp.experts.3.down_proj.weight", big),
  ) == {"m.0.q_proj.weight", "m.0.mlp.experts.3.down_proj.weight"}  # fmt: skip
  with pytest.raises(ValueError, match=r"m.0.mixer.weight is neither among what is quantised nor"):
    names(("m.0.mixer.weight", big))
  rules = [assembly("m.q_proj.weight", "w", big)]
  source = [Tensor("w", big, "float32", (Shard(0, full(big)),))]
  with pytest.raises(
    ValueError, match=r"float8_e4m3fnuz of shape .* is not quantised to float8_e4"
  ):
    plan(source, [t._replace(dtype="float8_e4m3fnuz") for t in whole(rules, "bfloat16")], rules,
         bucket_bytes=1 << 20, quantized={"m.q_proj.weight": OCP})  # fmt: skip
  with pytest.raises(ValueError, match="float32 of w does not convert to float8_e4m3fn"):
    plan(source, [t._replace(dtype="float8_e4m3fn") for t in whole(rules, "bfloat16")], rules,
         bucket_bytes=1 << 20)  # fmt: skip
