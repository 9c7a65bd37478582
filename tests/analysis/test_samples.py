"""The sample table and its loaders; published pass@100 of Game of 24 as an outside check."""

import json
import pathlib

import numpy as np
import pytest

from agentrl_jax.analysis.pass_at_k import pass_at_k
from agentrl_jax.analysis.samples import (
  cut,
  from_counts,
  join,
  lengths,
  read,
  read_game24,
  read_visits,
  table,
)

ROW = {"problem": "a", "sample": 0, "finished": True, "correct": True, "tokens": 3, "model": "m"}
LOGS = pathlib.Path(__file__).parents[3] / "shared" / "data" / "pass_at_k"


def test_rows_of_a_problem_are_pooled_and_faults_counted():
  found = table(
    [
      ROW,
      ROW | {"problem": "b"},
      ROW | {"sample": 1, "finished": False},
      ROW | {"sample": 2, "fault": "timeout", "finished": False},
      ROW | {"sample": 3, "correct": False, "fault": None},
    ]
  )
  assert found.problems == ("a", "b")
  assert [column.tolist() for column in found.counts()] == [[3, 1], [2, 1], [1, 1]]
  assert found.faults == 1


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokens": None}, "row 2: tokens is None, expected int"),
    ({"finished": 1}, "row 2: finished is 1, expected bool"),
    ({"model": "other"}, "row 2 is of model 'other', the first is of 'm'"),
    ({"sample": 0}, "row 2 repeats problem 'a' sample 0 of row 1"),
  ],
)
def test_a_bad_row_is_named(change, message):
  with pytest.raises(ValueError, match=message):
    table([ROW, ROW | {"sample": 1} | change])


def test_a_missing_field_is_named():
  with pytest.raises(ValueError, match="row 1 lacks correct, tokens"):
    table([{k: v for k, v in ROW.items() if k not in ("correct", "tokens")}])
  with pytest.raises(ValueError, match=r"no samples \(1 faults\)"):
    table([ROW | {"fault": "crash"}])


def test_file_errors_name_the_line(tmp_path):
  path = tmp_path / "log.jsonl"
  path.write_text(json.dumps(ROW) + "\n{\n")
  with pytest.raises(ValueError, match=r"log.jsonl: row 2 is not JSON"):
    read(path)
  path.write_text(json.dumps(ROW) + "\n[]\n")
  with pytest.raises(ValueError, match="row 2 is list, expected an object"):
    read(path)
  path.write_text(json.dumps(ROW) + "\n")
  assert read(path).success.tolist() == [True]


def test_cut_is_a_smaller_budget():
  rows = [ROW | {"sample": i, "tokens": i + 1} for i in range(4)]
  found = cut(table(rows), 2)
  assert found.finished.tolist() == [True, True, False, False]
  assert found.tokens.tolist() == [1, 2, 2, 2]
  assert lengths(found, (0.5,)) == {"finished": [1.5], "unfinished": [2.0]}
  assert lengths(table(rows), (0.5,))["unfinished"] == []


def test_only_keeps_the_asked_problems():
  rows = [ROW | {"problem": p, "sample": i, "tokens": i} for p in "cab" for i in range(2)]
  found = table(rows).only(["c", "a"])
  assert found.problems == ("a", "c")
  assert found.counts()[0].tolist() == [2, 2]
  with pytest.raises(KeyError):
    table(rows).only(["z"])


@pytest.mark.skipif(not LOGS.is_dir(), reason=f"the recorded logs are not at {LOGS}")
@pytest.mark.parametrize(
  ("name", "pass_1", "pass_100"), [("standard", 0.073, 0.33), ("cot", 0.040, 0.49)]
)
def test_published_numbers_of_game_24(name, pass_1, pass_100):
  """Table 2 of Yao et al. 2023 (arXiv:2305.10601): 7.3% and 4.0%, best of 100: 33% and 49%."""
  found = read_game24(LOGS / f"game24_{name}.json", model="gpt-4")
  samples, finished, success = found.counts()
  assert samples.tolist() == [100] * 100
  assert pass_at_k(samples, success, 1).mean() == pytest.approx(pass_1, abs=5e-4)
  assert pass_at_k(samples, success, 100).mean() == pytest.approx(pass_100)
  assert np.all(success <= finished)
  assert int((found.correct & ~found.finished).sum()) == 0


def test_counts_make_the_table_that_has_them():
  found = from_counts({"b": (4, 3, 1), "a": (2, 0, 0)}, model="m")
  assert found.problems == ("a", "b") and found.model == "m"
  assert [column.tolist() for column in found.counts()] == [[2, 4], [0, 3], [0, 1]]
  with pytest.raises(ValueError, match="problem 'a': 2 of 1 of 4 samples"):
    from_counts({"a": (4, 1, 2)})


def test_tables_of_one_model_join():
  one, two = (
    from_counts({"a": (2, 1, 1), "b": (1, 1, 0)}),
    from_counts({"a": (3, 3, 2), "b": (1, 0, 0)}),
  )
  found = join([one, two], model="both")
  assert [column.tolist() for column in found.counts()] == [[5, 2], [4, 1], [3, 0]]
  assert found.model == "both" and len(found.tokens) == 7
  with pytest.raises(ValueError, match="problem 'b' is not in every table"):
    join([one, from_counts({"a": (1, 1, 1)})], model="both")


def test_visits_of_a_run_become_samples(tmp_path):
  path = tmp_path / "visits.json"
  path.write_text(json.dumps({"7": [0.125, 0.5, 1.0], "30": [0.0, 0.0, 0.25]}))
  first = read_visits(path, visits=slice(0, 2))
  assert first.problems == ("00007", "00030")
  assert [column.tolist() for column in first.counts()] == [[16, 16], [16, 16], [5, 0]]
  assert read_visits(path, visits=slice(-1, None)).counts()[2].tolist() == [8, 2]
  path.write_text(json.dumps({"7": [0.3]}))
  with pytest.raises(ValueError, match=r"problem '7' has accuracies \[0\.3\], expected"):
    read_visits(path, visits=slice(0, 1))
  with pytest.raises(ValueError, match=r"problem '7' has accuracies \[\], expected one or more"):
    read_visits(path, visits=slice(1, 2))
