import asyncio
import dataclasses
import random

import pytest

from agentrl_jax.rollout.chat import ChatRenderer, make_codec
from agentrl_jax.rollout.collect import (
  Collection,
  CollectionTimeout,
  TooManyFaults,
  collect_groups,
)
from agentrl_jax.rollout.engine import EngineDead
from agentrl_jax.rollout.environment import EnvFault, Message
from agentrl_jax.rollout.episode import Limits, Play
from agentrl_jax.rollout.records import Outcome, Task
from tests.rollout.fakes import EchoEnv, FakeEngine, byte_tokenizer, generation, opening

FAST = byte_tokenizer()
CODEC = make_codec(FAST)
CHAT = ChatRenderer(FAST, CODEC)
CALL = [*CODEC.encode('<tool_call>{"name": "look"}</tool_call>').tolist(), 257]
YES = [*CODEC.encode("yes").tolist(), 257]


class World:
  """Builds one environment an episode; `broken` says which of them, in order of building, fail."""

  def __init__(self, broken=(), states=None):
    self.envs, self.broken, self.states = [], broken, states or {}

  async def build(self, task):
    index = len(self.envs)
    env = EchoEnv([[Message("tool", str(task.seed))]])
    if index in self.broken:
      env.fail[0] = EnvFault("sandbox", f"number {index}")
    self.envs.append(env)
    return opening(env, state_hash=self.states.get(index, f"s{task.seed}"))


def two_turns(request_id, prompt, params):
  """Calls, then answers; what is sampled depends on the seed, as in a real engine."""
  ids = CALL if request_id.endswith("/0") else [97 + params.seed % 26, 257]
  return generation(ids)


def collect(engine, world, groups=3, *, label="step-4", progress=None, recover=None, **collection):
  collection = Collection(**({"members": 4, "max_fault_share": 0.2} | collection))
  play = Play(world.build, engine, CHAT, Limits(80, 2_000), lambda parts: sum(parts.values()))
  tasks = [Task("echo", "train", g, {}) for g in range(groups)]
  return asyncio.run(
    collect_groups(play, tasks, collection, label=label, seed=3, progress=progress, recover=recover)
  )


def streams(groups):
  return [[e.samples[0].ids.tolist() for e in group] for group in groups]


def test_results_are_ordered_by_task_and_member_with_deterministic_names():
  groups = collect(FakeEngine(two_turns), World())
  names = [[e.trajectory_id for e in group] for group in groups]
  assert names == [[f"step-4/{g}/{m}" for m in range(4)] for g in range(3)]
  assert [{e.group_id for e in group} for group in groups] == [{f"step-4/{g}"} for g in range(3)]
  assert [{e.task.seed for e in group} for group in groups] == [{0}, {1}, {2}]
  assert len({e.samples[0].ids.tobytes() for group in groups for e in group}) > 6


@pytest.mark.parametrize("concurrency", [1, 5, 64])
def test_results_do_not_depend_on_who_finishes_first(concurrency):
  draw = random.Random(concurrency)

  async def later(*args):
    for _ in range(draw.randrange(20)):
      await asyncio.sleep(0)
    return two_turns(*args)

  engine = FakeEngine(later)
  groups = collect(engine, World(), concurrency=concurrency)
  assert streams(groups) == streams(collect(FakeEngine(two_turns), World()))
  assert engine.most == min(concurrency, 12)


def test_progress_counts_every_episode_once():
  calls = []
  collect(FakeEngine(two_turns), World(), progress=lambda *n: calls.append(n))
  assert calls == [(k, 12) for k in range(1, 13)]


def test_one_broken_environment_of_64_costs_one_episode():
  world = World(broken={17})
  groups = collect(FakeEngine(two_turns), world, groups=16)
  outcomes = [e.outcome for group in groups for e in group]
  assert outcomes.count(Outcome.FAULT) == 1 and len(outcomes) == 64
  (fault,) = [e.fault for group in groups for e in group if e.fault]
  assert fault.kind == "sandbox" and "number 17" in fault.detail
  assert all(env.closed == 1 for env in world.envs)


def test_a_group_keeps_its_scored_members_beside_its_faults():
  """{fault, failure, failure, fault}: two scored, two faulted, no fault scored as zero."""
  groups = collect(
    FakeEngine(two_turns), World(broken={0, 3}), groups=1, max_fault_share=0.5, concurrency=1
  )
  outcomes = [e.outcome.value for e in groups[0]]
  assert outcomes == ["fault", "failure", "failure", "fault"]


def test_too_many_faults_stop_with_a_table_of_kinds():
  world = World(broken=set(range(4)))
  with pytest.raises(TooManyFaults) as caught:
    collect(FakeEngine(two_turns), world, concurrency=1)
  first, row = str(caught.value).splitlines()
  assert first == "step-4: 3 of 12 episodes faulted"
  assert row.split()[:3] == ["3", "sandbox", "EnvFault:"] and "number 0" in row
  assert all(env.closed == 1 for env in world.envs)


def test_members_from_different_states_fault_their_group_with_both_hashes():
  groups = collect(
    FakeEngine(two_turns), World(states={5: "other"}), concurrency=1, max_fault_share=0.5
  )
  assert [{e.outcome is Outcome.FAULT for e in g} for g in groups] == [{False}, {True}, {False}]
  for episode in groups[1]:
    assert episode.fault.kind == "state_hash"
    assert "step-4/1" in episode.fault.detail and "s1 and other" in episode.fault.detail


class Dying:
  """An engine that dies at each of the given calls, counted over its whole life."""

  def __init__(self, *deaths):
    self.calls, self.deaths = 0, deaths
    self.engine = FakeEngine(self.turn)

  def turn(self, request_id, prompt, params):
    self.calls += 1
    if self.calls in self.deaths:
      raise EngineDead("engine e1 is gone, see server.log")
    return two_turns(request_id, prompt, params)


def test_an_engine_death_costs_only_unfinished_episodes():
  dying, world, recovered = Dying(10), World(), []

  async def recover(error):
    recovered.append(str(error))

  counts = []
  groups = collect(
    dying.engine,
    world,
    concurrency=2,
    recover=recover,
    progress=lambda n, total: counts.append(n),
  )
  assert recovered == ["engine e1 is gone, see server.log"]
  assert streams(groups) == streams(collect(FakeEngine(two_turns), World()))
  assert counts == list(range(1, 13))
  first_turns = [name for name, _, _ in dying.engine.calls if name.endswith("/0")]
  again = {name for name in first_turns if first_turns.count(name) > 1}
  assert 1 <= len(again) <= 2 and all(env.closed == 1 for env in world.envs)


def test_a_dead_engine_is_raised_without_a_way_to_restart_or_after_the_last_restart():
  async def recover(error):
    return None

  with pytest.raises(EngineDead, match=r"server\.log"):
    collect(Dying(3).engine, World())
  for deaths, restarts in (((3, 6), 1), ((3, 6, 9), 2), ((1,), 0)):
    world = World()
    with pytest.raises(EngineDead):
      collect(Dying(*deaths).engine, world, recover=recover, restarts=restarts, concurrency=1)
    assert all(env.closed == 1 for env in world.envs)
  collect(Dying(3, 6).engine, World(), recover=recover, restarts=2, concurrency=1)


def test_the_deadline_says_what_was_waited_for():
  async def stuck():
    await asyncio.Event().wait()

  def turn(request_id, prompt, params):
    if request_id.startswith("step-4/2/"):
      return stuck()
    return two_turns(request_id, prompt, params)

  world = World()
  engine = FakeEngine(turn, name="e1", alive=False)
  with pytest.raises(CollectionTimeout) as caught:
    collect(engine, world, seconds=2.0)
  message = str(caught.value)
  assert message.startswith("step-4: 2/3 groups, 4 running (oldest ")
  assert message.endswith(" s, env echo), engine e1 dead")
  assert all(env.closed == 1 for env in world.envs)


def test_an_engine_that_does_not_restart_in_time_is_a_timeout():
  async def recover(error):
    await asyncio.Event().wait()

  with pytest.raises(CollectionTimeout, match="did not restart in time"):
    collect(Dying(3).engine, World(), recover=recover, seconds=2.0)


def test_cancelling_a_collection_closes_every_environment():
  world = World()

  async def main():
    forever = asyncio.Event()
    play = Play(
      world.build, FakeEngine(lambda *_: forever.wait()), CHAT, Limits(80, 2_000), lambda p: 0.0
    )
    task = asyncio.create_task(
      collect_groups(play, [Task("echo", "train", 0, {})], Collection(5), label="a", seed=0)
    )
    while play.engine.running < 5:
      await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert len(asyncio.all_tasks()) == 1

  asyncio.run(main())
  assert len(world.envs) == 5 and all(env.closed == 1 for env in world.envs)


def test_an_empty_collection_is_empty_and_impossible_sizes_are_refused():
  assert collect(FakeEngine(two_turns), World(), groups=0) == ()
  with pytest.raises(ValueError, match="0 members"):
    Collection(members=0)
  assert dataclasses.replace(Collection(3), concurrency=1).members == 3
