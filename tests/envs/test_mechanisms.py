import asyncio
import itertools
import json
import math
import random
import subprocess
import sys

import pytest

from agentrl_jax.envs.mechanisms import draw, environment, scripted, skins, solvers, words
from agentrl_jax.envs.mechanisms.environment import Playing, Problem, problem_of, result, score
from agentrl_jax.envs.mechanisms.families import FAMILIES, edge
from agentrl_jax.envs.mechanisms.mechanism import ERRORS
from agentrl_jax.rollout.environment import EnvFault, Malformed, Message, ToolCall
from agentrl_jax.rollout.records import Task

EVERY = tuple(FAMILIES)
ROOT = __file__.rsplit("/tests/", 1)[0]


def call(name, **arguments):
  return ToolCall(name, arguments)


def tasks(family, count, presentation="A", split="train"):
  return [draw.make_task(family, presentation, split, seed) for seed in range(count)]


def exact(family):
  return draw.EXACT.get(family, 1e-9)


def transcript(problem, calls):
  """The observations of calls, until the episode is over."""
  played = Playing(problem)
  seen = []
  for one in calls:
    if not played.over:
      seen.append(environment.text_of(played.call(one)))
  return played, seen


# --- reward (V1, V2, V3, V16) ---------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_the_scripts_reach_what_the_solver_says(family):
  """V3: the oracle in I gives u* (in A less its fees). V16: the naive rule gives the stored u0."""
  for task in tasks(family, 25):
    a = problem_of(task)
    i = problem_of(draw.make_task(family, "I", "train", task.seed))
    best, _ = transcript(i, scripted.oracle_calls(i))
    assert best.ended
    assert best.utility() == pytest.approx(i.best, rel=exact(family), abs=exact(family))
    assert result(best)[0] == {environment.REWARD: pytest.approx(1.0, abs=1e-4)}  # V1
    hidden = len(a.theta[a.mechanism.hidden])
    probed, _ = transcript(a, scripted.oracle_calls(a))
    fees = hidden * a.mechanism.probe_cost
    assert probed.ended and probed.utility() == pytest.approx(a.best - fees, abs=1e-4)
    for problem in (a, i):
      naive, _ = transcript(problem, scripted.naive_calls(problem))
      assert naive.ended and naive.utility() == pytest.approx(task.params["naive"], abs=1e-9)
      assert result(naive)[0][environment.REWARD] == pytest.approx(0.0, abs=1e-9)  # V1


def test_the_reward_is_clipped_at_both_ends_and_never_above_the_optimum():
  problem = Problem(FAMILIES["knapsack"], {}, best=10.0, naive=4.0, presentation="I")
  assert [score(problem, u) for u in (1.0, 4.0, 7.0, 10.0)] == [0.0, 0.0, 0.5, 1.0]
  assert score(problem, 10.0 + 1e-7) == 1.0  # what rounding may add
  with pytest.raises(EnvFault, match=r"bound: knapsack: utility 10.1, and the optimum is 10.0"):
    score(problem, 10.1)


# By hand: one item (weight 2, profit 5), multipliers 1 and 3, budget 2: take it in period 1 for 15.
# The naive rule has 1 a period, which buys nothing.
SMALL = {"budget": 2, "weights": [2], "multipliers": [1, 3], "stickers": [5], "profits": [5]}


def test_what_is_admitted():
  """V2: the spread is at least a tenth of max(1, |best|), and both plans can be replayed."""
  found = draw.solve("knapsack", SMALL)
  assert (found.best, found.naive) == ((15.0, [0, 1]), (0.0, [0, 0]))
  assert draw.refused(found) is None
  near = found.naive._replace(utility=13.6)
  assert draw.refused(draw.Solved("knapsack", SMALL, found.best, near)) == "spread"
  below = [plan._replace(utility=u) for plan, u in ((found.best, -1.0), (found.naive, -3.0))]
  assert draw.refused(draw.Solved("knapsack", SMALL, *below)) == "band"  # doing nothing is worth 0
  wrong = found.best._replace(utility=16.0)
  assert draw.refused(draw.Solved("knapsack", SMALL, wrong, found.naive)) == "replay"
  for family in EVERY:
    for task in tasks(family, 20):
      p = task.params
      assert p["best"] - p["naive"] >= 0.1 * max(1.0, abs(p["best"]))


def test_inventory_by_hand():
  """Demand 2 and 0, no stock, fixed 1: order 2 and sell them: 12 - 4 - 1 = 7, then nothing."""
  theta = {"stock": 0, "fixed": 1, "forecast": [0, 3], "demand": [2, 0]}
  theta |= {"price": 6, "cost": 2, "holding": 1, "shortage": 2}
  assert solvers.inventory(theta) == (7.0, [2, 0])
  # Nothing for the first period: 2 unmet cost 4; then 3 are ordered, cost 6 + 1, and left for 3.
  assert solvers.naive_inventory(theta) == (-14.0, [0, 3])
  # A demand of 1 that costs more to meet (6 - 2 - 5) than not to (-2), and leaving early costs 0.
  with pytest.raises(solvers.Unfinished, match=r"to the end -1\.0 at best, 0\.0 by stopping"):
    solvers.inventory(theta | {"fixed": 5, "demand": [1], "forecast": [1]})


# --- solvers against brute force (V3) -------------------------------------------------------------


def worth(family, theta, plan):
  """Utility of a plan by the rules, None where a call of it is refused."""
  problem = Problem(FAMILIES[family], theta, math.inf, 0.0, "I")
  played = Playing(problem)
  facts = [played.call(one) for one in FAMILIES[family].calls(theta, plan)]
  return None if any("error" in f for f in facts) or not played.ended else played.utility()


PLANS = {
  "inventory": lambda: itertools.product(range(9), repeat=3),
  "knapsack": lambda: itertools.product((0, 1), repeat=6),
  "routing": lambda: itertools.permutations(range(1, 5)),
  "stopping": lambda: itertools.product(range(6)),
  "facility": lambda: itertools.product((0, 1), repeat=6),
}
SIZES = {"inventory": {"periods": 3}, "knapsack": {"items": 3, "periods": 2}}


@pytest.mark.parametrize("family", list(PLANS))
def test_no_plan_is_better_than_the_solver_s(family):
  for seed in range(4):
    task = draw.make_task(family, "I", "train", seed, **SIZES.get(family, {}))
    theta = task.params["theta"]
    found = [u for plan in PLANS[family]() if (u := worth(family, theta, plan)) is not None]
    assert max(found) == pytest.approx(task.params["best"], rel=1e-9)


def test_linear_optima_are_the_best_corner():
  """A linear programme's optimum lies where as many constraints are tight as there are levels."""
  import numpy as np

  for task in tasks("linear", 10):
    theta = task.params["theta"]
    rows = np.vstack([theta["use"], np.eye(3)])
    bounds = np.array([*theta["limits"], 0.0, 0.0, 0.0])
    corners = []
    for tight in itertools.combinations(range(5), 3):
      if abs(np.linalg.det(rows[list(tight)])) > 1e-9:
        x = np.linalg.solve(rows[list(tight)], bounds[list(tight)])
        if (x >= -1e-9).all() and (rows[:2] @ x <= bounds[:2] + 1e-9).all():
          corners.append(float(np.dot(theta["values"], x)))
    assert max(corners) == pytest.approx(task.params["best"], rel=1e-6)


def test_the_online_reference_of_stopping():
  """Two offers of which the second is surely 30 (60 is twice it, and nothing else's): wait."""
  theta = {"look_cost": 1, "stickers": [20, 60], "offers": [20, 30]}
  assert solvers.online_stopping(theta) == 28.0
  # The second is surely 5 (3 is half of 5 or 6; 8 of 15 ...): 3 leaves 5 or 6, so 20 is taken.
  assert solvers.online_stopping(theta | {"stickers": [20, 3], "offers": [20, 5]}) == 19.0
  for task in tasks("stopping", 30):
    assert task.params["online"] <= task.params["best"]


# --- episodes -------------------------------------------------------------------------------------


def test_random_episodes_never_exceed_the_optimum():
  """V6, over 10,000 episodes. V14: what is realised is finite at every turn."""
  for family in EVERY:
    chance = random.Random(family)
    drawn = [problem_of(task) for task in tasks(family, 40)]
    for episode in range(10_000 // len(EVERY) + 1):
      played = Playing(drawn[episode % len(drawn)])
      while not played.over:
        played.call(scripted.random_call(played.problem, chance))
        assert math.isfinite(played.utility())
      reward, info = result(played)  # raises where the utility exceeds the optimum
      assert 0.0 <= reward[environment.REWARD] <= 1.0 and info["calls"] <= played.problem.turn_limit


@pytest.mark.parametrize("family", EVERY)
def test_idling_the_naive_rule_and_the_optimum_end_within_the_limit(family):
  """V7."""
  for presentation in ("I", "A"):
    problem = problem_of(draw.make_task(family, presentation, "train", 3))
    for calls in (scripted.idle_calls, scripted.naive_calls, scripted.oracle_calls):
      played, _ = transcript(problem, calls(problem))
      assert played.over and math.isfinite(result(played)[0][environment.REWARD])
      assert played.ended == (calls is not scripted.idle_calls)


@pytest.mark.parametrize("family", EVERY)
def test_presentations_and_stories_share_everything_that_counts(family):
  """V8, V15; and V12: the plan of F is worth what its replay in I is."""
  f, i, a = (draw.make_task(family, p, "held_out", 5) for p in "FIA")
  problems = [problem_of(t) for t in (f, i, a)]
  assert len({p.state_hash() for p in problems}) == 1
  assert f.params["theta"] == i.params["theta"] == a.params["theta"]
  told = set()
  for skin in range(len(skins.PLACES)):
    other = Task(family, "held_out", 5, {**a.params, "skin": skin})
    opening = asyncio.run(environment.build(other))
    assert opening.state_hash == problems[2].state_hash()
    (message,) = opening.messages
    told.add(message.content)
    assert numbers(message.content) == numbers(next(iter(told)))
  assert len(told) == len(skins.PLACES)
  answered, _ = transcript(problems[0], scripted.oracle_calls(problems[0]))
  replayed, _ = transcript(problems[1], scripted.oracle_calls(problems[1]))
  assert answered.ended and answered.turns == 1
  assert answered.utility() == pytest.approx(replayed.utility(), abs=1e-9)


def numbers(text):
  return [word for word in text.replace("[", " ").replace("]", " ").replace(",", " ").split()
          if word.isdecimal()]  # fmt: skip


BAD = [
  call("fly"),
  call("order"),
  call("order", quantity=9),
  call("order", quantity=-1),
  call("order", quantity=True),
  call("order", quantity=float("nan")),
  call("order", quantity=10**30),
  call("order", quantity=1, more=2),
  call("probe", index=4),
  call("probe", index="0"),
  call("answer", plan=[1, 1, 1, 1]),  # of form F
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_what_is_wrong_costs_a_turn_and_changes_nothing(bad):
  """V9."""
  played = Playing(problem_of(draw.make_task("inventory", "A", "train", 0)))
  before = (played.state, played.utility(), set(played.probed))
  assert played.call(bad)["error"] in ERRORS
  assert (played.state, played.utility(), played.probed) == before
  assert (played.turns, played.invalid, played.ended) == (1, 1, False)


def test_acts_that_the_rules_refuse():
  knapsack = Playing(Problem(FAMILIES["knapsack"], SMALL, 15.0, 0.0, "I"))
  assert knapsack.call(call("take", item=0)) == {"budget": 0}
  assert knapsack.call(call("take", item=0)) == {"error": "ALREADY_DONE"}
  assert knapsack.call(call("advance")) == {"budget": 0, "period": 1}
  assert knapsack.call(call("take", item=0)) == {"error": "INFEASIBLE"}
  assert knapsack.call(call("take", item=7)) == {"error": "INFEASIBLE"}
  assert knapsack.call(call("advance")) == {"budget": 0, "period": 2} and knapsack.ended
  assert knapsack.call(call("status")) == {"error": "ENDED"}
  assert (knapsack.turns, knapsack.utility()) == (6, 5.0)
  theta = {"use": [[1.0, 2.0]], "limits": [4], "stickers": [1, 1], "values": [1, 1]}
  linear = Playing(Problem(FAMILIES["linear"], theta, 4.0, 0.0, "I"))
  assert linear.call(call("set_level", variable=1, value=2.01)) == {"error": "INFEASIBLE"}
  assert linear.call(call("set_level", variable=0, value=float("inf"))) == {"error": "BAD_ARGS"}
  assert linear.call(call("set_level", variable=0, value=4)) == {"levels": (4.0, 0.0)}
  assert linear.call(call("commit")) == {} and linear.utility() == 4.0
  stopping = Playing(problem_of(draw.make_task("stopping", "A", "train", 0)))
  assert stopping.call(call("accept")) == {"error": "INFEASIBLE"}


@pytest.mark.parametrize("plan", [[1], [1, 1, 1, 1.5], [0, 0, 0, float("nan")], [9] * 65, "0000"])
def test_answers_that_are_no_plan(plan):
  played = Playing(problem_of(draw.make_task("inventory", "F", "train", 0)))
  assert played.call(call("answer", plan=plan)) == {"error": "BAD_ARGS"} and not played.ended


def test_an_answer_is_carried_out_as_far_as_it_can_be():
  """The second take does not fit the budget: passed over, counted, and the rest is done."""
  problem = Problem(FAMILIES["knapsack"], SMALL, 15.0, 0.0, "F")
  played = Playing(problem)
  assert "error" not in played.call(call("answer", plan=[1, 1]))
  assert (played.utility(), played.invalid, played.turns, played.ended) == (5.0, 1, 1, True)


def test_a_probe_is_paid_once_for_each_number():
  """V13."""
  played = Playing(problem_of(draw.make_task("routing", "A", "train", 0)))
  idle = played.utility()
  first = played.call(call("probe", i=0, j=1))
  assert played.call(call("probe", i=1, j=0)) == first
  assert (played.utility(), played.turns) == (idle - 0.5, 2)
  assert first == {"value": played.problem.theta["costs"][0]}
  assert played.call(call("probe", i=1, j=1)) == {"error": "BAD_ARGS"}
  assert played.call(call("probe", i=1, j=2))["value"] == played.problem.theta["costs"][4]


def test_legs_are_numbered_in_the_order_of_pairs():
  pairs = list(itertools.combinations(range(5), 2))
  assert [edge(5, i, j) for i, j in pairs] == list(range(10)) == [edge(5, j, i) for i, j in pairs]


def test_a_cut_scores_what_was_done():
  """V14, through the agent loop's form: inventory by its own sum of parts after each turn."""
  task = draw.make_task("inventory", "A", "train", 1)
  theta = task.params["theta"]

  async def cut_after(turns):
    opening = await environment.build(task)
    for quantity in [2, 0, 3][:turns]:
      assert not (await opening.env.step((call("order", quantity=quantity),))).reward
    step = await opening.env.cut("wall")
    with pytest.raises(RuntimeError, match="over"):
      await opening.env.step((call("status"),))
    return step

  stock, total = theta["stock"], 0.0
  for turns in range(4):
    step = asyncio.run(cut_after(turns))
    assert step.truncated and not step.terminated
    assert step.info["utility"] == pytest.approx(total) and step.info["finished"] == 0.0
    if turns < 3:
      order, wanted = [2, 0, 3][turns], theta["demand"][turns]
      sold = min(wanted, stock + order)
      total += 6 * sold - 2 * order - (theta["fixed"] if order else 0)
      stock += order - sold
      total -= stock + 2 * (wanted - sold)


def test_an_episode_ends_at_its_turn_limit_and_is_scored():
  async def play():
    task = draw.make_task("inventory", "I", "train", 1)
    opening = await environment.build(task)
    steps = [await opening.env.step(Message("assistant", "hello"))]
    steps.append(await opening.env.step(Malformed("{", "no JSON")))
    steps.append(await opening.env.step((call("status"), call("probe", index=0))))
    while not steps[-1].truncated:
      steps.append(await opening.env.step((call("status"),)))
    return opening, steps

  opening, steps = asyncio.run(play())
  assert len(steps) == opening.turn_limit - 1  # one turn had two calls
  assert [m.content for m in steps[0].observation] == ['{"error": "UNKNOWN_TOOL"}']
  assert [m.content for m in steps[1].observation] == ['{"error": "BAD_ARGS"}']
  assert len(steps[2].observation) == 2
  assert not steps[-1].terminated and environment.REWARD in steps[-1].reward
  assert steps[-1].info["invalid"] == 2.0 and steps[-1].info["probes"] == 1.0


# --- what must not be seen (V5), and determinism (V4) ---------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_hidden_numbers_are_seen_only_where_they_are_revealed(family):
  """V5 in marker mode: hidden numbers are seven digits long, so a search finds no other number."""
  chance = random.Random(f"markers/{family}")
  m = FAMILIES[family]
  for task in tasks(family, 10):
    theta = dict(task.params["theta"])
    markers = chance.sample(range(1_000_000, 10_000_000), len(theta[m.hidden]))
    theta[m.hidden] = markers
    problem = Problem(m, theta, 1e12, -1e12, "A", skin=task.seed % 6)
    tools = json.dumps([[t.name, t.description, dict(t.parameters)] for t in problem.tools])
    assert not seen_in(skins.story(m, theta, problem) + tools, markers)
    for _ in range(20):
      played, revealed = Playing(problem), set()
      while not played.over:
        one = scripted.random_call(problem, chance)
        looked = played.state.get("looked")
        text = environment.text_of(played.call(one))
        if one.name == "probe":
          revealed |= {markers[i] for i in played.probed}
        if played.state.get("looked") != looked:  # an offer is seen by looking at it
          revealed.add(markers[looked])
        assert seen_in(text, markers) <= revealed, one


def seen_in(text, markers):
  return {x for x in markers if str(x) in text}


def test_what_is_told_does_not_depend_on_what_is_hidden():
  for family in EVERY:
    m, task = FAMILIES[family], draw.make_task(family, "A", "train", 2)
    theta = task.params["theta"]
    other = {**theta, m.hidden: list(reversed(theta[m.hidden]))}
    one, two = (Problem(m, t, 1.0, 0.0, "A") for t in (theta, other))
    assert skins.story(m, theta, one) == skins.story(m, other, two)
    assert one.turn_limit == two.turn_limit


GOLDEN = """
import hashlib, json, random
from agentrl_jax.envs.mechanisms import draw, environment, scripted
from agentrl_jax.envs.mechanisms.families import FAMILIES
text = []
for family in FAMILIES:
  task = draw.make_task(family, "A", "train", 7)
  problem = environment.problem_of(task)
  played, chance = environment.Playing(problem), random.Random(family)
  text.append(problem.state_hash())
  while not played.over:
    text.append(environment.text_of(played.call(scripted.random_call(problem, chance))))
print(hashlib.sha256(json.dumps(text).encode()).hexdigest())
"""


def test_transcripts_repeat_across_processes():
  """V4."""
  found = {
    subprocess.run(
      [sys.executable, "-c", GOLDEN],
      cwd=ROOT,
      env={"PYTHONPATH": ROOT, "PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
      timeout=120,
    ).stdout
    for seed in ("1", "2")
  }
  assert len(found) == 1


def test_splits_share_no_parameters():
  """V10."""
  for family in ("inventory", "knapsack", "routing"):
    seen = {}
    for split in draw.SPLITS:
      thetas = (t.params["theta"] for t in tasks(family, 80, split=split))
      seen[split] = {json.dumps(theta, sort_keys=True) for theta in thetas}
    assert not seen["train"] & seen["held_out"]


def test_the_environment_imports_no_solver():
  program = (
    "import sys; from agentrl_jax.envs.mechanisms import environment, words\n"
    "sys.exit(any('solvers' in m or m.startswith('scipy') for m in sys.modules))"
  )
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=False)
  assert done.returncode == 0


def test_a_problem_s_utilities_cannot_be_written():
  played = Playing(problem_of(draw.make_task("inventory", "A", "train", 0)))
  for name in ("best", "naive", "theta"):
    with pytest.raises(AttributeError, match="assign"):
      setattr(played.problem, name, 0.0)


def test_what_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="family 'chess', expected one of inventory"):
    draw.make_task("chess", "A", "train", 0)
  with pytest.raises(ValueError, match="presentation 'B', expected one of F, I, A"):
    draw.make_task("inventory", "B", "train", 0)
  with pytest.raises(ValueError, match="split 'test', expected one of train, held_out"):
    draw.make_task("inventory", "A", "test", 0)
  with pytest.raises(ValueError, match=r"inventory/train/4: params .* lack 'presentation'"):
    problem_of(Task("inventory", "train", 4, {}))


# --- words ----------------------------------------------------------------------------------------

WORDED = ("inventory", "knapsack", "routing", "stopping", "facility")


@pytest.mark.parametrize("family", WORDED)
@pytest.mark.parametrize("presentation", environment.PRESENTATIONS)
def test_scripts_play_the_same_in_words(family, presentation):
  async def play(task, calls):
    problem, opening = problem_of(task), await words.build(task)
    policy, messages = scripted.in_words(problem, calls), list(opening.messages)
    while True:
      action = policy(messages)
      assert words.read_words(words.write_words(action)) == action
      step = await opening.env.step(action)
      messages += [Message("assistant", "", action), *step.observation]
      if step.terminated or step.truncated:
        return step, messages

  for seed in range(5):
    task = draw.make_task(family, presentation, "train", seed)
    problem = problem_of(task)
    for script in (scripted.oracle_calls, scripted.naive_calls):
      step, messages = asyncio.run(play(task, script(problem)))
      played, seen = transcript(problem, script(problem))
      assert step.info == result(played)[1] and step.reward == result(played)[0]
      told = [word for m in messages if m.role != "assistant" for word in m.content.split()]
      assert set(told) <= set(words.SYMBOLS)
      assert len(seen) == sum(m.role == "tool" for m in messages)


def test_what_is_told_in_words():
  def told(family, presentation):
    opening = asyncio.run(words.build(draw.make_task(family, presentation, "train", 0)))
    return opening.messages[0].content

  theta = draw.make_task("inventory", "A", "train", 0).params["theta"]
  begin = f"{theta['stock']} | {theta['fixed']} | {' '.join(map(str, theta['forecast']))}"
  assert told("inventory", "A") == f"INVENTORY FORM-A | {begin} ?"
  true = " ".join(map(str, theta["demand"]))
  assert told("inventory", "I") == f"INVENTORY FORM-I | {begin} | {true} ?"


@pytest.mark.parametrize("text", ["", "3", "DO x", "= 3", "DO 3 NEXT"])
def test_other_words_are_malformed(text):
  assert isinstance(words.read_words(text.split()), Malformed)


@pytest.mark.parametrize(
  ("text", "facts"),
  [
    ("DO 2", "= 2"),
    ("DO 99", "= BAD_ARGS"),
    ("DO", "= BAD_ARGS"),
    ("DO 1 1", "= BAD_ARGS"),
    ("ANSWER 1 1", "= UNKNOWN_TOOL"),
    ("PROBE 0", "= 9"),
    ("NEXT", "= 7 | 1"),
  ],
)
def test_words_and_what_comes_of_them(text, facts):
  theta = {"budget": 7, "weights": [1, 2, 5], "multipliers": [1, 2], "stickers": [3, 3, 3]}
  theta["profits"] = [9, 9, 9]
  env = words.Worded(
    Playing(problem := Problem(FAMILIES["knapsack"], theta, 1e3, 0.0, "A")), problem
  )
  step = asyncio.run(env.step(words.read_words(text.split())))
  assert [m.content for m in step.observation] == [facts]
