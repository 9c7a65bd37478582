"""Tasks whose messages are words of a small vocabulary: one symbol a token, nothing to tokenize.

For models of their own that were never taught a language. An environment says what its words mean
(`read`, `write`); a message's content is its symbols, separated by blanks.
"""

from collections.abc import Callable, Sequence

import numpy as np

from agentrl_jax.rollout.chat import Delta, Ids
from agentrl_jax.rollout.engine import Finish
from agentrl_jax.rollout.environment import Action, Malformed, Message, Tool
from agentrl_jax.rollout.records import Kind


class SymbolRenderer:
  """Implements `Renderer`. A turn ends with the symbol `end`.

  Args:
    symbols: the vocabulary; a symbol's id is its index.
    end: one of them.
    read: a turn's symbols (without `end`) to the action.
    write: an action to its symbols, for demonstrations.
    vocab_size: rows of the model's unembedding, if more than there are symbols.

  Raises:
    ValueError: symbols that repeat, hold blanks or lack `end`, or more of them than `vocab_size`.
  """

  def __init__(
    self,
    symbols: Sequence[str],
    *,
    end: str,
    read: Callable[[Sequence[str]], Action],
    write: Callable[[Action], Sequence[str]],
    vocab_size: int | None = None,
  ):
    bad = [s for s in symbols if s.split() != [s] or symbols.count(s) > 1]
    if bad or end not in symbols:
      raise ValueError(f"symbols {bad or [end]}: expected single words, each once, with the end")
    if vocab_size is not None and vocab_size < len(symbols):
      raise ValueError(f"the model has {vocab_size} vocabulary rows, {len(symbols)} are needed")
    self._symbols = tuple(symbols)
    self._id_of = {symbol: i for i, symbol in enumerate(symbols)}
    self._end, self._read, self._write = end, read, write
    self.vocab_size = vocab_size or len(symbols)
    self.stop_token_ids: tuple[int, ...] = (self._id_of[end],)

  def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
    del tools  # their form is in the weights
    return self._encode([word for m in messages for word in m.content.split()])

  def observation(self, messages: Sequence[Message], finish: Finish) -> Delta:
    delta = [] if finish == "stop" else [(Kind.GLUE, self._encode([self._end]))]
    words = [word for m in messages for word in m.content.split()]
    return [*delta, (Kind.OBSERVATION, self._encode(words))] if words else delta

  def parse(self, ids: Ids) -> Action:
    words = self._words(ids)
    if None in words:
      return Malformed(self.text(ids), "an id without a symbol")
    return self._read(words)  # pyright: ignore  (no None is left)

  def text(self, ids: Ids) -> str:
    return " ".join(word or "<unknown>" for word in self._words(ids))

  def write(self, action: Action) -> Ids:
    return self._encode([*self._write(action), self._end])

  def _words(self, ids: Ids) -> list[str | None]:
    count = len(self._symbols)
    words = [self._symbols[i] if i < count else None for i in np.asarray(ids).tolist()]
    return words[:-1] if words and words[-1] == self._end else words

  def _encode(self, words: Sequence[str]) -> Ids:
    unknown = [word for word in words if word not in self._id_of]
    if unknown:
      raise ValueError(f"no symbol {unknown[0]!r}")
    return np.asarray([self._id_of[word] for word in words], np.int32)
