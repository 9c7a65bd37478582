"""The trajectory viewer: what it shows, how it survives damaged and hostile records."""

import json
import os
import pathlib
import pty
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from agentrl_jax.analysis.transcript import escape, overview, pieces, shade, tint, transcript
from agentrl_jax.rollout.records import (
  Episode,
  Fault,
  Kind,
  Outcome,
  Sample,
  Segment,
  Task,
  to_json,
)
from launch.view import find_trajectories, read_advantages, read_episodes

ROOT = pathlib.Path(__file__).parents[2]


def episode(name="t0", group="g0", outcome=Outcome.SUCCESS, content="calc(1+2)", ids=(3, 4)):
  logp, version = np.full(len(ids), -0.1, np.float32), np.zeros(len(ids), np.int32)
  logp[-1] = -6.0
  sample = Sample(
    segments=(
      Segment(Kind.PROMPT, np.array([1, 2], np.int32)),
      Segment(Kind.ACTION, np.array(ids, np.int32), 0, logp, version),
      Segment(Kind.OBSERVATION, np.array([2], np.int32)),
    ),
    vocab_size=300,
    trajectory_id=name,
  )
  call = {"name": "calc", "arguments": {"x": "1+2"}}
  return Episode(
    task=Task("calculator", "train", 7, {}),
    trajectory_id=name,
    group_id=group,
    samples=(sample,),
    reward_parts=({"correct": 1.0},),
    turn_rewards=(1.0,),
    outcome=outcome,
    terminated=True,
    truncated=False,
    fault=Fault("timeout", "30 s") if outcome is Outcome.FAULT else None,
    text=(
      {"role": "user", "content": "How much?"},
      {"role": "assistant", "content": content, "turn": 0, "tool_calls": [call]},
    ),
  )


def byte_tokenizer() -> Tokenizer:
  vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
  tokenizer = Tokenizer(models.BPE(vocabulary, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = token_decoders.ByteLevel()
  return tokenizer


@pytest.fixture
def workdir(tmp_path):
  folder = tmp_path / "trajectories"
  folder.mkdir()
  rows = [
    episode("t0"),
    episode("t1", outcome=Outcome.FAILURE),
    episode("t2", "g1", Outcome.FAULT),
  ]
  for step in (3, 12):
    path = folder / f"step_{step:06d}.jsonl"
    path.write_text("".join(to_json(e) + "\n" for e in rows))
  (folder / "step_000012.advantages.jsonl").write_text(
    json.dumps({"trajectory_id": "t0", "advantage": [0.5, 0.5]}) + "\n"
  )
  return tmp_path


def view(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "launch.view", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    stdin=subprocess.DEVNULL,
    env={**os.environ, "COLUMNS": str(columns)},
  )


def test_a_narrow_terminal_cuts_no_number(workdir):
  wide, narrow = view(str(workdir)), view(str(workdir), columns=40)
  assert wide.stdout == narrow.stdout and "…" not in narrow.stdout


def test_shows_the_last_step_with_table_turns_calls_and_advantages(workdir):
  done = view(str(workdir))
  assert done.returncode == 0, done.stderr
  out = done.stdout
  assert "step_000012.jsonl: 3 episodes" in out
  assert "\x1b" not in out  # plain where there is no terminal
  row = next(line for line in out.splitlines() if line.startswith("all"))
  assert row.split()[1:5] == ["3", "1", "1", "1"]
  assert "=== t0 success reward 1 · turns 1 · terminated" in out
  assert "reward 1 (correct 1) · advantage +0.50 · version 0]" in out
  assert '-> calc {"x": "1+2"}' in out
  assert "fault timeout: 30 s" in out
  assert "no tokenizer through" in out and "user: How much?" in out
  assert out.count("advantage +") == 1  # the others were not trained on


def test_selects_step_group_and_outcome(workdir):
  out = view(str(workdir), "--step=3", "--group=g0", "--only=failure").stdout
  assert "step_000003.jsonl" in out
  assert "=== t1" in out and "=== t0" not in out and "=== t2" not in out
  assert "advantage" not in out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "expected one directory"),
    (("{}", "more"), "unexpected argument 'more'"),
    (("{}/nowhere",), "no trajectories at"),
    (("{}", "--step=4"), "no step 4 in"),
    (("{}", "--group=g9"), "has no group 'g9'"),
  ],
)
def test_a_wrong_call_is_one_line(workdir, arguments, message):
  done = view(*(a.format(workdir) for a in arguments))
  assert done.returncode != 0
  assert message in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1


def test_a_cut_last_line_is_a_notice_and_a_bad_line_is_named(tmp_path):
  path, line = tmp_path / "step_000001.jsonl", to_json(episode())
  path.write_text(f"{line}\n{line[:40]}")
  episodes, notice = read_episodes(path)
  assert len(episodes) == 1
  assert notice is not None and notice.startswith("line 2 is cut short")
  path.write_text(f"{line}\n{line}")
  assert read_episodes(path)[1] is None
  path.write_text(f"{line}\n{line[:40]}\n{line}\n")
  with pytest.raises(ValueError, match=r"step_000001.jsonl: line 2: not an episode record"):
    read_episodes(path)
  path.write_text("[" * 100_000 + "\n")
  with pytest.raises(ValueError, match="line 1"):
    read_episodes(path)


def test_bad_advantages_are_named_and_cut_ones_left_out(tmp_path):
  path = tmp_path / "step_000001.jsonl"
  advantages = tmp_path / "step_000001.advantages.jsonl"
  assert read_advantages(path) == {}
  good = json.dumps({"trajectory_id": "t", "advantage": [1]})
  advantages.write_text(f'{good}\n{{"traj')
  assert read_advantages(path) == {"t": [1.0]}
  advantages.write_text(f'{good}\n{{"trajectory_id": "t"}}\n')
  with pytest.raises(ValueError, match="line 2 holds no advantages"):
    read_advantages(path)
  with pytest.raises(ValueError, match="2 action tokens, 1 advantages"):
    transcript(episode(), None, [1.0])


def test_advantage_files_are_no_trajectories(workdir):
  (workdir / "trajectories" / "step_000099.advantages.jsonl").write_text("")
  assert find_trajectories(workdir, None).name == "step_000012.jsonl"


def test_hostile_text_never_reaches_the_terminal_as_control():
  hostile = "a\x1b[31m\r\x07b\u202ec\x9bd\U000e0001\ud800[bold]x[/bold]\n"
  expected = r"a\x1b[31m\x0d\x07b\u202ec\x9bd\U000e0001\ud800[bold]x[/bold]" + "\n"
  assert escape(hostile) == expected
  shown = transcript(episode(name="\x1b]0;t\x07", content=hostile)).plain
  assert not any(ord(c) < 32 and c != "\n" for c in shown)
  assert "\u202e" not in shown and "[bold]x[/bold]" in shown


def test_tokens_split_within_a_character_are_shown_whole():
  tokenizer = byte_tokenizer()
  ids = tokenizer.encode("aé😀b").ids
  assert len(ids) == 8
  assert pieces(ids, tokenizer) == ["a", "", "é", "", "", "", "😀", "b"]
  assert "".join(pieces([10**6, *ids[:1]], tokenizer)).endswith("a")


def test_decoded_transcript_colours_by_likelihood_and_advantage():
  tokenizer = byte_tokenizer()
  ids = tokenizer.encode("hi").ids
  text = transcript(episode(ids=ids), tokenizer, [1.0, -0.5])
  styles = {
    text.plain[span.start : span.end]: span.style
    for span in text.spans
    if text.plain[span.start : span.end] in ("h", "i")
  }
  assert styles["h"].color.name == "default" and styles["h"].bgcolor.name == "#007800"
  assert styles["i"].color.name == "red" and styles["i"].bgcolor.name == "#500000"
  assert "How much?" not in text.plain  # the prompt is shown as its tokens


def test_scales_of_colour():
  assert [tint(np.log(p)) for p in (0.9, 0.3, 0.05, 0.001)] == [
    "default", "yellow", "dark_orange", "red"
  ]  # fmt: skip
  assert (shade(0.0), shade(1.0), shade(-1.0), shade(5.0)) == (
    None,
    "#007800",
    "#780000",
    "#007800",
  )


def test_overview_of_a_group_of_faults_has_no_averages():
  table = overview([episode(outcome=Outcome.FAULT)])
  cells = [next(iter(column.cells)) for column in table.columns]
  assert cells[1:] == ["1", "0", "0", "1", "-", "-", "-", "-"]


def test_on_a_terminal_it_colours_and_ends(workdir):
  main, side = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.view", str(workdir / "trajectories" / "step_000012.jsonl")],
    cwd=ROOT,
    stdin=side,
    stdout=side,
    stderr=subprocess.PIPE,
    env=os.environ | {"PATH": "/nonexistent", "TERM": "xterm-256color", "COLUMNS": "100"},
  )
  os.close(side)
  received = b""
  while True:
    try:
      chunk = os.read(main, 65536)
    except OSError:  # Linux reports the closed side as an error
      break
    if not chunk:
      break
    received += chunk
  os.close(main)
  assert process.wait(timeout=120) == 0
  assert b"\x1b[" in received and b"tokens: plain" in received
