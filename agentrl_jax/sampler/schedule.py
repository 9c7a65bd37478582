"""What the device does next, as a pure function of the requests and of what the cache holds.

No clock and no arrival time is read: the same requests in the same order give the same device
calls. Shapes come from buckets, so that there are few programs to compile.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from agentrl_jax.rollout.engine import Generation, SamplingParams
from agentrl_jax.sampler.residency import EMPTY, Residency, common_prefix

LOOKAHEAD = 4  # times the number of rows: waiting requests that are considered for admission
WORTH_WAITING = 16  # tokens of prefill that a request saves by waiting for another's prefix


@dataclasses.dataclass(eq=False)
class Request:
  """One call of `generate` under way. `ids[:length]` is its stream: prompt, then sampled tokens."""

  request_id: str
  params: SamplingParams
  ids: Int[np.ndarray, "L"]  # room for the prompt and max_new_tokens
  prompt: int  # tokens of prompt
  length: int
  result: asyncio.Future[Generation]
  logp: Float[np.ndarray, "M"]
  version: Int[np.ndarray, "M"]
  row: int = -1  # of the cache
  begun: bool = False  # the row holds a prefix of this request's stream, and nothing else

  @property
  def context(self) -> Int[np.ndarray, "N"]:
    """The tokens whose keys and values must be in the cache before the next one is sampled.

    The last token of the stream is not among them: it is the input of the decoding step.
    """
    return self.ids[: self.length - 1]

  @property
  def remaining(self) -> int:
    return len(self.ids) - self.length


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The shapes that programs are compiled for; each tuple increases to the largest allowed."""

  rows: tuple[int, ...]
  chunk: tuple[int, ...]  # prompt tokens a row and call
  length: tuple[int, ...]  # cache indices that a call sees

  def __post_init__(self):
    for field in dataclasses.fields(self):
      sizes = getattr(self, field.name)
      if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"buckets of {field.name} are {sizes}, expected increasing positive sizes")


def default_buckets(slots: int, context: int) -> Buckets:
  """Few shapes, since each is a program to compile: rows fall by four (few rows cost almost as much
  as four times as many), chunks too, and only long contexts are worth a second and third length.
  """
  rows = sorted({max(1, slots // 4**i) for i in range(3)})
  chunk = [size for size in (16, 64) if size < context] + [min(256, context)]
  length = [size for size in (512, 2048) if size < context] + [context]
  return Buckets(tuple(rows), tuple(chunk), tuple(length))


def fit(sizes: Sequence[int], need: int) -> int:
  """The smallest bucket that holds `need`, else the largest there is."""
  return next((size for size in sizes if size >= need), sizes[-1])


@dataclasses.dataclass(frozen=True)
class Copy:
  """The first `lengths[n]` tokens of row `sources[n]` are also a prefix of `requests[n]`."""

  requests: tuple[Request, ...]
  sources: tuple[int, ...]
  lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Prefill:
  """Each request appends up to `chunk` tokens of its context to its row."""

  requests: tuple[Request, ...]
  chunk: int


@dataclasses.dataclass(frozen=True)
class Decode:
  """All requests sample up to `steps` tokens; the call ends early once `quota` are finished."""

  requests: tuple[Request, ...]
  steps: int
  quota: int


def admission_order(waiting: Sequence[Request], residency: Residency) -> list[Request]:
  """Requests that go on where a free row ends come first: a new one could evict what they need.

  Otherwise in order of arrival, and only the oldest are considered. An episode has few turns, so a
  new request waits only as long as if episodes owned their rows.
  """
  free = np.flatnonzero(~residency.busy)

  def goes_on(request: Request) -> bool:
    match, length = residency.matches(request.context)[free], residency.length[free]
    return bool(np.any((match == length) & (length > 0)))

  oldest = waiting[: LOOKAHEAD * len(residency.busy)]
  return sorted(oldest, key=lambda request: not goes_on(request))


def plan_copy(requests: Sequence[Request], residency: Residency) -> Copy:
  """Starts every request that has nothing to gain from waiting for the prefix of an earlier one."""
  unfinished = [r for r in requests if not _ready(r, residency)]
  contexts = [r.context for r in unfinished]
  begin, sources, lengths = [], [], []
  for i, (request, context) in enumerate(zip(unfinished, contexts, strict=True)):
    if request.begun:
      continue
    match = residency.matches(context)
    in_place = match[request.row] == match.max()
    source = request.row if in_place else int(match.argmax())
    length = int(match[source])
    # Most contexts are no longer than what they continue by more than that: nothing to compare.
    enough = length + WORTH_WAITING
    if len(context) >= enough and _coming(context, contexts[:i], residency.whole) >= enough:
      continue
    begin.append(request)
    sources.append(source)
    lengths.append(length)
  return Copy(tuple(begin), tuple(sources), tuple(lengths))


def plan_compute(
  requests: Sequence[Request], residency: Residency, buckets: Buckets, *, tokens: int, steps: int
) -> Prefill | Decode:
  """Prefill while a request needs it, in calls of one chunk size; then decode, all rows together.

  Args:
    tokens: rows times chunk of a prefill call, at most.
    steps: of a decode call, at most.
  """
  missing = [
    (r, len(r.context) - int(residency.length[r.row]))
    for r in requests
    if r.begun and not _ready(r, residency)
  ]
  if missing:
    chunk = fit(buckets.chunk, missing[0][1])
    same = [r for r, need in missing if fit(buckets.chunk, need) == chunk]
    return Prefill(tuple(same[: max(1, tokens // chunk)]), chunk)
  longest = max(r.remaining for r in requests)
  # A finished row idles until the call ends, and every call has its price: stop at a quarter.
  return Decode(tuple(requests), min(steps, longest), max(1, len(requests) // 4))


def _ready(request: Request, residency: Residency) -> bool:
  return request.begun and residency.length[request.row] == len(request.context)


def _coming(
  context: Int[np.ndarray, "N"], earlier: Sequence[Int[np.ndarray, "_"]], whole: bool
) -> int:
  """What a request could copy of an earlier one's row once that is ready."""
  rows = np.full((len(earlier), len(context)), EMPTY, np.int32)
  for row, ids in zip(rows, earlier, strict=True):
    row[: len(ids)] = ids[: len(context)]
  shared = common_prefix(rows, context)
  if whole:
    shared = np.where(shared == [len(ids) for ids in earlier], shared, 0)
  return int(shared.max(initial=0))
