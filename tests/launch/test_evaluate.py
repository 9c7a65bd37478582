"""`launch.evaluate` refuses what it could not finish before it plays a single episode."""

import pytest

from agentrl_jax.orchestrate.evaluate import Record, check_writable, read_records, write_records
from tests.launch.commands import run_refused


def test_a_path_is_checked_without_a_trace(tmp_path):
  path = tmp_path / "new" / "records.jsonl"
  check_writable(path)
  assert list(path.parent.iterdir()) == []
  records = [Record("a/b/0", 0, True, False, 3, "m")]
  write_records(records, path)
  check_writable(path)
  assert read_records(path) == records
  with pytest.raises(IsADirectoryError, match="new is a directory, expected a file"):
    check_writable(path.parent)
  with pytest.raises(OSError, match=r"records\.jsonl"):
    check_writable(path / "more.jsonl")


def test_what_cannot_end_well_is_refused_at_once(tmp_path):
  messages = {
    f"--output={tmp_path}": f"{tmp_path} is a directory, expected a file for the records",
    "--tasks=0": "--tasks=0: 0 is not a positive integer",
    "--samples=-1": "--samples=-1: -1 is not a positive integer",
  }
  always = ["launch.evaluate", "--config=config:tiny_rl", f"--output={tmp_path}/records.jsonl"]
  refused = run_refused([[*always, flag] for flag in messages])
  for (code, output), message in zip(refused, messages.values(), strict=True):
    assert code == 1 and message in output
    assert "Traceback" not in output
  assert list(tmp_path.iterdir()) == []


def test_an_adapter_to_start_at_is_not_passed_over(tmp_path):
  """The records would be of the model without it."""
  small = {"data_dir": f'"{tmp_path}/tasks"', "train_tasks": 2, "held_out_tasks": 2}
  command = [
    *("launch.evaluate", "--config=config:tiny_rl", f"--output={tmp_path}/records.jsonl"),
    *(f"--config=set:tasks.{name}={value}" for name, value in small.items()),
    '--config=fiddler:use_lora(start="runs/a/adapter")',
  ]
  ((code, output),) = run_refused([command])
  assert code == 1 and "starts at the adapter runs/a/adapter" in output
