import functools
import multiprocessing
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.envs import gsm8k
from agentrl_jax.envs.calculator import make_tasks
from agentrl_jax.envs.datasets import (
  TaskSource,
  read_tasks,
  store_tasks,
  task_from_json,
  task_to_json,
)

TASKS = make_tasks("train", 23, two_step=0.3)
ROW = functools.partial(gsm8k.task_from_row, split="train")
GOOD = '{"question": "q", "answer": "#### 1"}'


@given(st.integers(1, 12), st.integers(0, 100), st.lists(st.integers(0, 9), max_size=8))
@settings(deadline=None, max_examples=30)
def test_any_sequence_of_draws_continues_the_same_order(size, seed, draws):
  whole, _ = TaskSource(TASKS[:size], seed).next(0, sum(draws))
  cursor, drawn = 0, []
  for n in draws:
    tasks, cursor = TaskSource(TASKS[:size], seed).next(cursor, n)  # a new process each time
    drawn += tasks
  assert drawn == whole and cursor == sum(draws)


def test_every_task_once_an_epoch_in_another_order():
  source = TaskSource(TASKS, seed=1)
  epochs = [source.next(k * 23, 23)[0] for k in range(3)]
  for epoch in epochs:
    assert sorted(t.seed for t in epoch) == sorted(t.seed for t in TASKS)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert TaskSource(TASKS, seed=2).next(0, 23)[0] != epochs[0]
  assert [source.epoch(c) for c in (0, 22, 23, 46)] == [0, 0, 1, 2]


def test_impossible_draws_are_refused():
  with pytest.raises(ValueError, match="at least one task"):
    TaskSource([], seed=0)
  with pytest.raises(ValueError, match="cursor -1, 2 tasks"):
    TaskSource(TASKS, seed=0).next(-1, 2)


def test_a_task_reads_back_equal():
  for task in TASKS:
    assert task_from_json(task_to_json(task)) == task


def test_stored_tasks_read_back_in_order_and_are_written_once(tmp_path):
  stored = store_tasks(TASKS, tmp_path, "calculator-train")
  assert list(stored) == TASKS and len(stored) == 23 and stored[-1] == TASKS[-1]
  with pytest.raises(IndexError):
    stored[23]
  (folder,) = tmp_path.iterdir()
  written = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
  assert any("array_record" in p.name for p in written)
  assert list(store_tasks(TASKS, tmp_path, "calculator-train")) == TASKS
  assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == written
  store_tasks(TASKS[:5], tmp_path, "calculator-train")
  assert len(list(tmp_path.iterdir())) == 2
  assert TaskSource(stored, seed=3).next(7, 30) == TaskSource(TASKS, seed=3).next(7, 30)
  with pytest.raises(ValueError, match="a plain name"):
    store_tasks(TASKS, tmp_path, "a/b")


def _store(directory, barrier):
  barrier.wait(200)
  assert list(store_tasks(TASKS, directory, "race")) == TASKS


def test_concurrent_starts_agree(tmp_path):
  context = multiprocessing.get_context("spawn")
  barrier = context.Barrier(2)
  starts = [context.Process(target=_store, args=(tmp_path, barrier)) for _ in range(2)]
  for process in starts:
    process.start()
  for process in starts:
    process.join(250)
  assert [process.exitcode for process in starts] == [0, 0]
  assert len(list(tmp_path.iterdir())) == 1  # no scratch folder is left


def test_an_interrupted_start_leaves_nothing_that_looks_finished(tmp_path):
  (tmp_path / ".preparing-dead" / "task_records").mkdir(parents=True)
  assert list(store_tasks(TASKS, tmp_path, "again")) == TASKS


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("{", "not JSON"),
    ("[1]", "list, expected a JSON object"),
    ('{"question": "q"}', "field 'answer' is None"),
    ("[" * 100_000, "not JSON"),
  ],
)
def test_a_bad_line_is_named_by_file_number_and_reason(tmp_path, line, reason):
  path = tmp_path / "tasks.jsonl"
  path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
  with pytest.raises(ValueError) as caught:
    read_tasks(path, ROW)
  assert str(caught.value).startswith(f"{path}, line 2: ") and reason in str(caught.value)


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path):
  path = tmp_path / "tasks.jsonl"
  path.write_bytes(GOOD.encode() + b"\n\xff\xfe\n")
  with pytest.raises(ValueError, match="line 2: not JSON: 'utf-8'"):
    read_tasks(path, ROW)


def test_parquet_equals_jsonl_and_names_its_rows(tmp_path):
  rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(4)]
  lines = tmp_path / "tasks.jsonl"
  lines.write_text("".join(f'{{"question": "q{i}", "answer": "#### {i}"}}\n' for i in range(4)))
  table = tmp_path / "tasks.parquet"
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
  assert read_tasks(table, ROW) == read_tasks(lines, ROW)
  rows[2]["answer"] = "none"
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
  with pytest.raises(ValueError, match=r"tasks.parquet, row 3: field 'answer' has no"):
    read_tasks(table, ROW)
  table.write_bytes(b"PAR")
  with pytest.raises(ValueError, match="not parquet"):
    read_tasks(table, ROW)


def test_missing_empty_and_other_files_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="no task file"):
    read_tasks(tmp_path / "tasks.jsonl", ROW)
  (tmp_path / "tasks.csv").write_text("a")
  with pytest.raises(ValueError, match=r"kind '.csv', expected .jsonl or .parquet"):
    read_tasks(tmp_path / "tasks.csv", ROW)
  (tmp_path / "empty.jsonl").write_text("\n")
  with pytest.raises(ValueError, match="no tasks"):
    read_tasks(tmp_path / "empty.jsonl", ROW)


def test_environments_start_without_the_slow_libraries():
  code = (
    "import sys; import agentrl_jax.envs.gsm8k, agentrl_jax.rollout.collect; "
    "print([m for m in ('jax', 'tensorflow', 'tensorflow_datasets', 'grain', 'transformers') "
    "if m in sys.modules])"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
  assert done.stdout.strip() == "[]", done.stderr
