"""Episodes as text for a terminal: turns, tool calls, rewards, and what each token's credit was.

Whatever a model or a tool wrote is hostile text: control characters are shown as escapes, never
sent.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl_jax.rollout.records import Episode, Kind, Outcome, Segment

LEGEND = (
  "plain p > .5, yellow p > .1, orange p > .01, red below; "
  "background: advantage, green above 0, red below"
)
_UNLIKELY = ((np.log(0.5), "default"), (np.log(0.1), "yellow"), (np.log(0.01), "dark_orange"))
_OUTCOMES = {Outcome.SUCCESS: "green", Outcome.FAILURE: "red", Outcome.FAULT: "magenta"}


def escape(text: str) -> str:
  """Text in which only newlines and visible characters are left; all others as \\x, \\u or \\U."""

  def one(character: str) -> str:
    if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
      return character
    code = ord(character)
    if code < 0x100:
      return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

  return "".join(map(one, text))


def pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
  """The text that each token adds; bytes of a split character appear with its last token."""
  stream, found = DecodeStream(skip_special_tokens=False), []
  for index in ids:
    try:
      found.append(stream.step(tokenizer, int(index)) or "")
    except Exception:  # what the tokenizer cannot decode is still shown; it raises bare Exceptions
      stream = DecodeStream(skip_special_tokens=False)
      found.append(f"<{index}>")
  return found


def overview(episodes: Sequence[Episode]) -> Table:
  """One line a group: its outcomes, rewards and sizes, and a last line over all."""
  groups: dict[str, list[Episode]] = {}
  for episode in episodes:
    groups.setdefault(episode.group_id, []).append(episode)
  table = Table(show_edge=False, pad_edge=False, box=box.SIMPLE_HEAD)
  table.add_column("group", overflow="fold")
  for name in ("episodes", "success", "failure", "fault", "reward", "spread", "turns", "tokens"):
    table.add_column(name, justify="right")
  for name, members in groups.items():
    table.add_row(Text(escape(name)), *_averages(members))
  table.add_section()
  table.add_row("all", *_averages(episodes))
  return table


def _averages(members: Sequence[Episode]) -> list[str]:
  counts = [sum(e.outcome is outcome for e in members) for outcome in Outcome]
  scored = [e for e in members if e.outcome is not Outcome.FAULT]
  if not scored:
    return [str(len(members)), *map(str, counts), "-", "-", "-", "-"]
  rewards = [e.reward for e in scored]
  turns, tokens = [len(e.turn_rewards) for e in scored], [e.action_tokens for e in scored]
  means = (f"{np.mean(rewards):.3f}", f"{np.std(rewards):.3f}", f"{np.mean(turns):.1f}")
  return [str(len(members)), *map(str, counts), *means, f"{np.mean(tokens):.1f}"]


def transcript(
  episode: Episode, tokenizer: Tokenizer | None = None, advantage: Sequence[float] | None = None
) -> Text:
  """One episode, whole.

  Args:
    episode: with its exact tokens.
    tokenizer: decodes them; without it the recorded messages are shown, then ids.
    advantage: of every action token in order, over all turns; None where the episode was not
    trained.

  Raises:
    ValueError: `advantage` has another length than the episode's action tokens.
  """
  if advantage is not None and len(advantage) != episode.action_tokens:
    raise ValueError(
      f"episode {episode.trajectory_id} has {episode.action_tokens} action tokens, "
      f"{len(advantage)} advantages"
    )
  text = _heading(episode)
  messages = {m["turn"]: m for m in episode.text if "turn" in m}
  if tokenizer is None:
    for message in episode.text:
      text.append(f"{escape(str(message.get('role', '?')))}: ", "bold")
      text.append(escape(str(message.get("content", ""))) + "\n")
  strongest = max(map(abs, advantage), default=0.0) if advantage is not None else 0.0
  start = 0
  for sample in episode.samples:
    if sample.fork_reason is not None:
      text.append(f"-- forked: {escape(sample.fork_reason)}\n", "bold magenta")
    for segment in sample.segments:
      if segment.kind is not Kind.ACTION:
        if tokenizer is not None:
          text.append(_line(escape("".join(pieces(segment.ids.tolist(), tokenizer)))), "dim")
        continue
      credit = None
      if advantage is not None:
        credit = np.asarray(advantage[start : start + len(segment.ids)])
      start += len(segment.ids)
      text.append(_turn_heading(episode, segment, credit), "bold cyan")
      text.append_text(_tokens(segment, tokenizer, credit, strongest))
      text.append_text(_calls(messages.get(segment.turn, {})))
  return text


def _heading(episode: Episode) -> Text:
  ends = [name for name in ("terminated", "truncated") if getattr(episode, name)]
  facts = [f"reward {episode.reward:g}", f"turns {len(episode.turn_rewards)}", *ends]
  if episode.cut_reason:
    facts.append(f"cut: {episode.cut_reason}")
  if episode.fault:
    facts.append(f"fault {episode.fault.kind}: {episode.fault.detail}")
  task = episode.task
  text = Text(f"=== {escape(episode.trajectory_id)} ", "bold")
  text.append(episode.outcome, Style(color=_OUTCOMES[episode.outcome], bold=True))
  text.append(" " + escape(" · ".join(facts)))
  text.append(
    escape(f"\n    {task.family}/{task.split} seed {task.seed}, group {episode.group_id}\n"), "dim"
  )
  return text


def _turn_heading(episode: Episode, segment: Segment, credit: np.ndarray | None) -> str:
  assert segment.logp is not None and segment.version is not None
  parts = episode.reward_parts[segment.turn].items()
  named = ", ".join(f"{escape(str(name))} {value:g}" for name, value in parts)
  facts = [
    f"turn {segment.turn}",
    f"{len(segment.ids)} tokens",
    f"log-prob mean {segment.logp.mean():.2f} least {segment.logp.min():.2f}",
    f"reward {episode.turn_rewards[segment.turn]:g}" + (f" ({named})" if named else ""),
  ]
  if credit is not None:
    facts.append(f"advantage {credit.mean():+.2f}")
  facts.append("version " + "-".join(map(str, np.unique(segment.version))))
  return f"[{' · '.join(facts)}]\n"


def _tokens(
  segment: Segment, tokenizer: Tokenizer | None, credit: np.ndarray | None, strongest: float
) -> Text:
  assert segment.logp is not None
  ids, text = segment.ids.tolist(), Text()
  words = [f"{i} " for i in ids] if tokenizer is None else pieces(ids, tokenizer)
  for place, word in enumerate(words):
    background = None
    if credit is not None and strongest > 0:
      background = shade(float(credit[place]) / strongest)
    text.append(escape(word), Style(color=tint(float(segment.logp[place])), bgcolor=background))
  if not text.plain.endswith("\n"):
    text.append("\n")
  return text


def tint(logp: float) -> str:
  """The colour of a token by how unlikely it was."""
  return next((color for least, color in _UNLIKELY if logp > least), "red")


def shade(share: float) -> str | None:
  """The background of a token by its advantage as a share of the strongest: green up, red down."""
  if abs(share) < 0.05:
    return None
  level = round(40 + 80 * min(1.0, abs(share)))
  return f"#00{level:02x}00" if share > 0 else f"#{level:02x}0000"


def _calls(message: Mapping[str, Any]) -> Text:
  text = Text()
  for call in message.get("tool_calls") or ():
    arguments = json.dumps(call.get("arguments"), ensure_ascii=False)
    text.append(f"  -> {escape(str(call.get('name')))} {escape(arguments)}\n", "bold blue")
  if message.get("malformed"):
    text.append(f"  -> malformed: {escape(str(message['malformed']))}\n", "bold magenta")
  return text


def _line(text: str) -> str:
  return text if text.endswith("\n") or not text else text + "\n"
