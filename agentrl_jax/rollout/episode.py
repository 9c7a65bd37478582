"""The agent loop: one task, one environment, one engine, one record.

What was sampled is appended as ids and never touched again; what the machinery breaks becomes a
faulted episode, what the policy breaks is the environment's to answer, and only a dead engine is
raised.
"""

import asyncio
import dataclasses
import hashlib
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from agentrl_jax.rollout.chat import Ids, Renderer
from agentrl_jax.rollout.engine import Engine, EngineDead, EngineError, Generation, SamplingParams
from agentrl_jax.rollout.environment import (
  Action,
  BuildEnv,
  Env,
  EnvFault,
  Malformed,
  Message,
  Opening,
  Step,
)
from agentrl_jax.rollout.records import (
  Episode,
  Fault,
  Kind,
  Outcome,
  Sample,
  Segment,
  Task,
)

T = TypeVar("T")
Rewrite = Callable[[Sequence[Segment]], Ids | None]


@dataclasses.dataclass(frozen=True)
class Limits:
  """What the driver imposes; an episode that meets one is cut, truncated and scored.

  `turn_tokens` ends a turn, not the episode: the environment answers it as unfinished.
  `env_seconds` bounds each call to the environment; beyond it the environment is at fault.
  """

  turn_tokens: int
  context_tokens: int
  seconds: float = 600.0
  turns: int | None = None  # beside the environment's own limit
  observation_chars: int = 4_000
  env_seconds: float = 60.0
  continuations: int = 8  # of one turn whose generation was aborted


@dataclasses.dataclass(frozen=True)
class Play:
  """How episodes are played: everything but the task.

  `combine` makes a scalar of named reward parts. It is applied to the parts of each turn (turn
  rewards) and to their sum over the episode, which is a success if it reaches `threshold`.

  `rewrite` may edit the context before a turn (trimming, summarising): it gets the segments so far
  and returns the whole next prompt, or None to leave it. A result that does not extend the stream
  forks the episode: a new sample, whose prompt carries no loss.
  """

  build: BuildEnv
  engine: Engine
  renderer: Renderer
  limits: Limits
  combine: Callable[[Mapping[str, float]], float]
  threshold: float = 1.0
  temperature: float = 1.0
  rewrite: Rewrite | None = None


class _Cut(Exception):
  """A limit of the driver, by its name."""


@dataclasses.dataclass
class _Progress:
  """What an episode has so far; survives whatever ends it."""

  samples: list[Sample] = dataclasses.field(default_factory=list)
  segments: list[Segment] = dataclasses.field(default_factory=list)
  fork_reason: str | None = None
  turns: int = 0
  parts: list[dict[str, float]] = dataclasses.field(default_factory=list)
  text: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
  info: dict[str, float] = dataclasses.field(default_factory=dict)
  timings: dict[str, float] = dataclasses.field(default_factory=dict)
  state_hash: str | None = None

  def stream(self) -> Ids:
    return np.concatenate([s.ids for s in self.segments])

  def count(self, name: str, value: float = 1.0) -> None:
    self.info[name] = self.info.get(name, 0.0) + value

  def add_parts(self, parts: Mapping[str, float]) -> None:
    for name, value in parts.items():
      self.parts[-1][name] = self.parts[-1].get(name, 0.0) + float(value)

  @asynccontextmanager
  async def timed(self, phase: str) -> AsyncIterator[None]:
    start = time.monotonic()
    try:
      yield
    finally:
      self.timings[phase] = self.timings.get(phase, 0.0) + time.monotonic() - start


def turn_seed(run_seed: int, trajectory_id: str, turn: int) -> int:
  """The sampling seed of a turn, in [0, 2**31): a hash, so that any turn can be drawn again alone."""
  key = f"{run_seed}\n{trajectory_id}\n{turn}".encode()
  return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 33


async def run_episode(
  play: Play, task: Task, *, trajectory_id: str, group_id: str, seed: int
) -> Episode:
  """Plays one episode and closes its environment.

  Returns a scored episode, or one whose outcome is FAULT when the environment, the engine or a log-
  prob failed, with what had been sampled until then.

  Raises:
    EngineDead: the engine is gone; nobody else's episode can go on either.
  """
  progress = _Progress()
  start = time.monotonic()
  name = {"task": task, "trajectory_id": trajectory_id, "group_id": group_id}
  env: Env | None = None
  try:
    async with progress.timed("build"):
      opening = await _within(play.build(task), play.limits.env_seconds, "build")
    env, progress.state_hash = opening.env, opening.state_hash
    step, cut_reason = await _play(play, opening, progress, trajectory_id, seed, start)
    return _scored(play, progress, name, step, cut_reason, start)
  except EngineDead:
    raise
  except Exception as error:  # the one boundary: an episode's failure is its own
    return _faulted(play, progress, name, error, start)
  finally:
    if env is not None:
      await _close(env, trajectory_id, play.limits.env_seconds)


async def _play(
  play: Play, opening: Opening, progress: _Progress, trajectory_id: str, seed: int, start: float
) -> tuple[Step, str | None]:
  """Turns until the environment ends or a limit cuts; returns the last step, the limit's name."""
  limits, env = play.limits, opening.env
  turn_limit = min(opening.turn_limit, limits.turns or opening.turn_limit)
  prompt = play.renderer.opening(opening.messages, opening.tools)
  if len(prompt) >= limits.context_tokens:
    raise EnvFault("opening", f"{len(prompt)} tokens leave no room in {limits.context_tokens}")
  progress.segments.append(Segment(Kind.PROMPT, prompt))
  progress.text.extend(_view(m) for m in opening.messages)
  try:
    while True:
      room = limits.context_tokens - len(progress.stream())
      if room < 1:
        raise _Cut("context")
      generation = await _sample_turn(play, progress, trajectory_id, seed, room, start)
      action = _read(play.renderer, generation)
      progress.text.append(_view_action(play.renderer, generation, action, progress.turns - 1))
      _count_action(progress, action, generation)
      if generation.finish == "length" and room < limits.turn_tokens:
        raise _Cut("context")
      async with progress.timed("env"):
        step = await _within(env.step(action), limits.env_seconds, "step")
      _take(progress, step)
      if step.terminated or step.truncated:
        return step, ("environment" if step.truncated else None)
      if progress.turns >= turn_limit:
        raise _Cut("turns")
      if time.monotonic() - start > limits.seconds:
        raise _Cut("wall")
      _observe(play, progress, step, generation, trajectory_id)
  except _Cut as cut:
    reason = str(cut)
    if not progress.turns:
      raise EnvFault("interrupted", f"no turn was sampled within {limits.seconds} s") from None
    async with progress.timed("env"):
      step = await _within(env.cut(reason), limits.env_seconds, "cut")
    _take(progress, step)
    return dataclasses.replace(step, terminated=False, truncated=True), reason


async def _sample_turn(
  play: Play, progress: _Progress, trajectory_id: str, seed: int, room: int, start: float
) -> Generation:
  """One turn of the policy, appended to the stream; an aborted generation is continued, with the
  same seed: engines draw a token from the seed and its index in the stream.
  """
  limits, turn = play.limits, progress.turns
  budget = min(limits.turn_tokens, room)
  prompt, parts, done = progress.stream(), [], 0
  for attempt in range(limits.continuations + 1):
    request = f"{trajectory_id}/{turn}" + (f".{attempt}" if attempt else "")
    params = SamplingParams(
      max_new_tokens=budget - done,
      stop_token_ids=play.renderer.stop_token_ids,
      temperature=play.temperature,
      seed=turn_seed(seed, trajectory_id, turn),
    )
    remaining = limits.seconds - (time.monotonic() - start)
    context = np.concatenate([prompt, *(p.ids for p in parts)])
    async with progress.timed("generate"):
      try:
        async with asyncio.timeout(max(remaining, 0.0)) as scope:
          part = await play.engine.generate(request, context.tolist(), params)
      except TimeoutError:
        if not scope.expired():
          raise
        await play.engine.abort(request)
        raise _Cut("wall") from None
    _check(part, play.renderer, f"{trajectory_id} turn {turn}", budget - done)
    parts.append(part)
    done += len(part.ids)
    if part.finish != "abort" or done >= budget:
      break
  else:
    raise EnvFault("interrupted", f"turn {turn} was aborted {len(parts)} times")
  if not done:
    raise EngineError(f"engine {play.engine.name}: turn {turn} finished without a token")
  whole = Generation(
    ids=np.concatenate([p.ids for p in parts]).astype(np.int32),
    logp=np.concatenate([p.logp for p in parts]).astype(np.float32),
    version=np.concatenate([p.version for p in parts]).astype(np.int32),
    finish="length" if parts[-1].finish == "abort" else parts[-1].finish,
  )
  progress.segments.append(Segment(Kind.ACTION, whole.ids, turn, whole.logp, whole.version))
  progress.parts.append({})
  progress.turns += 1
  return whole


def _check(part: Generation, renderer: Renderer, where: str, budget: int) -> None:
  n = len(part.ids)
  if not n == len(part.logp) == len(part.version) or n > budget:
    raise EngineError(
      f"{where}: {n} ids, {len(part.logp)} log-probs, {len(part.version)} versions, asked for {budget}"
    )
  ids, logp = np.asarray(part.ids), np.asarray(part.logp)
  bad = np.flatnonzero((ids < 0) | (ids >= renderer.vocab_size))
  if bad.size:
    raise EngineError(
      f"{where}, position {bad[0]}: id {ids[bad[0]]} outside [0, {renderer.vocab_size})"
    )
  bad = np.flatnonzero(~(np.isfinite(logp) & (logp <= 1e-6)))
  if bad.size:
    raise EnvFault(
      "logprob", f"{where}, position {bad[0]}: log-prob {logp[bad[0]]} of id {ids[bad[0]]}"
    )


def _read(renderer: Renderer, generation: Generation) -> Action:
  """Only a stopped turn acts: a turn that ran out of tokens executes and answers nothing."""
  if generation.finish == "stop":
    return renderer.parse(generation.ids)
  return Malformed(renderer.text(generation.ids), "the turn ran out of tokens")


def _take(progress: _Progress, step: Step) -> None:
  progress.add_parts(step.reward)
  for name, value in step.info.items():
    progress.count(name, float(value))
  progress.text.extend(_view(m) for m in step.observation)


def _observe(
  play: Play, progress: _Progress, step: Step, generation: Generation, trajectory_id: str
) -> None:
  """Appends what the policy sees next, or cuts where it does not fit; forks where the context is
  edited.
  """
  messages = [_shorten(m, play.limits.observation_chars, progress) for m in step.observation]
  delta = play.renderer.observation(messages, generation.finish)
  size = sum(len(ids) for _, ids in delta)
  kept = [*progress.segments, *(Segment(kind, ids) for kind, ids in delta)]
  edited = play.rewrite(kept) if play.rewrite else None
  stream = np.concatenate([s.ids for s in kept])
  if edited is None or np.array_equal(edited, stream):
    if len(progress.stream()) + size >= play.limits.context_tokens:
      raise _Cut("context")
    progress.segments = kept
    return
  if len(edited) >= play.limits.context_tokens:
    raise _Cut("context")
  if np.array_equal(edited[: len(stream)], stream):
    progress.segments = [*kept, Segment(Kind.GLUE, edited[len(stream) :])]
    return
  shared = min(len(edited), len(stream))
  differ = np.flatnonzero(edited[:shared] != stream[:shared])
  at = int(differ[0]) if differ.size else shared
  pair = [int(x[at]) if at < len(x) else "end" for x in (stream, edited)]
  progress.samples.append(_sample(play, progress, trajectory_id))
  progress.segments = [Segment(Kind.PROMPT, np.asarray(edited, np.int32))]
  progress.fork_reason = f"context edited at {at}: {pair[0]} became {pair[1]}"
  progress.count("forks")


def _shorten(message: Message, limit: int, progress: _Progress) -> Message:
  dropped = len(message.content) - limit
  if dropped <= 0:
    return message
  progress.count("observations_cut")
  return dataclasses.replace(
    message, content=f"{message.content[:limit]} [{dropped} characters cut]"
  )


def _sample(play: Play, progress: _Progress, trajectory_id: str) -> Sample:
  return Sample(
    tuple(progress.segments),
    play.renderer.vocab_size,
    trajectory_id,
    len(progress.samples),
    progress.fork_reason,
  )


def _scored(
  play: Play,
  progress: _Progress,
  name: Mapping[str, Any],
  step: Step,
  cut_reason: str | None,
  start: float,
) -> Episode:
  total: dict[str, float] = {}
  for parts in progress.parts:
    for part, value in parts.items():
      total[part] = total.get(part, 0.0) + value
  success = play.combine(total) >= play.threshold
  finished = progress.info.pop("finished", float(step.terminated))
  return _episode(
    play,
    progress,
    name,
    start,
    outcome=Outcome.SUCCESS if success else Outcome.FAILURE,
    turn_rewards=tuple(float(play.combine(parts)) for parts in progress.parts),
    terminated=step.terminated,
    truncated=step.truncated,
    cut_reason=cut_reason,
    finished=finished,
  )


def _faulted(
  play: Play, progress: _Progress, name: Mapping[str, Any], error: Exception, start: float
) -> Episode:
  match error:
    case EnvFault():
      kind = error.kind
    case EngineError():
      kind = "engine"
    case _:
      kind = type(error).__name__
  frames = traceback.extract_tb(error.__traceback__)
  place = "\n".join(f"{f.filename.rpartition('/')[2]}:{f.name}:{f.lineno}" for f in frames)
  digest = hashlib.sha256(place.encode()).hexdigest()[:8]
  return _episode(
    play,
    progress,
    name,
    start,
    outcome=Outcome.FAULT,
    turn_rewards=(0.0,) * len(progress.parts),
    terminated=False,
    truncated=False,
    fault=Fault(kind, f"{type(error).__name__}: {error} [traceback {digest}]"),
    finished=0.0,
  )


def _episode(
  play: Play,
  progress: _Progress,
  name: Mapping[str, Any],
  start: float,
  *,
  finished: float,
  **verdict: Any,
) -> Episode:
  samples = list(progress.samples)
  if progress.segments:
    samples.append(_sample(play, progress, name["trajectory_id"]))
  episode = Episode(
    samples=tuple(samples),
    reward_parts=tuple(progress.parts),
    text=tuple(progress.text),
    timings=progress.timings | {"total": time.monotonic() - start},
    state_hash=progress.state_hash,
    **name,
    **verdict,
  )
  counts = {
    "finished": finished,
    "turns": float(progress.turns),
    "sampled_tokens": float(episode.action_tokens),
    "context_tokens": float(sum(len(s) for s in samples)),
  }
  zeros = dict.fromkeys(
    ("tool_calls", "malformed", "length_stops", "observations_cut", "forks"), 0.0
  )
  return dataclasses.replace(episode, info=zeros | progress.info | counts)


def _count_action(progress: _Progress, action: Action, generation: Generation) -> None:
  match action:
    case Malformed():
      progress.count("malformed")
    case tuple():
      progress.count("tool_calls", len(action))
  if generation.finish == "length":
    progress.count("length_stops")


def _view(message: Message) -> dict[str, Any]:
  view: dict[str, Any] = {"role": message.role, "content": message.content}
  if message.name is not None:
    view["name"] = message.name
  if message.tool_calls:
    view["tool_calls"] = [
      {"name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls
    ]
  return view


def _view_action(
  renderer: Renderer, generation: Generation, action: Action, turn: int
) -> dict[str, Any]:
  view = {"role": "assistant", "content": renderer.text(generation.ids), "turn": turn}
  view["finish"] = generation.finish
  match action:
    case Malformed():
      view["malformed"] = action.reason
    case tuple():
      view["tool_calls"] = [{"name": c.name, "arguments": dict(c.arguments)} for c in action]
  return view


async def _within(call: Awaitable[T], seconds: float, what: str) -> T:
  """Awaits an environment's call; a late one is the environment's fault."""
  scope = asyncio.timeout(seconds)
  try:
    async with scope:
      return await call
  except TimeoutError:
    if not scope.expired():
      raise
    raise EnvFault("env_timeout", f"{what} took longer than {seconds} s") from None


async def _close(env: Env, trajectory_id: str, seconds: float) -> None:
  try:
    await _within(env.close(), seconds, "close")
  except Exception as error:  # the episode is decided; a leak is reported, not scored
    logging.warning("episode %s: the environment did not close: %s", trajectory_id, error)
