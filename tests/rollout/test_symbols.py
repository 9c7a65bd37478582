import numpy as np
import pytest

from agentrl_jax.envs import turn_chain
from agentrl_jax.rollout.environment import Malformed, Message, ToolCall
from agentrl_jax.rollout.records import Kind
from agentrl_jax.rollout.symbols import SymbolRenderer


def renderer(symbols=turn_chain.SYMBOLS, **options):
  return SymbolRenderer(
    symbols,
    end=turn_chain.END,
    read=turn_chain.read_words,
    write=turn_chain.write_words,
    **options,
  )


def ids(text):
  return [turn_chain.SYMBOLS.index(word) for word in text.split()]


def test_messages_are_their_symbols_and_a_turn_ends_with_end():
  r = renderer(vocab_size=48)
  assert (r.vocab_size, r.stop_token_ids) == (48, (0,))
  opening = r.opening([Message("user", "SEARCH 3 2 ?")], ())
  assert opening.dtype == np.int32 and opening.tolist() == ids("SEARCH 3 2 ?")
  action = (ToolCall("get", {"turn": 0, "key": 3}),)
  assert r.write(action).tolist() == [*ids("#0 GET 3"), 0]
  assert r.parse(r.write(action)) == action and r.text(r.write(action)) == "#0 GET 3"


def test_the_end_is_glue_only_where_it_was_not_sampled():
  r = renderer()
  (after,) = r.observation([Message("tool", "= 5")], "stop")
  assert after[0] is Kind.OBSERVATION and after[1].tolist() == ids("= 5")
  glue, seen = r.observation([Message("tool", "= 5"), Message("tool", "= OK")], "length")
  assert glue[0] is Kind.GLUE and glue[1].tolist() == [0]
  assert seen[1].tolist() == ids("= 5 = OK")
  assert r.observation([], "stop") == []


def test_ids_without_a_symbol_are_malformed():
  r = renderer(vocab_size=48)
  assert isinstance(r.parse(np.array([45, 0])), Malformed)
  assert r.text(np.array([45, 0])) == "<unknown>"
  assert isinstance(r.parse(np.array([0])), Malformed)


def test_vocabularies_that_cannot_be_are_refused():
  with pytest.raises(ValueError, match="expected single words"):
    renderer(("a b", turn_chain.END))
  with pytest.raises(ValueError, match="expected single words"):
    renderer(("a",))
  with pytest.raises(ValueError, match="38 vocabulary rows, 39 are needed"):
    renderer(vocab_size=38)
  with pytest.raises(ValueError, match="no symbol 'x'"):
    renderer().opening([Message("user", "x")], ())
