"""Small real RL: running sums and unit conversions by a policy network of a few thousand weights.

A response names each operand, writes the running result, then any number of check tokens, then goes
on; after the last operand it stops, and its last result is the answer. The network reads the state
of the response (operand, result so far, phase) in place of its text, so a run takes seconds; the
losses are the library's own recipes on its own batches.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from agentrl_jax.analysis.finishing import decompose
from agentrl_jax.analysis.samples import Samples, cut
from agentrl_jax.learner import optim
from agentrl_jax.learner.step import make_prepare
from agentrl_jax.types import Aux, PolicyEval, TrajectoryBatch
from experiments.arms import Place
from experiments.finishing.config import Evaluation, Reinforced, Start
from experiments.finishing.measure import BUDGET, EXTENDED, measure

CHECK, NEXT, STOP, VOCABULARY = 10, 11, 12, 13  # tokens 0 to 9 are digits
COPY, RESULT, AFTER = 0, 1, 2  # phases within a step
SETS = ("maths", "physics")
OPERANDS = {"maths": (4, 8), "physics": (3, 5)}  # fewest and most that the base is shown
BEYOND = {"maths": (9, 10), "physics": (6, 7)}
MOST = 10
CHUNK = 1600  # episodes of one evaluation call, so that one program serves them all

Weights = dict[str, Array]
Values = Array | np.ndarray


class Problems(NamedTuple):
  """N problems: 0 adds, 1 multiplies, modulo 10; `count` operands of `operand` after `start`."""

  kind: Int[Values, " N"]
  start: Int[Values, " N"]
  operand: Int[Values, "N K"]
  count: Int[Values, " N"]

  def take(self, rows: np.ndarray) -> "Problems":
    return Problems(*(column[rows] for column in self))


class State(NamedTuple):
  """What the network reads at a token, one row a response."""

  phase: Int[Values, "*N"]
  kind: Int[Values, "*N"]
  result: Int[Values, "*N"]
  operand: Int[Values, "*N"]
  copied: Int[Values, "*N"]
  last: Int[Values, "*N"]


class Episodes(NamedTuple):
  """Sampled responses: states and tokens of T places, and how each ended."""

  states: State
  tokens: Int[Array, "N T"]
  logp: Float[Array, "N T"]
  alive: Array  # the token at this place was sampled
  finished: Array
  correct: Array


def make_problems(which: str, size: int, beyond: float, rng: np.random.Generator) -> Problems:
  """The first `beyond` of them are longer than what the base is shown."""
  outside = np.arange(size) < round(beyond * size)
  (low, high), (more, most) = OPERANDS[which], BEYOND[which]
  count = np.where(outside, rng.integers(more, most + 1, size), rng.integers(low, high + 1, size))
  kind = np.full(size, SETS.index(which))
  operand = rng.integers(1, 10, (size, MOST))
  return Problems(kind, rng.integers(1, 10, size), operand, count)


def apply(kind: Values, result: Values, operand: Values) -> Array:
  return jnp.where(kind == 0, result + operand, result * operand) % 10


def answers(problems: Problems) -> np.ndarray:
  result = np.asarray(problems.start)
  for place in range(MOST):
    more = np.asarray(apply(problems.kind, result, problems.operand[:, place]))
    result = np.where(place < problems.count, more, result)
  return result


# --- The policy network.


def init(width: int, seed: int) -> Weights:
  rng = np.random.default_rng((seed, width))
  sizes = {"hidden": (36, width), "head": (width, VOCABULARY)}
  drawn = {name: rng.normal(0, shape[0] ** -0.5, shape) for name, shape in sizes.items()}
  drawn |= {"bias": np.zeros(width), "head_bias": np.zeros(VOCABULARY)}
  return {name: jnp.asarray(value, jnp.float32) for name, value in drawn.items()}


def log_probs(weights: Weights, state: State) -> Float[Array, "*N V"]:
  """Log-probabilities of the next token."""
  sizes = (3, 2, 10, 10, 10)
  parts = [jax.nn.one_hot(part, size) for part, size in zip(state[:-1], sizes, strict=True)]
  read = jnp.concatenate([*parts, state.last[..., None].astype(jnp.float32)], axis=-1)
  hidden = jnp.einsum("...f,fh->...h", 2 * read, weights["hidden"])
  hidden = jnp.tanh(hidden + jnp.broadcast_to(weights["bias"], hidden.shape))
  logits = jnp.einsum("...h,hv->...v", hidden, weights["head"])
  return jax.nn.log_softmax(logits + jnp.broadcast_to(weights["head_bias"], logits.shape))


@jax.jit
def rollout(weights: Weights, problems: Problems, uniform: Float[Array, "T N"]) -> Episodes:
  """Responses of at most T tokens; `uniform` in [0, 1) is all their randomness."""
  columns = Problems(*map(jnp.asarray, problems))
  rows, truth = jnp.arange(len(columns.start)), jnp.asarray(columns.start)
  for place in range(MOST):
    more = apply(columns.kind, truth, columns.operand[:, place])
    truth = jnp.where(place < columns.count, more, truth)

  def read(phase, place, value, copied) -> State:
    operand = columns.operand[rows, jnp.minimum(place, columns.count - 1)]
    last = (place >= columns.count - 1).astype(jnp.int32)
    return State(phase, columns.kind, value, operand, copied, last)

  def step(carry, drawn):
    phase, place, value, copied, alive, finished = carry
    state = read(phase, place, value, copied)
    logps = log_probs(weights, state)
    token = (jnp.cumsum(jnp.exp(logps), axis=-1) < drawn[:, None]).sum(-1).clip(max=STOP)
    logp = jnp.take_along_axis(logps, token[:, None], axis=-1)[:, 0]
    digit = token < 10
    stops = (phase == AFTER) & (token == STOP)
    goes_on = (phase == AFTER) & (token == NEXT) & (place < columns.count - 1)
    good = jnp.where(phase == AFTER, goes_on | (token == CHECK), digit)
    after = (
      jnp.where(phase == AFTER, jnp.where(goes_on, COPY, AFTER), phase + 1),
      place + goes_on.astype(place.dtype),
      jnp.where((phase == RESULT) & digit, token, value),
      jnp.where((phase == COPY) & digit, token, copied),
      alive & good,  # a stop, or a token that the grammar does not have here, ends the response
      finished | (alive & stops),
    )
    return after, (state, token, logp, alive)

  zero = jnp.zeros_like(columns.start)
  start = (zero, zero, columns.start, zero, zero == 0, zero != 0)
  carry, (states, tokens, logp, alive) = jax.lax.scan(step, start, uniform)
  value, finished = carry[2], carry[5]
  turn = functools.partial(jnp.swapaxes, axis1=0, axis2=1)
  return Episodes(
    jax.tree.map(turn, states),
    *map(turn, (tokens, logp, alive)),
    finished=finished,
    correct=finished & (value == truth),
  )


def descend(optimizer: optax.GradientTransformation, gradients, state, weights):
  """One step of the optimizer: new weights, new state."""
  with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer counts
    updates, state = optimizer.update(gradients, state, weights)
  return optax.apply_updates(weights, updates), state


# --- The supervised base.


def demonstrations(plan: Start, rng: np.random.Generator) -> tuple[State, np.ndarray]:
  """States of teacher-written responses and the teacher's next tokens."""
  size = plan.tokens_per_step
  kind, operand = rng.integers(0, 2, size), rng.integers(1, 10, size)
  result, last = rng.integers(0, 10, size), rng.integers(0, 5, size) == 0
  stay = np.array([mean / (1 + mean) for mean in plan.filler])[kind]
  # Of a step's tokens one is the copy, one the result, the others are check tokens and the end.
  draw = rng.random(size) * (2 + 1 / (1 - stay))
  phase = np.minimum(draw, 2).astype(int)
  right = np.where(kind == 0, result + operand, result * operand) % 10
  for which, share in plan.wrong:
    right = np.where((operand == which) & (rng.random(size) < share), (right + 1) % 10, right)
  end = np.where(last, STOP, NEXT)
  after = np.where(rng.random(size) < stay, CHECK, end)
  token = np.select([phase == COPY, phase == RESULT], [operand, right], after)
  copied = np.where(phase == COPY, rng.integers(0, 10, size), operand)
  return State(phase, kind, result, operand, copied, last.astype(int)), token


def supervise(plan: Start, width: int, seed: int) -> Weights:
  rng, weights = np.random.default_rng((seed, width, 1)), init(width, seed)
  optimizer = optim.adamw(plan.rate)

  @jax.jit
  def update(weights, state, seen, token):
    def loss(weights):
      chosen = jnp.take_along_axis(log_probs(weights, seen), token[:, None], axis=-1)
      return -chosen.mean()

    return descend(optimizer, jax.grad(loss)(weights), state, weights)

  state = optimizer.init(weights)
  for _ in range(plan.steps):
    weights, state = update(weights, state, *demonstrations(plan, rng))
  return weights


# --- Reinforcement learning with the library's losses.


def make_batch(episodes: Episodes, members: int) -> TrajectoryBatch:
  """One response a row; a response cut by the budget has its sentinel after its last token."""
  alive = np.asarray(episodes.alive)
  rows, length = alive.shape
  size = alive.sum(axis=1)
  cut_off = ~np.asarray(episodes.finished) & (size == length)
  place = np.broadcast_to(np.arange(length + 1, dtype=np.int32), (rows, length + 1))
  action = place < size[:, None]
  inside = place < (size + cut_off)[:, None]
  row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], place.shape)

  def padded(values: Array, fill: float, kind: type) -> np.ndarray:
    wide = np.concatenate([np.asarray(values), np.full((rows, 1), fill)], axis=1)
    return np.where(action, wide, fill).astype(kind)

  fields = {
    "tokens": padded(episodes.tokens, 0, np.int32),
    "position": place,
    "sample": np.where(inside, row, -1),
    "traj": np.where(inside, row, -1),
    "turn": np.where(action, row, -1),
    "action": action,
    "behavior_logp": padded(episodes.logp, 0.0, np.float32),
    "behavior_version": np.where(action, 0, -1).astype(np.int32),
    "turn_reward": np.asarray(episodes.correct, np.float32),
    "turn_traj": np.arange(rows, dtype=np.int32),
    "traj_group": np.arange(rows, dtype=np.int32) // members,
    "traj_truncated": cut_off,
  }
  return TrajectoryBatch(**fields)


def reinforce(plan: Reinforced, weights: Weights, which: str, rng, progress) -> Weights:
  """`plan.steps` updates on fresh problems at the budget; the reward is 1 for a right answer."""
  optimizer, prepare = optim.adamw(plan.rate), make_prepare(plan.algorithm)

  @jax.jit
  def update(weights, state, seen, batch):
    def loss(weights):
      logps = log_probs(weights, seen)
      logps = jnp.pad(logps, ((0, 0), (0, 1), (0, 0)))
      chosen = jnp.take_along_axis(logps, batch.traj.tokens[..., None], axis=-1)[..., 0]
      entropy = -(jnp.exp(logps) * logps).sum(-1)
      return plan.algorithm.loss(PolicyEval(chosen, entropy), batch)[0]

    return descend(optimizer, jax.grad(loss)(weights), state, weights)

  state = optimizer.init(weights)
  for step in range(plan.steps):
    problems = make_problems(which, plan.groups, plan.start.evaluation.outside, rng)
    members = problems.take(np.repeat(np.arange(plan.groups), plan.members))
    uniform = rng.random((BUDGET, len(members.kind)), np.float32)
    episodes = rollout(weights, members, uniform)
    batch = make_batch(episodes, plan.members)
    for check in plan.algorithm.checks:
      check(batch)
    prepared = prepare(batch, Aux(old_logp=batch.behavior_logp))
    weights, state = update(weights, state, episodes.states, prepared)
    progress(step + 1)
  return weights


# --- Evaluation and the two kinds of jobs.


def sample(weights: Weights, problems: Problems, samples: int, rng) -> Samples:
  """`samples` responses of each problem, drawn at the extended budget."""
  size = len(problems.kind)
  index = np.repeat(np.arange(size), samples)
  padding = -len(index) % CHUNK
  everything = np.concatenate([index, np.zeros(padding, int)])
  found = []
  for first in range(0, len(everything), CHUNK):
    chosen = problems.take(everything[first : first + CHUNK])
    drawn = rollout(weights, chosen, rng.random((EXTENDED, CHUNK), np.float32))
    found.append([np.asarray(x) for x in (drawn.finished, drawn.correct, drawn.alive.sum(axis=1))])
  finished, correct, tokens = (np.concatenate(x)[: len(index)] for x in zip(*found, strict=True))
  names = tuple(f"{i:05d}" for i in range(size))
  return Samples(names, index, finished, correct, tokens.astype(np.int64))


def held_out(which: str, size: Evaluation, seed: int) -> Problems:
  rng = np.random.default_rng((seed, 2, SETS.index(which)))
  return make_problems(which, size.problems, size.outside, rng)


def _path(folder: Path, width: int) -> Path:
  return folder / f"width_{width}.npz"


def run_base(plan: Start, place: Place) -> Mapping[str, Any]:
  """The bases of a seed, and each against itself: what chance alone shows."""
  controls = []
  for done, width in enumerate(plan.widths):
    weights = supervise(plan, width, place.seed)
    stored: dict[str, Any] = {name: np.asarray(value) for name, value in weights.items()}
    np.savez(_path(place.workdir, width), **stored)
    for which in SETS:
      problems = held_out(which, plan.evaluation, place.seed)
      drawn = functools.partial(sample, weights, problems, plan.evaluation.samples)
      one, two, more = (drawn(_stream(place.seed, width, which, name)) for name in range(3))
      options = {"extended": more, "resamples": plan.evaluation.resamples}
      both = cut(one, BUDGET), cut(two, BUDGET)
      pair = f"base {width} against itself"
      controls.append(measure(pair, which, str(BUDGET), *both, **options))
    place.progress(done + 1, len(plan.widths))
  return {"controls": controls}


def _stream(seed: int, width: int, which: str, name: int) -> np.random.Generator:
  return np.random.default_rng((seed, width, SETS.index(which), 3, name))


def run_recipe(plan: Reinforced, place: Place) -> Mapping[str, Any]:
  """Trains one model of every size on every set, and splits what changed at B and 2B."""
  start, splits = plan.start, []
  total = len(start.widths) * len(SETS) * plan.steps
  for width in start.widths:
    with np.load(_path(place.workdir_of("base"), width)) as file:
      base = {name: jnp.asarray(file[name]) for name in file.files}
    for which in SETS:
      done = len(splits) // 2 * plan.steps
      rng = np.random.default_rng((place.seed, width, SETS.index(which), 4))
      report = functools.partial(_report, place, done, total)
      trained = reinforce(plan, base, which, rng, report)
      splits += _measure(plan, place, width, which, base, trained)
      place.save({"splits": splits})
  return {"splits": splits}


def _report(place: Place, before: int, total: int, step: int) -> None:
  if step % 10 == 0:
    place.progress(before + step, total)


def _measure(
  plan: Reinforced, place: Place, width: int, which: str, base: Weights, trained: Weights
) -> list[dict[str, Any]]:
  """The split at B, with survival, and at 2B."""
  size = plan.start.evaluation
  problems = held_out(which, size, place.seed)
  streams = [_stream(place.seed, width, which, name) for name in range(6)]
  before = sample(base, problems, size.samples, streams[0])
  extended = sample(base, problems, size.samples, streams[2])
  after = sample(trained, problems, size.samples, streams[3])
  split = decompose(cut(before, BUDGET), cut(after, BUDGET), extended, halvings=2)
  fresh = None
  if split.reached:
    rows = np.array([int(name) for name in split.reached])
    some = problems.take(rows)
    again = [
      sample(weights, some, size.fresh, stream)
      for weights, stream in ((base, streams[4]), (trained, streams[5]))
    ]
    base_fresh, rl_fresh = (_named(cut(one, BUDGET), split.reached) for one in again)
    fresh = (base_fresh, rl_fresh)
  pair = f"{place.arm}, width {width}, seed {place.seed}"
  found = []
  for budget in (BUDGET, EXTENDED):
    options: dict[str, Any] = {"extended": extended, "resamples": size.resamples}
    if budget == BUDGET:
      options |= {"fresh": fresh, "least": size.least}
    both = cut(before, budget), cut(after, budget)
    found.append(measure(pair, which, str(budget), *both, **options))
  return found


def _named(samples: Samples, names: tuple[str, ...]) -> Samples:
  """The same samples under the problems' own names, which are in order."""
  return Samples(
    names, samples.problem, samples.finished, samples.correct, samples.tokens, samples.model
  )
