import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from agentrl_jax.learner.checkpoint import (
  CheckpointError,
  HostState,
  Saver,
  complete,
  latest,
  restore,
  save,
)
from agentrl_jax.learner.optim import adamw
from agentrl_jax.learner.state import abstract_state, make_state
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.recipes import grpo
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.types import Aux
from tests.learner.kill_during_save import host as killed_host
from tests.learner.kill_during_save import state as killed_state
from tests.learner.toy import random_batch, toy_model

MODEL = toy_model()
OPTIMIZER = adamw(0.01, weight_decay=0.1, warmup_steps=3)
HOST = HostState(
  seed=3, weight_version=5, cursor={"epoch": 1, "next": 17}, carry={"logp": [-0.1, -1e-7]}
)


def loss_batch(seed):
  batch = random_batch(seed)
  return make_prepare(grpo())(batch, Aux(old_logp=batch.behavior_logp))


def assert_same(a, b):
  a, b = jax.device_get((a, b))
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
  mesh = make_mesh(data=1)
  step = make_step(MODEL, OPTIMIZER, grpo(), mesh, micro_rows=4)
  straight = make_state(MODEL, OPTIMIZER, mesh)
  for seed in range(4):
    straight, _ = step(straight, loss_batch(seed))
  with jax.debug_nans(False), Saver(tmp_path) as saver:  # steps donate, as in a real run
    state = make_state(MODEL, OPTIMIZER, mesh)
    for seed in range(2):
      state, _ = step(state, loss_batch(seed))
    path = saver.save(state, HOST)
    step(state, loss_batch(9))  # overwrites the donated buffers while the write is under way
  assert path == latest(tmp_path) == tmp_path / "step_00000002"
  state, host = restore(path, abstract_state(MODEL, OPTIMIZER, mesh))
  assert host == HOST
  for seed in range(2, 4):
    state, _ = step(state, loss_batch(seed))
  assert_same(state, straight)


def test_restores_onto_another_mesh(tmp_path):
  old = make_state(MODEL, OPTIMIZER, make_mesh(fsdp=4, tensor=2), seed=8)
  path = save(tmp_path, old, HOST)
  for axes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 4}):
    abstract = abstract_state(MODEL, OPTIMIZER, make_mesh(**axes))
    new, _ = restore(path, abstract)
    assert_same(new, old)
    for leaf, like in zip(jax.tree.leaves(new), jax.tree.leaves(abstract), strict=True):
      assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def test_keeps_the_newest_and_ignores_what_is_incomplete(tmp_path):
  assert latest(tmp_path / "absent") is None and complete(tmp_path) == []
  (tmp_path / "step_00000099").mkdir()
  (tmp_path / "step_00000099" / "host.json").write_text("{}")
  (tmp_path / "notes").mkdir()
  for step in (1, 2, 3):
    save(tmp_path, killed_state(step), killed_host(step), keep=2)
  assert [path.name for path in complete(tmp_path)] == ["step_00000002", "step_00000003"]
  assert sorted(path.name for path in tmp_path.iterdir())[0] == "notes"  # not ours, not touched
  assert not (tmp_path / "step_00000099").exists()
  stamp = (latest(tmp_path) / "COMPLETE").stat().st_mtime_ns
  save(tmp_path, killed_state(3), killed_host(4))  # the same step again: left as it is
  assert (latest(tmp_path) / "COMPLETE").stat().st_mtime_ns == stamp


def test_killed_at_any_moment_a_run_finds_a_whole_checkpoint(tmp_path):
  script = Path(__file__).parent / "kill_during_save.py"
  environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
  environment.pop("XLA_FLAGS")  # one device is enough there
  out = subprocess.run(
    [sys.executable, "-W", "ignore", script, tmp_path, "2"],
    env=environment, check=True, capture_output=True, text=True, timeout=240,
  ).stdout  # fmt: skip
  killed, code = map(int, out.split())
  assert killed >= 10 and code == 0
  found = []
  for index in range(killed + 1):
    directory = tmp_path / str(2 * index)
    step = int(latest(directory).name.removeprefix("step_"))
    state, host = restore(latest(directory), jax.eval_shape(lambda: killed_state(1)))
    assert_same(state, killed_state(step))
    assert host == killed_host(step)
    found.append(step)
  assert found == sorted(found) and found[0] == 1 and found[-1] == 2
  directory = tmp_path / "6"
  assert latest(directory).name == "step_00000001" and len(list(directory.iterdir())) == 2
  save(directory, killed_state(2), killed_host(2))  # the next run writes over the torso
  assert latest(directory).name == "step_00000002"


def test_a_full_disk_is_one_line_and_leaves_the_previous_one(small_disk):
  first = save(small_disk, killed_state(1), killed_host(1))
  noise = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
  big = killed_state(2).replace(weights={"w": jax.numpy.asarray(noise)})
  with pytest.raises(CheckpointError, match=r"step_00000002.*o space.*latest.*step_00000001") as e:
    save(small_disk, big, killed_host(2))
  assert "\n" not in str(e.value)
  assert [path.name for path in small_disk.iterdir()] == [first.name]
  saver = Saver(small_disk)
  saver.save(big, killed_host(2))  # behind the loop: the error comes with the next call
  with pytest.raises(CheckpointError, match="o space"):
    saver.save(killed_state(3), killed_host(3))
  saver.save(killed_state(3), killed_host(3))
  saver.close()
  assert latest(small_disk).name == "step_00000003"


def test_a_disk_without_room_for_a_byte_is_no_other_error(small_disk):
  """Nor is what orbax notes about its own writing, whose fault comes last."""
  (small_disk / "ballast").write_bytes(bytes(1 << 20))
  with pytest.raises(CheckpointError, match=r"step_00000001: No space left on device; there is no"):
    save(small_disk / "checkpoints", killed_state(1), killed_host(1))
  assert not any((small_disk / "checkpoints").iterdir())


def test_errors_name_checkpoint_and_cause(tmp_path):
  mesh = make_mesh(data=1)
  path = save(tmp_path, make_state(MODEL, OPTIMIZER, mesh), HOST)
  with pytest.raises(CheckpointError, match=r"step_00000000 does not hold the expected state"):
    restore(path, abstract_state(MODEL, optax.sgd(0.1, momentum=0.9), mesh))
  with pytest.raises(ValueError, match="not JSON compliant"):
    save(tmp_path, killed_state(1), HostState(0, 0, {"x": float("nan")}))
  with pytest.raises(ValueError, match="keep is 0"):
    Saver(tmp_path, keep=0)
  damaged = max((path / "state").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
  content = bytearray(damaged.read_bytes())
  content[len(content) // 2] ^= 1
  damaged.write_bytes(content)
  with pytest.raises(CheckpointError, match=f"{damaged.name} is damaged; remove the checkpoint"):
    restore(path, abstract_state(MODEL, OPTIMIZER, mesh))
  damaged.unlink()
  with pytest.raises(CheckpointError, match=f"{damaged.name} is missing"):
    restore(path, abstract_state(MODEL, OPTIMIZER, mesh))
  (path / "COMPLETE").unlink()
  with pytest.raises(CheckpointError, match="incomplete: it has no COMPLETE"):
    restore(path, abstract_state(MODEL, OPTIMIZER, mesh))
