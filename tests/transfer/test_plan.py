"""The routing plan: exactly once, balanced, deterministic, and errors that name the tensor."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.transfer.engine_layout import direct_target, parameters
from agentrl_jax.transfer.layout import Assembly, Piece, apply, assembly, check, full, fuse, invert
from agentrl_jax.transfer.plan import Shard, Tensor, in_parts, plan, published_shapes, whole
from tests.reference import transfer as reference

ITEM = 4


def cuts(draw, length):
  """An axis cut in up to three uneven intervals."""
  inner = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
  edges = [0, *sorted(inner), length]
  return list(itertools.pairwise(edges))


def shards_of(draw, shape, ranks=None):
  """A grid of shards, each on one or two ranks (replicas) when `ranks` is None."""
  cells = list(itertools.product(*(cuts(draw, n) for n in shape)))
  out, rank = [], 0
  for cell in cells:
    for _ in range(draw(st.integers(1, 2))):
      out.append(Shard(rank, cell))
      rank += 1
  return tuple(out)


@st.composite
def problems(draw):
  """A source tensor, the tensors unstacked from it, and any uneven target layout."""
  layers = draw(st.integers(1, 2))
  shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
  perm = tuple(draw(st.permutations(range(len(shape)))))
  view = tuple(shape[axis] for axis in perm)
  merge = draw(st.integers(0, len(view) - 1))  # merges axes [merge, merge + 1]
  merged = (
    view
    if merge + 1 >= len(view)
    else (*view[:merge], view[merge] * view[merge + 1], *view[merge + 2 :])
  )
  source = Tensor("w", (layers, *shape), "float32", shards_of(draw, (layers, *shape)))
  rules = [
    assembly(f"t{n}", "w", source.shape, index=(n,), perm=perm, shape=merged) for n in range(layers)
  ]
  target = [Tensor(r.dst, r.shape, "float32", shards_of(draw, r.shape)) for r in rules]
  return source, target, rules


def values(shape, start=0):
  return np.arange(start, start + np.prod(shape, dtype=int), dtype=float).reshape(shape)


def box(array, index):
  return array[tuple(slice(*span) for span in index)]


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(1, 6))
def test_paints_every_element_once_with_the_right_value(problem, rows):  # W1, W10, W11
  source, target, rules = problem
  widest = max(ITEM * int(np.prod(t.shape[1:])) for t in target)
  made = plan([source], target, rules, bucket_bytes=rows * widest)
  whole_source = values(source.shape)
  held = {("w", s.rank): (s.index, box(whole_source, s.index)) for s in source.shards}
  got, paint = reference.run(made, held)
  want = {r.dst: reference.published(r, {"w": whole_source}) for r in rules}
  for segment, painted, value in zip(made.segments, paint, got, strict=True):
    assert (painted == 1).all()
    np.testing.assert_array_equal(value, box(want[segment.name], segment.index))
    assert segment.offset % 16 == 0
    assert segment.nbytes <= rows * widest
  covered = {}
  for segment in made.segments:
    covered[segment.name, segment.rank] = (
      covered.get((segment.name, segment.rank), 0) + segment.nbytes
    )
  for tensor in target:
    for shard in tensor.shards:
      assert covered[tensor.name, shard.rank] == ITEM * np.prod([b - a for a, b in shard.index])


@settings(max_examples=60, deadline=None)
@given(problems())
def test_digest_ignores_order(problem):  # W29
  source, target, rules = problem
  shuffled = [t._replace(shards=tuple(reversed(t.shards))) for t in reversed(target)]
  turned = source._replace(shards=tuple(reversed(source.shards)))
  first = plan([source], target, rules, bucket_bytes=1 << 20)
  second = plan([turned], shuffled, list(reversed(rules)), bucket_bytes=1 << 20)
  assert first == second


def test_digest_is_equal_in_another_process():  # W29
  program = (
    "from agentrl_jax.transfer.layout import assembly\n"
    "from agentrl_jax.transfer.plan import *\n"
    "r = [assembly('a', 'w', (4, 6), perm=(1, 0)), assembly('b', 'v', (3,))]\n"
    "s = [Tensor('v', (3,), 'float32', (Shard(0, ((0, 3),)),)),\n"
    "     Tensor('w', (4, 6), 'float32',\n"
    "            (Shard(0, ((0, 2), (0, 6))), Shard(1, ((2, 4), (0, 6)))))]\n"
    "digest = plan(s, whole(r, 'bfloat16'), r, bucket_bytes=64).digest\n"
  )
  scope: dict = {}
  exec(program, scope)
  done = subprocess.run(
    [sys.executable, "-c", program + "print(digest)"], capture_output=True, text=True, timeout=60
  )
  assert done.stdout.strip() == scope["digest"], done.stderr


def test_replicas_share_the_work():
  rules = [assembly(f"t{n}", f"w{n}", (8,)) for n in range(6)]
  source = [
    Tensor(f"w{n}", (8,), "float32", tuple(Shard(r, ((0, 8),)) for r in range(3))) for n in range(6)
  ]
  made = plan(source, whole(rules, "float32"), rules, bucket_bytes=1 << 10)
  assert [copy.src_rank for copy in made.copies] == [0, 1, 2, 0, 1, 2]  # least bytes, lowest rank


@pytest.mark.parametrize(
  ("rows", "parts", "buckets"),
  [(8, 1, 1), (7, 2, 2), (4, 2, 2), (3, 3, 3), (1, 8, 8)],  # exactly a bucket, one row more, ...
)
def test_a_tensor_around_the_size_of_a_bucket(rows, parts, buckets):  # W10
  rules = [assembly("t", "w", (8, 4))]
  source = [Tensor("w", (8, 4), "float32", (Shard(0, full((8, 4))),))]
  made = plan(source, whole(rules, "float32"), rules, bucket_bytes=rows * 16)
  assert [s.part for s in made.segments] == [(k, parts) for k in range(parts)]
  assert len(made.buckets) == buckets
  unsplit = plan(source, whole(rules, "float32"), rules, bucket_bytes=rows * 16, split=False)
  assert [s.part for s in unsplit.segments] == [(0, 1)]
  with pytest.raises(ValueError, match="t: one row is 16 bytes, more than a bucket of 15"):
    plan(source, whole(rules, "float32"), rules, bucket_bytes=15)


@pytest.mark.parametrize(
  ("name", "size"), [("layers." + "x" * 494, 503), ("ä" * 83 + "x", 501)]
)  # fmt: skip
def test_a_name_too_long_for_the_wire_is_refused_by_name(name, size):
  def planned(name):
    rules = [assembly(name, "w", (2,))]
    source = [Tensor("w", (2,), "float32", (Shard(0, full((2,))),))]
    return plan(source, whole(rules, "float32"), rules, bucket_bytes=1 << 10)

  assert planned(name[:-3]).segments[0].name == name[:-3]
  message = f"tensor {name[:100]}.*: its name has {size} bytes as JSON, at most 500 are sent"
  with pytest.raises(ValueError, match=message):
    planned(name)


def test_zero_sized_and_scalar_tensors():  # W10
  rules = [assembly("empty", "e", (0, 4)), assembly("scalar", "s", ())]
  source = [
    Tensor("e", (0, 4), "float32", ()),
    Tensor("s", (), "float32", (Shard(3, ()),)),
  ]
  made = plan(source, whole(rules, "float32"), rules, bucket_bytes=64)
  assert [(s.name, s.nbytes) for s in made.segments] == [("empty", 0), ("scalar", 4)]
  assert [(c.src_name, c.src_rank, c.nbytes) for c in made.copies] == [("s", 3, 4)]


def test_a_tied_source_is_held_once_and_written_to_each_name():  # W21
  rules = [assembly("embed", "w", (6, 2)), assembly("head", "w", (6, 2))]
  source = [Tensor("w", (6, 2), "float32", (Shard(0, full((6, 2))),))]
  made = plan(source, whole(rules, "float32"), rules, bucket_bytes=1 << 10)
  got, _ = reference.run(made, {("w", 0): (full((6, 2)), values((6, 2)))})
  np.testing.assert_array_equal(got[0], got[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_layouts_invert_exactly(ranks):  # W17
  rng = np.random.default_rng(0)
  shapes = {"q": (2, 5, 8), "k": (2, 5, 4), "v": (2, 5, 4)}
  sources = {name: rng.normal(size=shape) for name, shape in shapes.items()}
  parts = [assembly(f"{name}_proj", name, shapes[name], index=(1,), perm=(1, 0)) for name in "qkv"]
  fused = fuse("qkv_proj", parts, ranks)
  check(fused, shapes)
  out = apply(fused, sources)
  q, k, v = (sources[name][1].T for name in "qkv")
  by_hand = [
    np.split(part, ranks)[rank] for rank in range(ranks) for part in (q, k, v)
  ]  # each rank's query, key and value rows lie together
  np.testing.assert_array_equal(out, np.concatenate(by_hand))
  np.testing.assert_array_equal(out, reference.published(fused, sources))
  back = {name: np.where(np.arange(2)[:, None, None] == 1, 0, a) for name, a in sources.items()}
  invert(fused, out, back)
  for name in "qkv":
    np.testing.assert_array_equal(back[name], sources[name])


def test_a_direct_plan_gives_each_rank_its_own_shard():
  shapes = {"q": (4, 8), "k": (4, 4), "v": (4, 4), "o": (8, 4), "n": (4,)}
  names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "n": "input_layernorm"}
  hf = [
    assembly(f"l.0.{names[k]}.weight", k, s, perm=None if k == "n" else (1, 0))
    for k, s in shapes.items()
  ]
  made = parameters(hf, 2)
  assert [(p.assembly.dst, p.axis) for p in made] == [
    ("l.0.input_layernorm.weight", None), ("l.0.o_proj.weight", 1), ("l.0.qkv_proj.weight", 0),
  ]  # fmt: skip
  source = [
    Tensor(k, s, "float32", (Shard(0, ((0, 2), *full(s[1:]))), Shard(1, ((2, s[0]), *full(s[1:])))))
    for k, s in shapes.items()
  ]
  routed = plan(
    source, direct_target(made, "float32", 2), [p.assembly for p in made], bucket_bytes=1 << 10
  )
  arrays = {k: values(s, 100 * i) for i, (k, s) in enumerate(shapes.items())}
  held = {
    (t.name, s.rank): (s.index, box(arrays[t.name], s.index)) for t in source for s in t.shards
  }
  got, paint = reference.run(routed, held)
  assert all((p == 1).all() for p in paint)
  by_name = {(s.name, s.rank): g for s, g in zip(routed.segments, got, strict=True)}
  for rank in range(2):
    rows = [np.split(arrays[k].T, 2)[rank] for k in "qkv"]
    np.testing.assert_array_equal(by_name["l.0.qkv_proj.weight", rank], np.concatenate(rows))
    np.testing.assert_array_equal(
      by_name["l.0.o_proj.weight", rank], np.split(arrays["o"].T, 2, axis=1)[rank]
    )
    np.testing.assert_array_equal(by_name["l.0.input_layernorm.weight", rank], arrays["n"])


W = Tensor("w", (4, 2), "float32", (Shard(0, full((4, 2))),))
RULE = assembly("t", "w", (4, 2))
TARGET = Tensor("t", (4, 2), "float32", (Shard(0, full((4, 2))),))


def source(*boxes):
  return [W._replace(shards=tuple(Shard(rank, index) for rank, index in enumerate(boxes)))]


def target(*boxes):
  return [TARGET._replace(shards=tuple(Shard(0, index) for index in boxes))]


def made_of(*pieces):
  return [Assembly("t", (4, 2), (4, 2), tuple(Piece("w", *piece) for piece in pieces))]


ALL, TOP, PAIR = full((4, 2)), ((0, 3), (0, 2)), (0, 2)


@pytest.mark.parametrize(
  ("sources", "targets", "rules", "message"),
  [
    ([W], [TARGET], [], "target tensor t has no assembly"),  # W7
    ([W], [], [RULE], "assembly for t: the target has no such tensor"),
    ([], [TARGET], [RULE], "t: its source w is not in the weight tree"),
    ([W, W._replace(name="x")], [TARGET], [RULE], "source tensor x is in no assembly"),
    ([W, W], [TARGET], [RULE], "w is repeated among the source tensors"),
    ([W], [TARGET, TARGET], [RULE], "t is repeated among the target tensors"),
    ([W], [TARGET], [RULE, RULE], "t is repeated"),
    ([W], [TARGET._replace(shape=(2, 4))], [RULE], r"t: target has shape \(2, 4\)"),
    ([W], [TARGET._replace(dtype="int32")], [RULE], "t: float32 of w does not convert to int32"),
    ([W], [TARGET._replace(dtype="float7")], [RULE], "t: unknown dtype float7"),
    ([W._replace(shape=(5, 2))], [TARGET], [RULE], "w: source shards end at 4 of 5"),
    (source(TOP, ((2, 4), PAIR)), [TARGET], [RULE], "w: source shards overlap at 2 on axis 0"),
    (source(((0, 1), PAIR), ((2, 4), PAIR)), [TARGET], [RULE], "w: source shards leave a gap at 2"),
    (source(((0, 2), (0, 1)), ((2, 4), (1, 2))), [TARGET], [RULE], "w: no rank holds"),
    ([W], target(((0, 5), PAIR)), [RULE], "t: shard .* is outside"),
    ([W], target(ALL, ((1, 2), PAIR)), [RULE], "t: rank 0 has overlapping shards"),
    ([W], [TARGET], made_of(((0, 1), TOP, TOP)), "t: 6 of its 8 elements have a source"),
    ([W], [TARGET], made_of(*[((0, 1), ALL, ALL)] * 2), "t: pieces .* overlap"),
    ([W], [TARGET], made_of(((1, 0), ALL, ALL)), "t: w.* does not fit"),
  ],
)
def test_errors_name_the_tensor(sources, targets, rules, message):  # W7
  with pytest.raises(ValueError, match=message):
    plan(sources, targets, rules, bucket_bytes=1 << 10)


def test_drop_is_declared():
  extra = W._replace(name="value_head")
  made = plan([W, extra], [TARGET], [RULE], bucket_bytes=64, drop={"value_head"})
  assert {c.src_name for c in made.copies} == {"w"}
  with pytest.raises(ValueError, match="source tensor w is dropped, but"):
    plan([W, extra], [TARGET], [RULE], bucket_bytes=64, drop={"value_head", "w"})


def test_cost_follows_the_copies():
  """512 experts on 64 ranks: 512 copies, found without trying each of 512 x 512 pairs."""
  count, ranks = 512, 64
  each = count // ranks
  source = [
    Tensor("w", (count, 4), "float32",
           tuple(Shard(r, ((r * each, (r + 1) * each), (0, 4))) for r in range(ranks)))
  ]  # fmt: skip
  rules = [assembly(f"e{n}", "w", (count, 4), index=(n,)) for n in range(count)]
  made = plan(source, whole(rules, "float32"), rules, bucket_bytes=1 << 20)
  assert len(made.copies) == count


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 3))
def test_parts_of_several_senders_paint_every_element_once(problem, senders):  # W1, W11
  source, _, rules = problem
  made = plan([source], whole(rules, "float32"), rules, bucket_bytes=64, split=False)
  sender = {shard.rank: shard.rank % senders for shard in source.shards}
  shapes = published_shapes(made)
  try:
    parts, owners = in_parts(made, sender, shapes, bucket_bytes=64, align=16)
  except ValueError as error:
    assert "is no box of the shape" in str(error)
    return
  whole_source = values(source.shape)
  held = {("w", s.rank): (s.index, box(whole_source, s.index)) for s in source.shards}
  got, paint = reference.run(parts, held)
  assert parts.nbytes == made.nbytes
  assert published_shapes(parts) == shapes
  seen = {name: np.zeros(shape, int) for name, shape in shapes.items()}
  want = {r.dst: reference.published(r, {"w": whole_source}) for r in rules}
  for segment, painted, value in zip(parts.segments, paint, got, strict=True):
    assert (painted == 1).all()
    box(seen[segment.name], segment.index)[...] += 1
    np.testing.assert_array_equal(value, box(want[segment.name], segment.index))
  assert all((count == 1).all() for count in seen.values())
  for copy in parts.copies:
    assert owners[parts.segments[copy.segment].bucket] == sender[copy.src_rank]
  assert len(owners) == len(parts.buckets)
