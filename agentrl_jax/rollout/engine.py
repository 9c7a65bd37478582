"""What samples tokens: a SGLang server or the embedded JAX sampler, behind one small protocol."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

Finish = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How to sample one turn. Support is the full vocabulary: truncated sampling biases every ratio.

  Log-probs are those of softmax(logits / temperature). `temperature` 0 is greedy, for evaluation
  only.
  """

  max_new_tokens: int
  stop_token_ids: tuple[int, ...]
  temperature: float = 1.0
  seed: int = 0

  def __post_init__(self):
    if self.max_new_tokens < 1:
      raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
    if not self.temperature >= 0:
      raise ValueError(f"temperature is {self.temperature}, expected >= 0")


@dataclasses.dataclass(frozen=True)
class Generation:
  """The sampled tokens of one turn; a sampled stop token is the last of them, with its log-prob."""

  ids: np.ndarray  # int32 [n]
  logp: np.ndarray  # float32 [n], of the sampled ids at the sampling temperature
  version: np.ndarray  # int32 [n], weight version that sampled each token
  finish: Finish


class Engine(Protocol):
  """Tokens in, tokens out. Every call has a deadline and fails with `EngineError`, never a hang."""

  name: str

  async def generate(
    self, request_id: str, prompt: Sequence[int], params: SamplingParams
  ) -> Generation: ...

  async def version(self) -> int:
    """The weight version it serves now."""
    ...

  async def healthy(self) -> bool:
    """Whether it answers; never raises."""
    ...

  async def abort(self, request_id: str) -> None:
    """Cancels a request if it is still running; unknown ids are ignored."""
    ...

  async def close(self) -> None:
    """Releases what this object started, and nothing else. Idempotent."""
    ...


class EngineError(Exception):
  """A call to an engine failed; the message names the engine, the call and the reason."""


class EngineDead(EngineError):
  """The engine is gone (process ended, or its heartbeat stopped); the message names its log."""
