"""The agent loop: one task, one environment, one engine, one record.

What was sampled is appended as ids and never touched again; what the machinery breaks becomes a
faulted episode, what the policy breaks is the environment's to answer, and only a dead engine is
raised.
"""

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

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
from agentrl_jax.rollout.progress import Progress, view_message
from agentrl_jax.rollout.records import Episode, Kind, Segment, Task

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

  def __post_init__(self):
    counts = {"turns": 1 if self.turns is None else self.turns}
    counts |= {n: getattr(self, n) for n in ("turn_tokens", "context_tokens", "observation_chars")}
    for name, value in counts.items():
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"limits.{name} is {value!r}, expected a whole number of at least 1")
    for name in ("seconds", "env_seconds"):
      if not getattr(self, name) > 0:
        raise ValueError(f"limits.{name} is {getattr(self, name)!r}, expected more than 0")


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


def turn_seed(run_seed: int, trajectory_id: str, turn: int) -> int:
  """The sampling seed of a turn, in [0, 2**31): a hash, so any turn can be drawn again alone."""
  key = bytes(f"{run_seed}\n{trajectory_id}\n{turn}", "utf-8")
  return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 33


async def run_episode(
  play: Play, task: Task, *, trajectory_id: str, group_id: str, seed: int
) -> Episode:
  """Plays one episode and closes its environment.

  Returns a scored episode, or one whose outcome is FAULT when the environment, the engine or a
  log-prob failed, with what had been sampled until then.

  Raises:
    EngineDead: the engine is gone; nobody else's episode can go on either.
  """
  progress = Progress(task, trajectory_id, group_id, play.renderer.vocab_size)
  env: Env | None = None
  try:
    async with progress.timed("build"):
      opening = await _within(play.build(task), play.limits.env_seconds, "build")
    env, progress.state_hash = opening.env, opening.state_hash
    step, cut_reason = await _play(play, opening, progress, seed)
    return progress.scored(step, play.combine, play.threshold, cut_reason)
  except EngineDead:
    raise
  except Exception as error:  # the one boundary: an episode's failure is its own
    return progress.faulted(error)
  finally:
    if env is not None:
      await _close(env, trajectory_id, play.limits.env_seconds)


async def _play(
  play: Play, opening: Opening, progress: Progress, seed: int
) -> tuple[Step, str | None]:
  """Turns until the environment ends or a limit cuts; returns the last step, the limit's name."""
  prompt = play.renderer.opening(opening.messages, opening.tools)
  if len(prompt) >= play.limits.context_tokens:
    raise EnvFault("opening", f"{len(prompt)} tokens leave no room in {play.limits.context_tokens}")
  progress.segments.append(Segment(Kind.PROMPT, prompt))
  progress.text.extend(view_message(m) for m in opening.messages)
  try:
    while True:
      generation = await _sample_turn(play, progress, seed)
      step = await _act(play, opening.env, progress, generation)
      if step.terminated or step.truncated:
        return step, ("environment" if step.truncated else None)
      if progress.turns >= min(opening.turn_limit, play.limits.turns or opening.turn_limit):
        raise _Cut("turns")
      if progress.seconds() > play.limits.seconds:
        raise _Cut("wall")
      _observe(play, progress, step, generation)
  except _Cut as cut:
    reason = str(cut)
    if not progress.turns:
      detail = f"no turn was sampled within {play.limits.seconds} s"
      raise EnvFault("interrupted", detail) from None
    async with progress.timed("env"):
      step = await _within(opening.env.cut(reason), play.limits.env_seconds, "cut")
    progress.take(step)
    return dataclasses.replace(step, terminated=False, truncated=True), reason


async def _sample_turn(play: Play, progress: Progress, seed: int) -> Generation:
  """One turn of the policy, appended to the stream; an aborted generation is continued, with the
  same seed: engines draw a token from the seed and its index in the stream.
  """
  name, turn, prompt = progress.trajectory_id, progress.turns, progress.stream()
  budget = min(play.limits.turn_tokens, play.limits.context_tokens - len(prompt))
  parts, done = [], 0
  for attempt in range(play.limits.continuations + 1):
    request = f"{name}/{turn}" + (f".{attempt}" if attempt else "")
    params = SamplingParams(
      max_new_tokens=budget - done,
      stop_token_ids=play.renderer.stop_token_ids,
      temperature=play.temperature,
      seed=turn_seed(seed, name, turn),
    )
    context = np.concatenate([prompt, *(p.ids for p in parts)]).tolist()
    part = await _generate(play, progress, request, context, params)
    _check(part, play.renderer.vocab_size, f"{name} turn {turn}", budget - done)
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
  progress.add_turn(whole)
  return whole


async def _generate(
  play: Play, progress: Progress, request: str, context: Sequence[int], params: SamplingParams
) -> Generation:
  """One call of the engine, within what is left of the episode's time."""
  scope = asyncio.timeout(max(play.limits.seconds - progress.seconds(), 0.0))
  async with progress.timed("generate"):
    try:
      async with scope:
        return await play.engine.generate(request, context, params)
    except TimeoutError:
      if not scope.expired():
        raise
      await _within(play.engine.abort(request), play.limits.env_seconds, "abort")
      raise _Cut("wall") from None


def _check(part: Generation, vocab_size: int, where: str, budget: int) -> None:
  """Refuses what no engine may return, naming turn and position."""
  n = len(part.ids)
  if not n == len(part.logp) == len(part.version) or n > budget:
    sizes = f"{n} ids, {len(part.logp)} log-probs, {len(part.version)} versions"
    raise EngineError(f"{where}: {sizes}, asked for at most {budget}")
  ids, logp = np.asarray(part.ids), np.asarray(part.logp)
  bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if bad.size:
    raise EngineError(f"{where}, position {bad[0]}: id {ids[bad[0]]} outside [0, {vocab_size})")
  bad = np.flatnonzero(~(np.isfinite(logp) & (logp <= 1e-6)))
  if bad.size:
    detail = f"{where}, position {bad[0]}: log-prob {logp[bad[0]]} of id {ids[bad[0]]}"
    raise EnvFault("logprob", detail)


async def _act(play: Play, env: Env, progress: Progress, generation: Generation) -> Step:
  """The environment's answer to a turn. Only a stopped turn acts: one that ran out of tokens
  executes and answers nothing.
  """
  text = play.renderer.text(generation.ids)
  action: Action = Malformed(text, "the turn ran out of tokens")
  if generation.finish == "stop":
    action = play.renderer.parse(generation.ids)
  progress.note_action(action, text, generation)
  if generation.finish == "length" and len(progress.stream()) >= play.limits.context_tokens:
    raise _Cut("context")
  async with progress.timed("env"):
    step = await _within(env.step(action), play.limits.env_seconds, "step")
  progress.take(step)
  return step


def _observe(play: Play, progress: Progress, step: Step, generation: Generation) -> None:
  """Appends what the policy sees next, or cuts where it does not fit; forks where it is edited."""
  messages = [_shorten(m, play.limits.observation_chars, progress) for m in step.observation]
  delta = play.renderer.observation(messages, generation.finish)
  segments = [*progress.segments, *(Segment(kind, ids) for kind, ids in delta)]
  stream = np.concatenate([s.ids for s in segments])
  edited = play.rewrite(segments) if play.rewrite else None
  prompt = stream if edited is None else np.asarray(edited, np.int32)
  if len(prompt) >= play.limits.context_tokens:
    raise _Cut("context")
  if np.array_equal(prompt[: len(stream)], stream):
    added = prompt[len(stream) :]
    progress.segments = [*segments, *([Segment(Kind.GLUE, added)] if len(added) else [])]
    return
  shared = min(len(prompt), len(stream))
  differ = np.flatnonzero(prompt[:shared] != stream[:shared])
  at = int(differ[0]) if differ.size else shared
  was, now = (int(ids[at]) if at < len(ids) else "the end" for ids in (stream, prompt))
  progress.fork(prompt, f"context edited at {at}: {was} became {now}")


def _shorten(message: Message, limit: int, progress: Progress) -> Message:
  dropped = len(message.content) - limit
  if dropped <= 0:
    return message
  progress.count("observations_cut")
  return dataclasses.replace(
    message, content=f"{message.content[:limit]} [{dropped} characters cut]"
  )


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
