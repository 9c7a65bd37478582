"""The metrics file reads as one uninterrupted run, whatever was killed."""

import json

import jax
import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from agentrl_jax.orchestrate.evaluate import described
from agentrl_jax.orchestrate.metrics import Clock, MetricsWriter, line, read_metrics, to_floats
from agentrl_jax.types import Metric


def test_to_floats_divides_and_drops_what_counted_nothing():
  pair = lambda t, c: Metric(jnp.float32(t), jnp.float32(c))  # noqa: E731
  assert to_floats({"a": pair(3.0, 4.0), "empty": pair(0.0, 0.0)}) == {"a": 0.75}


def test_resume_drops_lines_that_will_be_written_again(tmp_path):
  writer = MetricsWriter(tmp_path)
  for step in range(4):
    writer.write(step, {"loss": step / 2}, wall_time=float(step))
  writer.close()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "lo')  # a kill in the middle of a line
  resumed = MetricsWriter(tmp_path, resume_step=2)
  resumed.write(2, {"loss": 10.0, "bad": float("nan")}, wall_time=9.0)
  resumed.close()
  assert read_metrics(tmp_path / "metrics.jsonl") == [
    {"step": 0, "loss": 0.0},
    {"step": 1, "loss": 0.5},
    {"step": 2, "loss": 10.0, "bad": None},
  ]


@pytest.mark.parametrize(
  ("line", "words"),
  [
    ('{"step": 1, "lo', "not JSON"),
    ("[1]", "expected an object with a step"),
    ('{"loss": 1.0}', "expected an object with a step"),
  ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, words):
  path = tmp_path / "metrics.jsonl"
  path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
  with pytest.raises(ValueError) as caught:
    read_metrics(path)
  assert str(caught.value).startswith(f"{path}, line 2: ") and words in str(caught.value)


def test_tensorboard_reads_the_scalars_back(tmp_path):
  writer = MetricsWriter(tmp_path)
  writer.write(7, {"reward": 0.25}, wall_time=1.0)
  writer.close()
  (events,) = (tmp_path / "tensorboard").iterdir()
  found = [
    (
      event.step,
      value.tag,
      value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value,
    )
    for event in EventFileLoader(str(events)).Load()
    for value in event.summary.value
  ]
  assert found == [(7, "reward", 0.25)]
  assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 7, "reward": 0.25}


def test_a_step_says_how_much_of_it_was_compiling():
  values = {name: 0.0 for name in ("reward", "success", "finished", "mismatch_max")}
  program = jax.jit(lambda x: jnp.sin(x @ x) - 0.1234)
  clock = Clock()
  program(jnp.ones((3, 3)))
  clock.lap("update")
  seconds = clock.seconds
  assert 0.0 < seconds["seconds/compile"] <= seconds["seconds/update"]
  again = Clock()
  program(jnp.ones((3, 3)))
  again.lap("update")
  assert again.seconds["seconds/compile"] == 0.0
  assert line(1, 2, values | again.seconds).endswith("| s: update 0.0")
  slow = {"seconds/update": 21.84, "seconds/compile": 20.12, "seconds/publish": 0.1}
  said = line(1, 2, values | slow)
  assert said.endswith("| s: update 21.8 publish 0.1 (of it compiling 20.1)")


def test_a_single_problem_has_no_standard_error():
  score = {"success": 0.5, "success_standard_error": 0.125, "finished": 1.0, "tokens": 7.0}
  assert described(score) == "success 0.500 ± 0.125, finished 1.000, 7.0 tokens an episode"
  alone = described(score | {"success_standard_error": float("nan")})
  assert alone == "success 0.500, finished 1.000, 7.0 tokens an episode"
