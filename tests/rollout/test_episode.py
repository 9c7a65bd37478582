import ast
import asyncio
import dataclasses
import functools
import inspect
import json
import math
import operator
import random

import numpy as np
import pytest

from agentrl_jax.rollout import chat, episode
from agentrl_jax.rollout.chat import ChatRenderer, make_codec
from agentrl_jax.rollout.engine import EngineDead, EngineError
from agentrl_jax.rollout.environment import EnvFault, Malformed, Message, ToolCall
from agentrl_jax.rollout.episode import Limits, Play, run_episode, turn_seed
from agentrl_jax.rollout.records import Kind, Outcome, from_json, to_json
from agentrl_jax.rollout.scripted import demonstrate
from tests.rollout.fakes import (
  FAULT,
  TASK,
  EchoEnv,
  FakeEngine,
  byte_tokenizer,
  generation,
  opening,
)

FAST = byte_tokenizer()
CODEC = make_codec(FAST)
CHAT = ChatRenderer(FAST, CODEC)
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
END = 257


def encode(text):
  return CODEC.encode(text).tolist()


def said(text, finish="stop"):
  return generation(encode(text) + ([END] if finish == "stop" else []), finish)


def script(*turns):
  """An engine that gives the turns in order; exceptions are raised."""
  left = list(turns)

  def turn(request_id, prompt, params):
    answer = left.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer

  return FakeEngine(turn)


def play(env, engine, *, turn_limit=8, **changes):
  async def build(task):
    return opening(env, turn_limit)

  limits = {"turn_tokens": 80, "context_tokens": 2_000} | {
    k: changes.pop(k) for k in list(changes) if k in Limits.__dataclass_fields__
  }
  return Play(build, engine, CHAT, Limits(**limits), lambda parts: sum(parts.values()), **changes)


def run(setup, **name):
  name = {"trajectory_id": "t/0", "group_id": "t", "seed": 7} | name
  return asyncio.run(run_episode(setup, TASK, **name))


def calling(request_id, prompt, params):
  """Calls for ever, as far as the tokens asked for reach."""
  ids = [*encode(CALL), END]
  cut = len(ids) > params.max_new_tokens
  return generation(ids[: params.max_new_tokens], "length" if cut else "stop")


def seen(*contents):
  return EchoEnv([[Message("tool", c) for c in contents]])


def test_two_turns_are_one_stream_of_exact_segments():
  env, engine = seen("3"), script(said(CALL), said("yes"))
  result = run(play(env, engine))
  text = [(s.kind.value, CODEC.decode(s.ids), s.turn) for s in result.segments()]
  assert text == [
    ("prompt", "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n", -1),
    ("action", f"{CALL}<|im_end|>", 0),
    ("glue", "\n<|im_start|>tool\n", -1),
    ("observation", "3", -1),
    ("glue", "<|im_end|>\n<|im_start|>assistant\n", -1),
    ("action", "yes<|im_end|>", 1),
  ]
  assert env.actions == [(ToolCall("look", {}),), Message("assistant", "yes")]
  assert result.reward_parts == ({"step": 0.25}, {"correct": 1.0})
  assert result.turn_rewards == (0.25, 1.0) and result.reward == 1.25
  assert result.outcome is Outcome.SUCCESS and result.terminated and not result.truncated
  assert result.state_hash == "s0" and env.closed == 1
  counts = {"turns": 2, "tool_calls": 1, "finished": 1, "malformed": 0, "steps": 1, "forks": 0}
  assert {k: result.info[k] for k in counts} == counts
  assert result.info["sampled_tokens"] == len(said(CALL).ids) + 4 == result.action_tokens
  assert set(result.timings) == {"build", "generate", "env", "total"}
  assert [m["role"] for m in result.text] == ["user", "assistant", "tool", "assistant"]


def test_the_next_prompt_is_the_stream_and_log_probs_are_kept_by_token():
  engine = script(said(CALL), said("yes"))
  result = run(play(seen("3"), engine))
  stream = result.samples[0].ids.tolist()
  (_, first, _), (_, second, _) = engine.calls
  assert stream[: len(first)] == list(first) and stream[: len(second)] == list(second)
  actions = [s for s in result.segments() if s.kind is Kind.ACTION]
  for action, sampled in zip(actions, (said(CALL), said("yes")), strict=True):
    np.testing.assert_array_equal(action.logp, sampled.logp)
    np.testing.assert_array_equal(action.ids, sampled.ids)


def test_a_stored_episode_reads_back_equal():
  result = run(play(seen("3"), script(said(CALL), said("yes"))))
  assert to_json(from_json(to_json(result))) == to_json(result)


@pytest.mark.parametrize(
  ("place", "value", "words"),
  [
    (("samples", 0, "segments", 0, "ids", 0), 10.7, "id 10.7 at 0, expected an integer of 32 bits"),
    (("samples", 0, "segments", 0, "ids", 0), 2**40, "id 1099511627776 at 0, expected"),
    (("samples", 0, "segments", 1, "version", 0), 0.5, "version 0.5 at 0, expected"),
    (("terminated",), "no", "terminated is 'no', expected true or false"),
    (("truncated",), 0, "truncated is 0, expected true or false"),
    (("info",), None, "info is None, expected named numbers"),
    (("info",), {"finished": "yes"}, "info has finished='yes', expected a number"),
    (("reward_parts", 0), [], "reward_parts of turn 0 is [], expected named numbers"),
  ],
)
def test_a_stored_episode_of_wrong_kinds_is_refused_by_name(place, value, words):
  record = json.loads(to_json(run(play(seen("3"), script(said(CALL), said("yes"))))))
  inside = functools.reduce(operator.getitem, place[:-1], record)
  inside[place[-1]] = value
  with pytest.raises(ValueError) as caught:
    from_json(json.dumps(record))
  assert words in str(caught.value)


def test_a_success_reaches_the_threshold():
  for threshold, outcome in ((1.25, Outcome.SUCCESS), (1.26, Outcome.FAILURE)):
    setup = play(seen("3"), script(said(CALL), said("yes")), threshold=threshold)
    assert run(setup).outcome is outcome


def test_seeds_differ_by_turn_member_and_run_and_repeat():
  names = [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0)]
  seeds = [turn_seed(*name) for name in names]
  assert len(set(seeds)) == 4 and all(0 <= s < 2**31 for s in seeds)
  assert seeds == [turn_seed(*name) for name in names]
  engine = script(said(CALL), said("yes"))
  run(play(seen("3"), engine))
  assert [p.seed for _, _, p in engine.calls] == [turn_seed(7, "t/0", 0), turn_seed(7, "t/0", 1)]


# --- ends of turns (T5, R7) -----------------------------------------------------------------------


def test_a_turn_that_ran_out_of_tokens_executes_nothing_and_gets_the_end_marker_as_glue():
  env = seen("again")
  whole = generation(encode(CALL), "length")  # even a complete call
  result = run(play(env, script(whole, said("yes"))))
  assert isinstance(env.actions[0], Malformed) and "out of tokens" in env.actions[0].reason
  glue = list(result.segments())[2]
  assert CODEC.decode(glue.ids) == "<|im_end|>\n<|im_start|>tool\n"
  assert result.info["length_stops"] == 1 and result.info["malformed"] == 1


def test_a_lone_stop_token_is_a_turn():
  env = seen("x")
  result = run(play(env, script(generation([END]))))
  assert env.actions == [Message("assistant", "")] and result.info["turns"] == 1


def test_an_aborted_turn_continues_to_the_same_record_from_every_token():
  whole = said("yes")
  for cut in range(len(whole.ids)):

    def part(a, b, finish, version=0, whole=whole):
      ids, logp = whole.ids[a:b], whole.logp[a:b]
      return dataclasses.replace(
        generation(ids.tolist(), finish, version), logp=logp.astype(np.float32)
      )

    engine = script(part(0, cut, "abort"), part(cut, None, "stop", 1))
    result = run(play(seen("x"), engine))
    plain = run(play(seen("x"), script(whole)))
    (action,) = [s for s in result.segments() if s.kind is Kind.ACTION]
    for column in ("turn", "action", "logp"):
      np.testing.assert_array_equal(
        result.samples[0].column(column), plain.samples[0].column(column)
      )
    assert result.samples[0].ids.tolist() == plain.samples[0].ids.tolist()
    assert action.version.tolist() == [0] * cut + [1] * (len(whole.ids) - cut)
    (_, first, start), (_, second, rest) = engine.calls
    assert list(second) == [*first, *whole.ids[:cut].tolist()]
    assert rest.max_new_tokens == start.max_new_tokens - cut and rest.seed == start.seed


def test_a_turn_that_is_aborted_for_ever_is_a_fault_and_no_turn():
  engine = FakeEngine(lambda *_: generation([], "abort"))
  result = run(play(seen("x"), engine, continuations=2))
  assert result.fault.kind == "interrupted" and result.info["turns"] == 0
  assert len(engine.calls) == 3


# --- limits ---------------------------------------------------------------------------------------


def test_limits_cut_truncated_but_scored():
  for changes, reason in (
    ({"turn_limit": 2}, "turns"),
    ({"turns": 2}, "turns"),
    ({"context_tokens": 180}, "context"),
  ):
    env = seen("3" * 10)
    result = run(play(env, FakeEngine(calling), threshold=2.0, **changes))
    assert env.cuts == [reason] and result.cut_reason == reason
    assert result.truncated and not result.terminated and result.outcome is Outcome.FAILURE
    assert result.reward_parts[-1]["cut"] == 0.5 and result.info["finished"] == 0
    assert result.info["context_tokens"] <= 180 and env.closed == 1


def test_no_stream_exceeds_the_context_and_a_shortened_turn_is_a_context_cut():
  env = seen("3")
  engine = FakeEngine(lambda _, prompt, params: generation([97] * params.max_new_tokens, "length"))
  result = run(play(env, engine, context_tokens=100))
  assert [p.max_new_tokens for _, _, p in engine.calls] == [100 - len(engine.calls[0][1])]
  assert result.cut_reason == "context" and len(result.samples[0]) == 100 and not env.actions


def test_the_wall_limit_aborts_the_request_and_cuts():
  async def slow():
    await asyncio.sleep(60)

  left = [said(CALL)]
  engine = FakeEngine(lambda *_: left.pop() if left else slow())
  result = run(play(seen("3"), engine, seconds=1.5))
  assert result.cut_reason == "wall" and result.info["turns"] == 1
  assert engine.aborted == ["t/0/1"]
  none = run(play(seen("3"), FakeEngine(lambda *_: slow()), seconds=0.05))
  assert none.fault.kind == "interrupted" and "0.05" in none.fault.detail


def test_long_observations_are_cut_as_text_with_a_marker_and_a_count():
  result = run(play(seen("ab" * 50), script(said(CALL), said("yes")), observation_chars=10))
  (shown,) = [s for s in result.segments() if s.kind is Kind.OBSERVATION]
  assert CODEC.decode(shown.ids) == "ababababab [90 characters cut]"
  assert result.info["observations_cut"] == 1


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("error", "kind", "detail"),
  [
    (FAULT, "sandbox", "lost"),
    (ZeroDivisionError("boom"), "ZeroDivisionError", "boom"),
    (EngineError("engine e1: refused"), "engine", "refused"),
  ],
)
def test_a_broken_environment_is_a_fault_with_its_turns_kept(error, kind, detail):
  env = seen("3")
  env.fail[1] = error
  result = run(play(env, script(said(CALL), said("yes"))))
  assert result.outcome is Outcome.FAULT and result.fault.kind == kind
  assert detail in result.fault.detail and type(error).__name__ in result.fault.detail
  assert "[traceback " in result.fault.detail and env.closed == 1
  assert len(result.reward_parts) == 2 and result.turn_rewards == (0.0, 0.0)


def test_a_traceback_hash_names_the_place_not_the_text():
  def detail(error, step):
    env = seen("3")
    env.fail[step] = error
    return run(play(env, script(said(CALL), said("yes")))).fault.detail.rpartition("[")[2]

  assert detail(KeyError("a"), 0) == detail(KeyError("b"), 1)


def test_a_failing_build_is_a_fault_without_samples():
  async def build(task):
    raise EnvFault("database", "gone")

  setup = dataclasses.replace(play(seen("3"), script()), build=build)
  result = run(setup)
  assert result.fault.kind == "database" and result.samples == () and result.state_hash is None


def test_an_opening_without_room_is_a_fault_that_names_both_lengths():
  result = run(play(seen("3"), script(), context_tokens=20))
  assert result.fault.kind == "opening" and "leave no room in 20" in result.fault.detail


def test_a_slow_environment_is_its_own_fault():
  env = seen("3")
  env.slow = 30
  result = run(play(env, script(said(CALL)), env_seconds=0.05))
  assert (
    result.fault.kind == "env_timeout" and "step took longer than 0.05 s" in result.fault.detail
  )


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.1])
def test_a_bad_log_prob_names_trajectory_turn_and_position(value):
  bad = said("yes")
  bad.logp[2] = value
  result = run(play(seen("3"), script(said(CALL), bad)))
  assert result.fault.kind == "logprob"
  assert "t/0 turn 1, position 2" in result.fault.detail and result.info["turns"] == 1


@pytest.mark.parametrize(
  "bad",
  [
    generation([97, 260]),
    generation([97] * 81),
    dataclasses.replace(said("yes"), logp=np.zeros(1, np.float32)),
    generation([], "stop"),
  ],
)
def test_an_impossible_generation_is_the_engines_fault(bad):
  result = run(play(seen("3"), script(bad)))
  assert result.fault.kind == "engine" and result.info["turns"] == 0


def test_a_dead_engine_is_raised_after_the_environment_is_closed():
  env = seen("3")
  with pytest.raises(EngineDead, match=r"see server\.log"):
    run(play(env, script(said(CALL), EngineDead("engine e1 is gone, see server.log"))))
  assert env.closed == 1


def test_cancelling_closes_the_environment():
  async def main():
    env = seen("3")
    forever = asyncio.Event()
    engine = FakeEngine(lambda *_: forever.wait())
    task = asyncio.create_task(
      run_episode(play(env, engine), TASK, trajectory_id="t/0", group_id="t", seed=0)
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return env

  assert asyncio.run(main()).closed == 1


# --- forks ----------------------------------------------------------------------------------------


def test_five_hundred_dialogues_with_an_edited_history_keep_every_sampled_token_once():
  """A template that drops the reasoning of earlier turns, and one that happens to leave all as it
  is.
  """
  forks = 0
  for k in range(500):
    draw = random.Random(k)
    turns = [
      said("<think>" + "r" * draw.randrange(3) + "</think>" + CALL)
      for _ in range(draw.randrange(1, 4))
    ]
    turns.append(said("yes"))
    edits = [draw.random() < 0.5 for _ in turns]

    def rewrite(segments, edits=edits):
      edited = edits.pop(0)
      if not edited:
        return None
      parts = []
      for s in segments:
        ids = s.ids
        if s.kind is Kind.ACTION:
          close = CODEC.encode_plain("</think>").tolist()
          at = next(i for i in range(len(ids)) if ids[i : i + 8].tolist() == close)
          ids = ids[at + 8 :]
        parts.append(ids)
      return np.concatenate(parts)

    expected = sum(edits[: len(turns) - 1])
    results = [[Message("tool", "o" * draw.randrange(4))] * draw.randrange(1, 3) for _ in range(3)]
    env = EchoEnv(results)
    engine = script(*turns)
    result = run(play(env, engine, rewrite=rewrite, context_tokens=4_000))
    assert result.info["forks"] == expected == len(result.samples) - 1
    forks += expected
    actions = [s for s in result.segments() if s.kind is Kind.ACTION]
    assert [s.turn for s in actions] == list(range(len(turns)))
    for action, sampled in zip(actions, turns, strict=True):
      np.testing.assert_array_equal(action.ids, sampled.ids)
    assert {s.trajectory_id for s in result.samples} == {"t/0"}
    for sample in result.samples:
      assert len(sample.ids) == len(sample.column("action")) == len(sample.column("logp"))
    for sample in result.samples[1:]:
      assert sample.fork_reason.startswith("context edited at ")
    for (_, prompt, _), action in zip(engine.calls, actions, strict=True):
      whole = next(s for s in result.samples if any(x is action for x in s.segments)).ids.tolist()
      assert whole[: len(prompt)] == list(prompt)
  assert forks > 200


def test_a_fork_names_where_the_context_differs():
  def rewrite(segments):
    ids = np.concatenate([s.ids for s in segments]).copy()
    ids[17] = 98
    return ids

  result = run(play(seen("3"), script(said(CALL), said("yes")), rewrite=rewrite))
  was = int(result.samples[0].ids[17])
  assert result.samples[1].fork_reason == f"context edited at 17: {was} became 98"


def test_a_rewrite_that_extends_the_stream_does_not_fork():
  extra = CODEC.encode_plain("note")

  def rewrite(segments):
    return np.concatenate([*(s.ids for s in segments), extra])

  result = run(play(seen("3"), script(said(CALL), said("yes")), rewrite=rewrite))
  assert len(result.samples) == 1 and result.info["forks"] == 0
  assert list(result.segments())[-2].kind is Kind.GLUE


# --- replay and static rules ----------------------------------------------------------------------


def test_replaying_a_trajectory_reproduces_observations_and_parts():
  first = run(play(seen("3", "4"), script(said(CALL), said(CALL), said("yes"))))
  turns = [generation(s.ids.tolist()) for s in first.segments() if s.kind is Kind.ACTION]
  second = run(play(seen("3", "4"), script(*turns)))
  assert second.samples[0].ids.tolist() == first.samples[0].ids.tolist()
  assert second.reward_parts == first.reward_parts and second.outcome is first.outcome


def test_demonstrations_are_episodes_of_the_written_actions():
  def policy(messages):
    if messages[-1].role == "tool":
      return Message("assistant", "yes")
    return (ToolCall("look", {}),)

  setup = play(seen("3"), script())
  result = asyncio.run(demonstrate(setup, TASK, policy, trajectory_id="t/0", group_id="t"))
  assert result.outcome is Outcome.SUCCESS and result.info["turns"] == 2
  for s in result.segments():
    if s.kind is Kind.ACTION:
      assert s.logp.tolist() == [0.0] * len(s.ids) and set(s.version.tolist()) == {-1}


def called(tree):
  """Names of everything called in a syntax tree."""
  return {
    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
  }


def test_sampled_ids_are_never_encoded_again():
  """The loop encodes nothing itself; a renderer's readers only decode and its writers only encode
  (R1).
  """
  encoders = {"encode", "encode_plain", "opening", "write"}
  loop = called(ast.parse(inspect.getsource(episode)))
  assert not loop & {"encode", "encode_plain", "write", "decode", "apply_chat_template"}
  readers = {"text", "parse"}
  for node in ast.walk(ast.parse(inspect.getsource(chat))):
    if isinstance(node, ast.FunctionDef):
      if node.name in readers:
        assert not called(node) & encoders, node.name
      if node.name in {"opening", "observation"}:
        assert not called(node) & {"decode", "text", "parse"}, node.name


def test_every_wait_in_the_loop_has_a_deadline():
  """All calls go through `_within`; only the engine's stands under a timeout of its own."""
  tree = ast.parse(inspect.getsource(episode))
  bare = [
    node.value.func.attr
    for node in ast.walk(tree)
    if isinstance(node, ast.Await)
    and isinstance(node.value, ast.Call)
    and isinstance(node.value.func, ast.Attribute)
  ]
  assert bare == ["generate"]
