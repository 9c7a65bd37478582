"""What an episode has so far, apart from the loop: whatever ends it finds everything here."""

import dataclasses
import hashlib
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from jaxtyping import Int

from agentrl_jax.rollout.engine import EngineError, Generation
from agentrl_jax.rollout.environment import Action, EnvFault, Malformed, Message, Step
from agentrl_jax.rollout.records import Episode, Fault, Kind, Outcome, Sample, Segment, Task

COUNTED = ("tool_calls", "malformed", "length_stops", "observations_cut", "forks")


@dataclasses.dataclass
class Progress:
  """One running episode; `segments` are those of the open sample, `samples` the closed ones."""

  task: Task
  trajectory_id: str
  group_id: str
  vocab_size: int
  start: float = dataclasses.field(default_factory=time.monotonic)
  samples: list[Sample] = dataclasses.field(default_factory=list)
  segments: list[Segment] = dataclasses.field(default_factory=list)
  fork_reason: str | None = None
  turns: int = 0
  parts: list[dict[str, float]] = dataclasses.field(default_factory=list)
  text: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
  info: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
  timings: dict[str, float] = dataclasses.field(default_factory=dict)
  state_hash: str | None = None

  def seconds(self) -> float:
    """Since the episode started."""
    return time.monotonic() - self.start

  def stream(self) -> Int[np.ndarray, "n"]:
    """All tokens of the open sample: the next prompt."""
    return np.concatenate([s.ids for s in self.segments])

  def count(self, name: str, value: float = 1.0) -> None:
    self.info[name] = self.info.get(name, 0.0) + value

  @asynccontextmanager
  async def timed(self, phase: str) -> AsyncIterator[None]:
    start = time.monotonic()
    try:
      yield
    finally:
      self.timings[phase] = self.timings.get(phase, 0.0) + time.monotonic() - start

  def add_turn(self, turn: Generation) -> None:
    """Appends what was sampled, exactly."""
    self.segments.append(Segment(Kind.ACTION, turn.ids, self.turns, turn.logp, turn.version))
    self.parts.append({})
    self.turns += 1

  def note_action(self, action: Action, text: str, generation: Generation) -> None:
    """Counts the last turn's action and keeps it for viewing."""
    view: dict[str, Any] = {"role": "assistant", "content": text, "turn": self.turns - 1}
    view["finish"] = generation.finish
    self.count("length_stops", float(generation.finish == "length"))
    match action:
      case Malformed():
        self.count("malformed")
        view["malformed"] = action.reason
      case tuple():
        self.count("tool_calls", len(action))
        view["tool_calls"] = [{"name": c.name, "arguments": dict(c.arguments)} for c in action]
    self.text.append(view)

  def take(self, step: Step) -> None:
    """Credits a step's parts to the last turn and keeps its numbers and messages."""
    for name, value in step.reward.items():
      self.parts[-1][name] = self.parts[-1].get(name, 0.0) + float(value)
    for name, value in step.info.items():
      self.count(name, float(value))
    self.text.extend(view_message(m) for m in step.observation)

  def sample(self) -> Sample:
    """The open sample as a record."""
    return Sample(
      tuple(self.segments),
      self.vocab_size,
      self.trajectory_id,
      len(self.samples),
      self.fork_reason,
    )

  def fork(self, prompt: Int[np.ndarray, "n"], reason: str) -> None:
    """Closes the open sample and goes on from `prompt`, all of which is context."""
    self.samples.append(self.sample())
    self.segments = [Segment(Kind.PROMPT, np.asarray(prompt, np.int32))]
    self.fork_reason = reason
    self.count("forks")

  def scored(
    self,
    step: Step,
    combine: Callable[[Mapping[str, float]], float],
    threshold: float,
    cut_reason: str | None,
  ) -> Episode:
    """The finished record; `step` is the last one."""
    total: dict[str, float] = {}
    for parts in self.parts:
      for name, value in parts.items():
        total[name] = total.get(name, 0.0) + value
    self.info.setdefault("finished", float(step.terminated))
    return self._episode(
      outcome=Outcome.SUCCESS if combine(total) >= threshold else Outcome.FAILURE,
      turn_rewards=tuple(float(combine(parts)) for parts in self.parts),
      terminated=step.terminated,
      truncated=step.truncated,
      cut_reason=cut_reason,
    )

  def faulted(self, error: Exception) -> Episode:
    """The record of an episode that the machinery broke: unscored, with what it had."""
    match error:
      case EnvFault():
        kind = error.kind
      case EngineError():
        kind = "engine"
      case _:
        kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = "\n".join(f"{f.filename.rpartition('/')[2]}:{f.name}:{f.lineno}" for f in frames)
    digest = hashlib.sha256(bytes(place, "utf-8")).hexdigest()[:8]
    self.info["finished"] = 0.0
    return self._episode(
      outcome=Outcome.FAULT,
      turn_rewards=(0.0,) * len(self.parts),
      terminated=False,
      truncated=False,
      fault=Fault(kind, f"{type(error).__name__}: {error} [traceback {digest}]"),
    )

  def _episode(self, **verdict: Any) -> Episode:
    samples = (*self.samples, self.sample()) if self.segments else tuple(self.samples)
    sampled = sum(len(s.ids) for x in samples for s in x.segments if s.kind is Kind.ACTION)
    counts = {
      "turns": float(self.turns),
      "sampled_tokens": float(sampled),
      "context_tokens": float(sum(map(len, samples))),
    }
    return Episode(
      task=self.task,
      trajectory_id=self.trajectory_id,
      group_id=self.group_id,
      samples=samples,
      reward_parts=tuple(self.parts),
      text=tuple(self.text),
      info=self.info | counts,
      timings=self.timings | {"total": self.seconds()},
      state_hash=self.state_hash,
      **verdict,
    )


def view_message(message: Message) -> dict[str, Any]:
  """A message as plain data, for viewing."""
  view: dict[str, Any] = {"role": message.role, "content": message.content}
  if message.name is not None:
    view["name"] = message.name
  if message.tool_calls:
    view["tool_calls"] = [
      {"name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls
    ]
  return view
