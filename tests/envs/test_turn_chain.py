import asyncio
import json

import pytest

from agentrl_jax.envs import turn_chain
from agentrl_jax.envs.turn_chain import make_task, make_tasks, read_words, write_words
from agentrl_jax.rollout.environment import EnvFault, Malformed, Message, ToolCall
from agentrl_jax.rollout.records import Task

SEARCH = Task("search", "train", 0, {"leads_to": [*range(1, 16), 0], "start": 3, "hops": 2})
ADD = Task("tool_use", "train", 0, {"start": 14, "target": 3})
SWITCH = Task("automation", "train", 0, {"needs": [[2], [], [], [0]], "goal": [0, 2]})

GOLDEN = ["SEARCH 0 4 ?", "TOOL 15 3 ?", "AUTO 0 2 ?", "SEARCH 3 3 ?", "TOOL 12 1 ?"]
GOLDEN_PANEL = {"needs": [[], [], [], [0, 1]], "goal": [0, 2]}


async def play(task, policy, **options):
  """The last step, all messages, and the turns of one episode."""
  opening = await turn_chain.build(task, **options)
  messages = list(opening.messages)
  for turn in range(opening.turn_limit):
    action = policy(messages)
    calls = action if isinstance(action, tuple) else ()
    messages.append(action if isinstance(action, Message) else Message("assistant", "", calls))
    step = await opening.env.step(action)
    messages += step.observation
    if step.terminated:
      return step, messages, turn + 1
  return await opening.env.cut("turns"), messages, opening.turn_limit


def run(task, policy, **options):
  return asyncio.run(play(task, policy, **options))


def call(name, turn, **number):
  return (ToolCall(name, {"turn": turn} | number),)


def acted(task, *actions):
  """The words of the observations of `actions`, and the last step."""

  async def main():
    opening = await turn_chain.build(task)
    steps = [await opening.env.step(action) for action in actions]
    return [[m.content for m in step.observation] for step in steps], steps[-1]

  return asyncio.run(main())


@pytest.mark.parametrize("split", turn_chain.SPLITS)
@pytest.mark.parametrize("family", turn_chain.FAMILIES)
def test_the_oracle_and_the_explorer_solve_every_task(split, family):
  for task in make_tasks(split, 200, family=family):
    for policy in (turn_chain.oracle(task), turn_chain.explorer(task)):
      step, _, turns = run(task, policy)
      assert step.reward == {"correct": 1.0, "finished": 1.0} and step.terminated
      assert turns <= turn_chain.turn_limit(task)
    if family == "search":
      assert turns == task.params["hops"] + 1


def test_naive_policies_score_what_their_rule_says():
  for task in make_tasks("train", 300):
    p = task.params
    step, _, turns = run(task, turn_chain.hasty)
    if task.family == "search":
      f = p["leads_to"]
      key = p["start"]
      for _ in range(p["hops"]):
        key = f[key]
      expected = f[p["start"]] == key
    else:
      expected = task.family == "tool_use" and (p["start"] + 1) % 16 == p["target"]
    assert (step.reward["correct"], turns) == (float(expected), 2)
    step, _, turns = run(task, turn_chain.never_answer)
    assert step.reward == {"correct": 0.0, "finished": 0.0} and step.truncated
    assert turns == turn_chain.turn_limit(task)


def test_the_misled_policy_fails_by_its_rule_only():
  """Where no number of an episode is a multiple of 3, it is the explorer."""
  rates = {}
  for family in turn_chain.FAMILIES:
    right = []
    for task in make_tasks("train", 200, family=family):
      step, messages, _ = run(task, turn_chain.misled(task))
      right.append(step.reward["correct"])
      calls = [m.tool_calls[0].arguments for m in messages if m.tool_calls]
      used = [a.get("key", a.get("switch")) for a in calls[:-1]]
      seen = [m.content.split()[-1] for m in messages if m.role == "tool"]
      if family == "search":
        wrong = task.params["start"] % 3 == 0 or any(int(w) % 3 == 0 for w in seen[:-1])
      elif family == "tool_use":
        wrong = task.params["start"] % 3 == 0 or any(int(w) % 3 == 0 for w in seen)
      else:
        wrong = any(switch % 3 == 0 for switch in used)
      assert wrong or step.reward["correct"] == 1.0
    rates[family] = sum(right) / len(right)
  assert all(0.1 < rate < 0.6 for rate in rates.values()), rates


def test_splits_share_no_instance():
  for family in turn_chain.FAMILIES:
    train, held_out = (
      {json.dumps(t.params, sort_keys=True) for t in make_tasks(split, 500, family=family)}
      for split in turn_chain.SPLITS
    )
    assert not train & held_out
    assert len(held_out) > 15
  assert [t.family for t in make_tasks("train", 4)] == [*turn_chain.FAMILIES, "search"]


def test_generated_tasks_are_stable():
  """Golden values: a change here changes every published curve."""
  assert [turn_chain.question(make_task("train", i)) for i in range(5)] == GOLDEN
  assert make_task("train", 2).params == GOLDEN_PANEL
  assert make_tasks("held_out", 9) == make_tasks("held_out", 9)


def test_what_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="'test', expected one of train, held_out"):
    make_task("test", 0)
  with pytest.raises(ValueError, match="family 'cooking', expected one of search"):
    make_task("train", 0, family="cooking")
  for bad in (Task("cooking", "train", 0, {}), Task("search", "train", 7, {"start": 1})):
    with pytest.raises(ValueError, match=r"family 'cooking'|search/train/7: params .* lack"):
      asyncio.run(turn_chain.build(bad))


# --- rules ----------------------------------------------------------------------------------------


def test_search_reveals_one_key_a_call():
  words, last = acted(
    SEARCH, call("get", 0, key=3), call("get", 1, key=4), call("answer", 2, key=5)
  )
  assert words == [["= 4"], ["= 5"], []] and last.reward == {"correct": 1.0, "finished": 1.0}
  assert acted(SEARCH, call("answer", 0, key=4))[1].reward["correct"] == 0.0
  assert acted(SEARCH, call("answer", 0))[1].reward["correct"] == 0.0


def test_the_register_wraps_and_allows_six_calls():
  words, last = acted(ADD, call("add", 0, amount=3), call("add", 1, amount=2), call("answer", 2))
  assert words[:2] == [["= 1"], ["= 3"]] and last.reward["correct"] == 1.0
  seven = [call("add", turn, amount=1) for turn in range(7)]
  words, last = acted(ADD, *seven)
  assert words[5] == ["= 4"] and last.terminated
  assert last.reward == {"correct": 0.0, "finished": 0.0}
  assert acted(ADD, call("add", 0, amount=5))[0] == [["= ERR"]]


def test_switches_are_blocked_until_their_prerequisites_are_on():
  order = [call("set", 0, switch=0), call("set", 1, switch=2), call("set", 2, switch=0)]
  words, last = acted(SWITCH, *order, call("answer", 3))
  assert words[:3] == [["= BLOCKED"], ["= OK"], ["= OK"]] and last.reward["correct"] == 1.0
  words, last = acted(SWITCH, *order, call("set", 3, switch=1), call("answer", 4))
  assert words[3] == ["= OK"] and last.reward["correct"] == 0.0  # more than the goal


@pytest.mark.parametrize(
  "action",
  [
    Message("assistant", "5"),
    Malformed("GET GET", "a turn is"),
    call("get", 1, key=3),  # not this turn's counter
    call("get", 0),
    call("get", 0, key=16),
    call("get", 0, key=True),
    call("get", 0, key="3"),
    call("get", 0, key=3, more=1),
    call("fetch", 0, key=3),
    call("add", 0, amount=1),  # another family's
    call("set", 0, switch=4),
    (ToolCall("get", {"key": 3}),),
  ],
)
def test_what_the_policy_gets_wrong_is_an_observation_and_costs_the_turn(action):
  words, last = acted(SEARCH, action, call("get", 1, key=3))
  assert words == [["= ERR"], ["= 4"]] and not last.terminated and last.reward == {}


def test_several_calls_of_a_turn_are_answered_in_order():
  (words,), last = acted(SEARCH, (*call("get", 0, key=1), *call("add", 0, amount=1)))
  assert words == ["= 2", "= ERR"] and last.info == {"invalid_calls": 1.0}


def test_a_fault_of_the_machinery_is_raised():
  with pytest.raises(EnvFault, match="tool: the tools of turn 1 are out of order"):
    run(SEARCH, turn_chain.oracle(SEARCH), fault_turn=1)


def test_equal_tasks_start_equal_and_others_do_not():
  async def digest(task):
    return (await turn_chain.build(task)).state_hash

  digests = {asyncio.run(digest(task)) for task in (SEARCH, SEARCH, ADD, SWITCH)}
  assert len(digests) == 3


def test_an_episode_that_is_over_takes_no_step():
  with pytest.raises(RuntimeError, match="over"):
    acted(SEARCH, call("answer", 0, key=5), call("get", 1, key=3))


# --- symbols --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("text", "action"),
  [
    ("#3 GET 7", call("get", 3, key=7)),
    ("#0 ADD 2", call("add", 0, amount=2)),
    ("#9 SET 3", call("set", 9, switch=3)),
    ("#1 ANS", call("answer", 1)),
    ("#1 ANS 15", call("answer", 1, key=15)),
    ("#1 GET", (ToolCall("get", {"turn": 1}),)),
  ],
)
def test_symbols_and_calls(text, action):
  assert read_words(text.split()) == action
  assert write_words(action) == text.split()


@pytest.mark.parametrize(
  "text", ["", "#1", "GET 3", "#1 OK 3", "#1 GET 3 4", "#1 GET =", "3 GET 3"]
)
def test_other_symbols_are_malformed(text):
  assert isinstance(read_words(text.split()), Malformed)
