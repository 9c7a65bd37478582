"""What the transports write: files that safetensors reads, pickles that hold what was staged."""

import asyncio
import base64
import inspect
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl_jax.ops.quantize import OCP
from agentrl_jax.transfer.engine_layout import (
  direct_target,
  parameters,
  quantized_parameters,
  quantized_weights,
)
from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import plan, whole, with_dtypes
from agentrl_jax.transfer.receive import DEFAULT_ROOT
from agentrl_jax.transfer.stage import Staged, source_layout, stage
from agentrl_jax.transfer.transports import auto
from agentrl_jax.transfer.transports.auto import Servers
from agentrl_jax.transfer.transports.broadcast import BroadcastTransport
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.mooncake import Mooncake
from agentrl_jax.transfer.transports.nixl import Nixl
from agentrl_jax.transfer.transports.pickled import flattened_bucket
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport, _Body
from agentrl_jax.transfer.wire import WireError, bucket_entries
from tests.reference import quantize as quantize_reference
from tests.reference.pickled import Reader

ARRAYS = {
  "a": np.arange(35, dtype=np.float32).reshape(5, 7),
  "b": np.arange(3, dtype=np.float32),
  "empty": np.zeros((0, 3), np.float32),
}


def staged(transport, dtype="float32", key="run-1") -> Staged:
  weights = {name: jnp.asarray(array) for name, array in ARRAYS.items()}
  rules = [assembly(name, f"['{name}']", array.shape) for name, array in ARRAYS.items()]
  made = plan(
    source_layout(weights), whole(rules, dtype), rules, bucket_bytes=transport.bucket_bytes,
    align=transport.align, split=False,
  )  # fmt: skip
  return stage(made, weights, transport.allocate(made, key), key)


class Peer:
  """Records calls in place of a server."""

  url = "http://peer"

  def __init__(self):
    self.calls = []

  async def call(self, method, path, body=None, *, content=None, length=0):
    data = b"".join([chunk async for chunk in content]) if content else None
    assert data is None or len(data) == length
    self.calls.append((path, body if data is None else json.loads(data)))
    return {}


KILLED = """
import sys, numpy as np
from agentrl_jax.transfer.plan import Bucket, Plan
from agentrl_jax.transfer.transports.disk import DiskTransport
transport = DiskTransport(sys.argv[1])
plan = Plan((), (), (Bucket(0, 0, 64),), {}, "digest")
for key in ("run-1", "run-2"):
  transport.allocate(plan, key)[0, 0][:] = 1
partial = transport.staging("run-1")
partial.rename(partial.with_suffix(""))
print("staged", flush=True)
sys.stdin.read()
"""


def held(root):
  """The names of what is there, without what is new in each."""
  names = (path.name.removesuffix(".partial") for path in root.iterdir())
  return sorted(re.sub(r"-[0-9a-f]{16}$", "", name) for name in names)


def files(directory):
  """The weights of a round, in the order of their names."""
  return sorted(directory.glob("*.safetensors"))


def test_what_a_killed_trainer_staged_is_removed_by_the_next(tmp_path):  # W27
  (tmp_path / "not-a-round").mkdir()
  mine = DiskTransport(tmp_path)
  packed = staged(mine, key="other-1")
  with subprocess.Popen(
    [sys.executable, "-c", KILLED, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as trainer:
    assert trainer.stdout.readline() == "staged\n"
    DiskTransport(tmp_path)
    rounds = ["other-1", "run-1", "run-2"]
    assert held(tmp_path) == ["not-a-round", *rounds]  # all of them live
    trainer.kill()
  auto.fastest(tmp_path)(auto.Servers(["http://127.0.0.1:1"], 1))
  assert held(tmp_path) == ["not-a-round", "other-1"]
  mine.release(packed.key)
  assert held(tmp_path) == ["not-a-round"]
  DiskTransport(tmp_path / "nowhere")  # is made by the first push


@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_disk_writes_safetensors(tmp_path, bucket_bytes, dtype):
  transport, peer = DiskTransport(tmp_path, bucket_bytes=bucket_bytes), Peer()
  packed = staged(transport, dtype)
  assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]  # nothing to read yet
  asyncio.run(transport.send(packed, peer, 1))
  ((path, body),) = peer.calls
  assert path == "/update_weights_from_disk"
  written = files(Path(body["model_path"]))
  assert len(written) == len(packed.plan.buckets) == (2 if bucket_bytes == 16 else 1)
  loaded = {}
  for path in written:
    loaded |= load_file(path)
  assert loaded.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(loaded[name].astype(np.float32), array)
    assert str(loaded[name].dtype) == dtype
  asyncio.run(transport.send(packed, peer, 1))  # a second server reads the same files
  assert peer.calls[0] == peer.calls[1]
  transport.release("run-1")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "..", "a/b", "/etc"])
def test_disk_refuses_keys_that_leave_its_root(tmp_path, key):
  with pytest.raises(ValueError, match="is no file name"):
    DiskTransport(tmp_path).release(key)


def test_disk_keeps_two_runs_of_one_name_apart(tmp_path):
  """Both push version 1 at the same time; the second begins when the first has staged."""
  mine, peers = [DiskTransport(tmp_path), DiskTransport(tmp_path)], [Peer(), Peer()]
  packed = [staged(transport) for transport in mine]
  packed[1].buffers[0, 0][:4] = np.frombuffer(np.float32(77).tobytes(), np.uint8)
  for transport, one, peer in zip(mine, packed, peers, strict=True):
    asyncio.run(transport.send(one, peer, 1))
  assert held(tmp_path) == ["run-1", "run-1"]
  got = []
  for peer in peers:
    (file,) = files(Path(peer.calls[0][1]["model_path"]))
    got.append(load_file(file)["a"].ravel()[:2].tolist())
  assert got == [[0, 1], [77, 1]]
  mine[0].release("run-1")
  assert [str(path) for path in tmp_path.iterdir()] == [peers[1].calls[0][1]["model_path"]]
  again = staged(mine[1])  # the round is tried again
  assert held(tmp_path) == ["run-1"] and mine[1].staging(again.key).exists()


def test_users_of_one_machine_do_not_share_a_directory():
  """Whoever made it first would keep the others out."""
  taken = inspect.signature(auto.fastest).parameters["root"].default
  roots = [DiskTransport().root, BroadcastTransport(["sender"])._staging.root, taken, DEFAULT_ROOT]
  assert len(set(map(str, roots))) == 3
  assert all(str(root).startswith(f"/dev/shm/agentrl-{os.getuid()}") for root in roots)


def direct_weights():
  """Two matrices to fuse, one cut by columns and a norm, as [in, out] arrays."""
  rng = np.random.default_rng(0)
  shapes = {"q_proj": (128, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 128)}
  arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  arrays["norm"] = rng.normal(size=(128,)).astype(np.float32)
  return arrays


@pytest.mark.parametrize("how", [None, OCP])
def test_direct_sends_each_rank_its_own_parameters(how):
  arrays, ranks = direct_weights(), 2
  transport, peer = DirectTransport(bucket_bytes=100_000), Peer()
  weights = {name: jnp.asarray(array) for name, array in arrays.items()}
  rules = [
    assembly(f"l.{n}.weight", f"['{n}']", a.shape, perm=(1, 0) if a.ndim == 2 else None)
    for n, a in arrays.items()
  ]
  made = parameters(rules, ranks)
  quantized = quantized_parameters(made, quantized_weights(rules, how)) if how else {}
  target = with_dtypes(direct_target(made, "float32", ranks), quantized)
  routed = plan(
    source_layout(weights), target, [p.assembly for p in made], quantized=quantized, split=False,
    bucket_bytes=transport.bucket_bytes, align=transport.align,
  )  # fmt: skip
  staged = stage(routed, weights, transport.allocate(routed, "run-1"), "run-1")
  asyncio.run(transport.send(staged, peer, ranks))
  got = [{}, {}]
  for _, body in peer.calls[1:-1]:
    assert (body["load_format"], body["flush_cache"]) == ("direct", False)
    assert len(body["serialized_named_tensors"]) == ranks
    for rank, text in enumerate(body["serialized_named_tensors"]):
      got[rank] |= dict(Reader(io.BytesIO(base64.b64decode(text, validate=True))).load())
  qkv = [
    np.concatenate([np.split(arrays[f"{k}_proj"].T, ranks)[r] for k in "qkv"]) for r in range(ranks)
  ]
  o = np.split(arrays["o_proj"].T, ranks, axis=1)
  for rank in range(ranks):
    want = {"l.norm.weight": arrays["norm"]}
    for name, value in (("l.qkv_proj.weight", qkv[rank]), ("l.o_proj.weight", o[rank])):
      if how is None:
        want[name] = value
        continue
      exact = value.astype(jnp.bfloat16).astype(np.float32)
      coded, scales = quantize_reference.quantize(exact, *how)
      want[name], want[f"{name}_scale_inv"] = coded, scales
    assert got[rank].keys() == want.keys()
    for name, value in want.items():
      found = got[rank][name]
      np.testing.assert_array_equal(found.view(value.dtype), value)


def test_direct_refuses_what_would_not_be_the_engines_blocks():
  rules = [assembly(f"l.{n}_proj.weight", n, (64, 128), perm=(1, 0)) for n in "qkv"]
  made = parameters(rules, 2)  # 64 rows a rank and part: blocks of 128 would mix parts
  with pytest.raises(ValueError, match=r"l.qkv_proj.weight: rows \(0, 64\) are not whole blocks"):
    quantized_parameters(made, {rule.dst: OCP for rule in rules})
  vocabulary = [assembly("model.embed_tokens.weight", "e", (100, 8))]
  with pytest.raises(ValueError, match=r"embed_tokens.weight has 100 rows, the engine pads to 64s"):
    direct_target(parameters(vocabulary, 1), "float32", 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_sends_every_rank_the_whole_bucket(dtype, ranks):
  transport, peer = TensorTransport(bucket_bytes=16), Peer()
  packed = staged(transport, dtype)
  asyncio.run(transport.send(packed, peer, ranks))
  assert [path for path, _ in peer.calls] == [
    "/begin_weight_update",
    *["/update_weights_from_tensor"] * len(packed.plan.buckets),
    "/end_weight_update",
  ]
  got = {}
  for _, body in peer.calls[1:-1]:
    assert body["load_format"] == "flattened_bucket"
    assert body["flush_cache"] is False
    payloads = body["serialized_named_tensors"]
    assert len(payloads) == ranks
    assert len(set(payloads)) == 1
    read = Reader(io.BytesIO(base64.b64decode(payloads[0], validate=True))).load()
    for item in read["metadata"]:
      data = read["flattened_tensor"][item.start_idx : item.end_idx]
      assert item.numel == len(data)
      got[item.name] = data.view(item.dtype).reshape(item.shape)
  assert got.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(got[name].astype(np.float32), array)


@pytest.mark.parametrize("extra", range(7))
def test_base64_is_seamless_whatever_the_lengths(extra):
  data = np.arange(100 + extra, dtype=np.uint8)
  payload = flattened_bucket((), len(data))._replace(head=b"h" * extra, tail=b"t" * (extra % 4))
  body = _Body([(payload, data)], "direct")

  async def text():
    return b"".join([chunk async for chunk in body.chunks()])

  read = json.loads(asyncio.run(text()))["serialized_named_tensors"][0]
  assert base64.b64decode(read, validate=True) == b"".join(map(bytes, body.ranks[0]))


def test_a_bucket_that_would_kill_the_server_is_not_sent():
  packed = staged(TensorTransport())
  (bucket,) = packed.plan.buckets
  entries = bucket_entries(packed, bucket)
  with pytest.raises(WireError, match="a: ends at byte 140 of a payload of 100"):
    flattened_bucket(entries, 100)
  with pytest.raises(WireError, match=r"a is part \(0, 2\), the server takes whole tensors"):
    flattened_bucket([entries[0]._replace(part=(0, 2))], bucket.nbytes)


def test_auto_takes_the_fastest_that_works_and_says_why(tmp_path, monkeypatch):
  monkeypatch.setattr(Nixl, "why_not", lambda self: "no NIXL here")
  monkeypatch.setattr(Mooncake, "why_not", lambda self: "no Mooncake here")
  here, away = "http://127.0.0.1:1", "http://192.0.2.7:1"  # TEST-NET-1, RFC 5737
  choose = auto.fastest(tmp_path / "new")
  disk = choose(Servers([here, "http://[::1]:2"], 1000))
  assert (disk.transport.name, str(disk)) == ("disk", "transport disk; nixl: no NIXL here")
  assert not (tmp_path / "new").exists()
  assert str(choose(Servers([here, away], 1000))) == (
    f"transport bucket; nixl: no NIXL here; disk needs servers on this machine, {away} is not; "
    f"mooncake: no Mooncake here; tcp: {here} has no receiver; "
    "broadcast is taken only by name: a server that cannot reach this machine hangs; "
    "direct gains nothing over bucket with one rank"
  )
  many = choose(Servers([away], 1000, ranks=8))
  assert (many.transport.name, len(many.passed_over)) == ("direct", 5)
  full = choose(Servers([here], 1 << 60, ranks=2))
  assert full.transport.name == "direct"
  assert f"{tmp_path} has" in full.passed_over[1]
  assert "a push needs 1152921504607 MB" in full.passed_over[1]


def test_auto_asks_every_window(tmp_path, monkeypatch):
  monkeypatch.setattr(Nixl, "why_not", lambda self: "")
  here = "http://127.0.0.1:1"
  assert f"nixl: {here} has no window" in str(auto.fastest(tmp_path)(Servers([here], 1000)))
  lacking = {"nixl": "the server has no plug-in"}
  servers = Servers([here], 1000, lacking=lacking)
  assert "nixl: the server has no plug-in" in str(auto.fastest(tmp_path)(servers))
  with socket.create_server(("127.0.0.1", 0)) as closed:
    port = closed.getsockname()[1]
  choose = auto.fastest(tmp_path, windows={here: f"127.0.0.1:{port}"})
  assert "nixl: $AGENTRL_TRANSFER_TOKEN is empty" in str(choose(Servers([here], 1000)))
  monkeypatch.setenv("AGENTRL_TRANSFER_TOKEN", "secret")
  assert f"nixl: {here}: window 127.0.0.1:{port}: " in str(choose(Servers([here], 1000)))
