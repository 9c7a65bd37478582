"""What an environment is: single use, built from a task, stepped with the policy's parsed action.

What the policy causes (bad JSON, an unknown tool, a wrong argument) is an observation or a scored
end; what the machinery causes raises `EnvFault`, and no statistic ever sees it as a zero.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from agentrl_jax.rollout.records import Task


@dataclasses.dataclass(frozen=True)
class Message:
  """One chat message. `tool_calls` only on the assistant's; `name` is the tool's on a tool's."""

  role: Literal["system", "user", "assistant", "tool"]
  content: str
  tool_calls: tuple["ToolCall", ...] = ()
  name: str | None = None


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call as the policy wrote it; `arguments` are parsed but not yet validated."""

  name: str
  arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Malformed:
  """An action that could not be parsed, with the reason a person would give."""

  text: str
  reason: str


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool's name, one-line description and the JSON schema of its arguments."""

  name: str
  description: str
  parameters: Mapping[str, Any]


Action = tuple[ToolCall, ...] | Message | Malformed  # one turn: calls in order, or text, or neither


@dataclasses.dataclass(frozen=True)
class Step:
  """What one action led to. `reward` are named parts; they belong to the turn that caused them."""

  observation: tuple[Message, ...]
  reward: Mapping[str, float]
  terminated: bool
  truncated: bool = False
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Env(Protocol):
  """One episode's world; there is no reset."""

  async def step(self, action: Action) -> Step: ...

  async def cut(self, reason: str) -> Step:
    """A limit of the driver was hit: score what was done. `truncated` is True in the result."""
    ...

  async def close(self) -> None:
    """Always called, idempotent."""
    ...


@dataclasses.dataclass(frozen=True)
class Opening:
  """A new environment and what the policy sees first. Group members share `state_hash`."""

  env: Env
  messages: Sequence[Message]
  tools: Sequence[Tool]
  turn_limit: int
  state_hash: str


class BuildEnv(Protocol):
  """Task -> Opening; deterministic in the task."""

  async def __call__(self, task: Task) -> Opening: ...


class EnvFault(Exception):
  """The machinery failed, not the policy. `kind` is a short stable name that is counted."""

  def __init__(self, kind: str, detail: str):
    super().__init__(f"{kind}: {detail}")
    self.kind, self.detail = kind, detail
