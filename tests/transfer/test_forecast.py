"""A plan's forecast: the layout without devices is that with them; bytes of links by hand."""

import json

import jax
import pytest

from agentrl_jax.models import llama
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.transfer.forecast import forecast, report, seconds, source_on_mesh
from agentrl_jax.transfer.layout import assembly, full
from agentrl_jax.transfer.plan import Shard, Tensor, plan, whole
from agentrl_jax.transfer.stage import source_layout
from launch import plan_transfer
from tests.reference.transfer import random_weights

MODEL = llama.bind(
  llama.Config(
    vocab_size=64, embed=16, ffw=24, layers=2, heads=4, kv_heads=2, head_dim=4, max_position=64
  )
)


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}])
def test_the_layout_without_devices_is_that_of_real_arrays(sizes):
  placed = jax.device_put(random_weights(MODEL), shardings(MODEL, make_mesh(**sizes)))
  want = {t.name: (t.shape, t.dtype, set(t.shards)) for t in source_layout(placed)}
  got = {t.name: (t.shape, t.dtype, set(t.shards)) for t in source_on_mesh(MODEL, sizes)}
  assert got == want


def test_bytes_of_links_by_hand():
  """Four source ranks on two hosts hold 10 rows of 2 floats each; two receivers want all."""
  source = [
    Tensor("w", (40, 2), "float32",
           tuple(Shard(r, ((10 * r, 10 * r + 10), (0, 2))) for r in range(4)))
  ]  # fmt: skip
  rules = [assembly("t", "w", (40, 2))]
  routed = plan(source, whole(rules, "bfloat16", (0, 1)), rules, bucket_bytes=100)
  found = forecast(routed, source_host=2, target_host=1)
  # 20 rows x 2 elements x 2 bytes from each host to each receiver.
  assert dict(found.links) == {(0, 0): 80, (0, 1): 80, (1, 0): 80, (1, 1): 80}
  assert (dict(found.sent), dict(found.received)) == ({0: 160, 1: 160}, {0: 160, 1: 160})
  assert (found.fan_in, found.buckets, found.largest_bucket) == (4, 4, 100)
  assert seconds(found, 1e-9 * 80) == 2.0
  text = report(routed, found, [2.0])
  assert routed.digest in text
  assert "and 1 more links" in report(routed, found, [2.0], most_links=3)
  replicated = [Tensor("w", (4,), "float32", tuple(Shard(r, full((4,))) for r in range(2)))]
  one = plan(replicated, whole([assembly("t", "w", (4,))], "float32"), [assembly("t", "w", (4,))],
             bucket_bytes=100)  # fmt: skip
  assert dict(forecast(one, source_host=1, target_host=1).links) == {(0, 0): 16}


def test_the_command_prints_the_plan_of_a_model(tmp_path, capsys):
  directory = tmp_path / "model"
  save_weights(MODEL, random_weights(MODEL), directory)
  assert json.loads((directory / "config.json").read_text())["vocab_size"] == 64
  flags = plan_transfer.flags.FLAGS
  flags(["plan_transfer", f"--model={directory}", "--mesh=fsdp=4,tensor=2", "--ranks=2",
         "--replicas=3", "--devices_per_host=4", "--speeds=10", "--dtype=float32"])  # fmt: skip
  try:
    assert plan_transfer.main([]) == 0
  finally:
    flags.unparse_flags()
  lines = capsys.readouterr().out.splitlines()
  norms = 2 * 2 * 16 + 16
  weights = sum(leaf.size for leaf in jax.tree.leaves(random_weights(MODEL))) + norms
  assert lines[0].startswith("plan ")
  assert f"{3 * 4 * weights / 1e9:.3f} GB" in lines[1]  # norms are on both ranks
  assert "over 2, mean" in lines[3]  # 8 source ranks, 4 a host
  assert any(line.startswith("at 10 GB/s a host and direction: ") for line in lines)


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp=0", "fsdp=x"])
def test_meshes_that_are_not_sizes_are_refused(mesh):
  with pytest.raises(ValueError, match="expected AXIS=SIZE"):
    plan_transfer.sizes([mesh])
  with pytest.raises(ValueError, match="unknown mesh axes"):
    source_on_mesh(MODEL, {"experts": 2})


@pytest.mark.parametrize("speed", ["fast", "0", "-1", "nan", "inf"])
def test_speeds_are_positive_numbers(speed):
  assert plan_transfer.speeds(["1.25", "50"]) == [1.25, 50.0]
  with pytest.raises(ValueError, match=f"--speeds has '{speed}', expected GB/s"):
    plan_transfer.speeds([speed])
