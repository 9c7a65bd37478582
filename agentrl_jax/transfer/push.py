"""The round that brings SGLang servers from one weight version to the next, as one transaction.

prepare → stage → deliver → pause → send → verify → flush → version → continue. Weights are packed,
and by some transports delivered, before generation pauses, so a server is idle only while it is
written. A server writes in place: one that fails after its first byte stays paused (FENCED) and
never answers with doubtful weights. No server is told the new version before its caches of the old
one are gone.
"""

import asyncio
import contextlib
import functools
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentrl_jax.models.model import Model
from agentrl_jax.ops.quantize import OCP, Quantization
from agentrl_jax.ops.quantize import check as check_quantization
from agentrl_jax.transfer.control import CallError, Control, Held, PauseMode, make_client
from agentrl_jax.transfer.engine_layout import (
  checksums_of,
  expected_checksums,
  push_plan,
  unplanned,
  untied,
)
from agentrl_jax.transfer.plan import Plan, Tensor
from agentrl_jax.transfer.report import PushError, PushReport, State
from agentrl_jax.transfer.round import Peer, Round, differences, twice
from agentrl_jax.transfer.sources import STAGE_ERRORS, Sources, Task
from agentrl_jax.transfer.stage import Staged, source_layout, stage
from agentrl_jax.transfer.transports import (
  Delivers,
  Retains,
  SendsParts,
  SharesStaging,
  Transport,
)


def sglang_publisher(
  model: Model,
  urls: Sequence[str],
  *,
  transport: Transport,
  run_id: str,
  deadline: float = 120.0,
  quantization: Quantization | None = None,
  pause_mode: PauseMode = "retract",
  sources: Sources | None = None,
) -> "SGLangPublisher":
  """A publisher for running servers that all serve `model`.

  Args:
    urls: one for each replica; each may be tensor parallel.
    quantization: of servers that were started from an FP8 checkpoint of that kind. SGLang takes the
      OCP dialect on every device and converts it itself where the hardware has the other one.
    pause_mode: what becomes of running requests: "retract" computes their KV again under the new
      weights and goes on, "abort" ends them with what they have.
    run_id: letters, digits, "-", "_" and "."; stamped on the servers with the version, and a server
      stamped by another run is refused.
    deadline: seconds for each call to a server, and for each word of another process.
    sources: the processes that hold the weights, where they are several: each then writes its own
      shards, while it stands by. Weights that are all on this process are sent without them.
  """
  if not re.fullmatch(r"[\w.-]+", run_id):
    raise ValueError(f"run_id is {run_id!r}, expected letters, digits, '-', '_' and '.'")
  if not urls or len(set(urls)) != len(urls):
    raise ValueError(f"urls are {list(urls)}, expected one or more different ones")
  if quantization is not None and check_quantization(quantization).dtype != OCP.dtype:
    raise ValueError(f"quantization is to {quantization.dtype}, SGLang loads {OCP.dtype}")
  return SGLangPublisher(
    model, urls, transport, run_id, deadline, quantization, pause_mode, sources
  )


class SGLangPublisher:
  """See `Publisher`. Rounds run one at a time; versions strictly increase."""

  def __init__(
    self,
    model: Model,
    urls: Sequence[str],
    transport: Transport,
    run_id: str,
    deadline: float,
    quantization: Quantization | None = None,
    pause_mode: PauseMode = "retract",
    sources: Sources | None = None,
  ):
    self.quantization, self.sources = quantization, sources
    self.pause_mode: PauseMode = pause_mode
    self.model, self.transport, self.run_id, self.deadline = model, transport, run_id, deadline
    self.blocked = ""  # why new rounds are refused
    self.fenced = False  # a server may be paused, with weights that nobody verified
    self.published = ""  # fingerprint of the last commit
    self.published_whole = True  # that fingerprint is of whole tensors, not of parts
    self._client = make_client()
    self._peers = [Peer(Control(url, self._client, deadline)) for url in urls]
    self._plans: dict[tuple[tuple[Tensor, ...], str, int], Plan] = {}
    self._held_staging: dict[str, Staged] = {}  # of UNKNOWN rounds: a server may still read it
    self._running = False
    self._attempts = itertools.count(1)

  async def publish(self, weights: Any, version: int) -> PushReport:
    """See `Publisher.publish`.

    A server that already holds `version` is verified, not written again, so a repeated round is a
    no-op.
    """
    if self._running:
      raise PushError(f"publish of version {version} while another round runs")
    if self.blocked:
      raise PushError(f"an earlier round ended badly, recover() first: {self.blocked}")
    self._running = True
    key = f"{self.run_id}-{version}"
    if self.sources is not None:  # a slow process must not meet the staging of a later attempt
      key += f"-{next(self._attempts)}"
    round = Round(version, key, list(self._peers))
    try:
      await self._round(round, weights)
    except PushError:
      raise  # from prepare: nothing has changed
    except BaseException as error:
      self.blocked = f"round {round.key} was interrupted by {type(error).__name__}"
      self.fenced = self.fenced or bool(round.paused_at)
      raise
    finally:
      self._running = False
    return self._close_round(round)

  async def recover(self, urls: Sequence[str] | None = None) -> None:
    """See `Publisher.recover`; `urls` replaces the servers, where restarts changed their addresses.

    A server answers calls in order, so its checksums prove that no earlier write is going on. It
    stays paused, if it was, until the next round commits.
    """
    if urls is not None:
      self._peers = [Peer(Control(url, self._client, self.deadline)) for url in urls]

    async def answers(peer: Peer) -> None:
      await peer.control.held()
      await peer.control.checksums()

    results = await asyncio.gather(*map(answers, self._peers), return_exceptions=True)
    for error in results:
      if isinstance(error, CallError):
        raise PushError(f"not recovered: {error}") from error
      if isinstance(error, BaseException):
        raise error
    for key in list(self._held_staging):
      self._release(key)
    self.blocked = ""

  async def close(self) -> None:
    """See `Publisher.close`."""
    try:
      for key in list(self._held_staging):
        self._release(key)
      self.transport.close()
    finally:
      await self._client.aclose()

  async def _round(self, round: Round, weights: Any) -> None:
    clock = round.clock
    with clock.phase("prepare"):
      holding = await self._prepare(round)
      chosen = self._plan(weights, round)
      _check_covered(round.live, chosen)
    with clock.phase("stage", chosen.nbytes):
      staged = await self._stage(chosen, weights, round)
    if staged is None:
      return
    self._held_staging[round.key] = staged
    writing = [peer for peer in round.live if peer not in holding]
    if isinstance(transport := self.transport, Delivers):
      try:
        with clock.phase("deliver"):
          await self._each(round, writing, lambda r, p: self._deliver(r, p, transport, staged))
      finally:
        if staged.join is not None:  # once they have ended what they send
          await asyncio.to_thread(staged.join, None)
      writing = [peer for peer in writing if peer in round.live]
    with clock.phase("pause"):
      await self._each(round, writing, self._pause)
    expected = asyncio.create_task(self._expected(staged, round))
    try:
      with clock.phase("send", chosen.nbytes * len(writing)):
        await self._each(round, writing, lambda r, peer: self._send(r, peer, staged))
      with clock.phase("verify"):
        sent = {segment.name for segment in chosen.segments}
        await self._each(round, round.live, lambda r, peer: self._verify(r, peer, expected, sent))
        await expected  # so that its error is not lost where nobody was left to ask
        self._compare_replicas(round)
    finally:
      await asyncio.gather(expected, return_exceptions=True)  # it reads what is freed afterwards
    with clock.phase("flush"):
      await self._each(round, writing, self._flush)
    with clock.phase("version"):
      await self._each(round, writing, self._set_version)
    with clock.phase("continue"):
      await self._each(round, round.live, self._resume)
      await self._settle_untouched(round)

  async def _prepare(self, round: Round) -> set[Peer]:
    """Meets every server. Returns those that already hold the version."""
    holding: set[Peer] = set()
    refused: list[str] = []

    async def meet(round: Round, peer: Peer) -> None:
      try:
        held = await peer.control.held()
        await peer.meet()
      except CallError as error:
        round.untouched.add(peer)
        round.leave(peer, State.ABORTED, error)
        return
      if held.run_id not in (None, self.run_id):
        refused.append(f"{peer.control.url} serves run {held.run_id!r}, this is {self.run_id!r}")
      elif held.version > round.version:
        refused.append(
          f"{peer.control.url} holds version {held.version}, refusing to publish {round.version}: "
          "restart it, or resume from its version"
        )
      elif held.version == round.version and held.run_id is not None:
        holding.add(peer)

    await self._each(round, round.live, meet)
    if refused:
      raise PushError("; ".join(refused))
    dtypes = {peer.dtype for peer in round.live}
    if not dtypes:
      raise PushError("no server answers: " + "; ".join(round.reasons))
    if len(dtypes) > 1:
      raise PushError(f"servers compute in different dtypes: {sorted(dtypes)}")
    return holding

  def _plan(self, weights: Any, round: Round) -> Plan:
    source, dtype = source_layout(weights), round.live[0].dtype
    ranks = {peer.ranks for peer in round.live} if self.transport.per_rank else {0}
    if len(ranks) > 1:
      raise PushError(
        f"servers have {sorted(ranks)} ranks, {self.transport.name} pushes to one kind"
      )
    (count,) = ranks
    key = (source, dtype, count)
    if key not in self._plans:
      try:
        self._plans[key] = push_plan(
          self.model,
          *key,
          quantization=self.quantization,
          bucket_bytes=self.transport.bucket_bytes,
          align=self.transport.align,
        )
      except ValueError as error:
        raise PushError(f"no plan from the weight tree to the servers: {error}") from error
    return self._plans[key]

  async def _stage(self, chosen: Plan, weights: Any, round: Round) -> Staged | None:
    """Packs off the event loop. On failure every live server leaves ABORTED, untouched."""

    def work() -> Staged:
      if self.sources is None or _all_here(weights):
        return stage(chosen, weights, self.transport.allocate(chosen, round.key), round.key)
      return self.sources.stage(self._task(chosen, round), chosen, weights, self.transport)

    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
      staged = await asyncio.shield(working)
    except BaseException as error:
      (made,) = await asyncio.gather(working, return_exceptions=True)  # its thread goes on
      self.transport.release(round.key)
      if isinstance(made, Staged) and made.join is not None:
        made.join(None)
      if not isinstance(error, STAGE_ERRORS):
        raise
      for peer in list(round.live):
        round.leave(peer, State.ABORTED, f"stage: {error}")
      return None
    round.fingerprint, round.whole = staged.fingerprint, staged.whole
    return staged

  def _task(self, chosen: Plan, round: Round) -> Task:
    """What the other processes must know of it. Raises ValueError where they cannot help."""
    transport = self.transport
    able = isinstance(transport, SendsParts) and bool(transport.parts_go_to())
    if not able and not isinstance(transport, SharesStaging):
      raise ValueError(f"{transport.name} is sent by one process, the weights lie on several")
    return Task(
      round.key,
      chosen.digest,
      round.live[0].dtype,
      transport.bucket_bytes,
      transport.align,
      self.quantization,
      str(transport.staging(round.key)) if isinstance(transport, SharesStaging) else "",
      self.deadline,
    )

  async def _each(
    self,
    round: Round,
    peers: Iterable[Peer],
    act: Callable[[Round, Peer], Awaitable[None]],
  ) -> None:
    """Acts on all that are still in the round. What no act should raise is raised when all of them
    have ended: nothing of the round may go on behind the caller's back.
    """
    acts = (act(round, peer) for peer in peers if peer in round.live)
    for result in await asyncio.gather(*acts, return_exceptions=True):
      if result is not None:
        raise result

  async def _deliver(self, round: Round, peer: Peer, transport: Delivers, staged: Staged) -> None:
    try:
      moved = await transport.deliver(staged, peer.control, round.version)
      round.clock.count("deliver", moved.nbytes)
      if moved.how:
        round.delivered.add(moved.how)
    except CallError as error:
      round.untouched.add(peer)
      round.leave(peer, State.ABORTED, error)

  async def _pause(self, round: Round, peer: Peer) -> None:
    try:
      held = await peer.control.held()
    except CallError as error:
      round.untouched.add(peer)
      round.leave(peer, State.ABORTED, error)
      return
    if taken := self._taken(peer, held):
      round.leave(peer, State.ABORTED, f"{taken}: nothing of this push has changed it")
      return
    round.paused_at[peer] = time.perf_counter()
    try:
      await peer.control.pause(self.pause_mode)
    except CallError as error:
      round.untouched.add(peer)
      round.leave(peer, State.ABORTED, error)

  def _taken(self, peer: Peer, held: Held) -> str:
    """By which other run, or ""."""
    if held.run_id in (None, self.run_id):
      return ""
    return f"{peer.control.url} was taken by run {held.run_id!r} while {self.run_id!r} pushed to it"

  async def _send(self, round: Round, peer: Peer, staged: Staged) -> None:
    try:
      await self.transport.send(staged, peer.control, peer.ranks)
    except CallError as error:
      if error.failure != "lost":
        round.leave(peer, State.FENCED, error)
        return
      try:  # ask before deciding: the answer proves that the write has ended, whichever way
        await peer.control.checksums()
      except CallError as silence:
        round.leave(peer, State.UNKNOWN, f"{error}; {silence}")
        return
      if peer.exact and staged.whole:  # its checksums will tell whether all of it arrived
        round.lost[peer] = f"{error}; "
      else:
        round.leave(peer, State.FENCED, error)

  async def _expected(
    self, staged: Staged, round: Round
  ) -> Mapping[tuple[int, int], Sequence[Mapping]]:
    """By their layout, what the ranks of servers with such checksums must report."""
    layouts = sorted({peer.layout for peer in round.live if peer.exact})
    if not staged.whole or not layouts:
      return {}
    block = self.quantization.block if self.quantization else None
    if self.transport.per_rank:
      held: list[dict[str, np.ndarray]] = [{} for _ in {b.rank for b in staged.plan.buckets}]
      for segment in staged.plan.segments:
        held[segment.rank][segment.name] = staged.view(segment)
      made = await asyncio.to_thread(lambda: [checksums_of(parts, block) for parts in held])
      return dict.fromkeys(layouts, made)
    tensors = {segment.name: staged.view(segment) for segment in staged.plan.segments}
    expect = functools.partial(
      expected_checksums, tensors, kv_heads=self.model.units.get("kv_heads"), block=block
    )
    return {
      (ranks, padding): await asyncio.to_thread(expect, ranks, padding=padding)
      for ranks, padding in layouts
    }

  async def _verify(
    self, round: Round, peer: Peer, making: Awaitable[Mapping], sent: Collection[str]
  ) -> None:
    """The server makes its checksums while `making` makes those that it must report."""
    try:
      got = await peer.control.checksums()
    except CallError as error:
      round.leave(peer, State.FENCED, error)
      return
    expected = await making
    if peer.exact and expected:
      wrong = differences(got, expected[peer.layout])
    else:
      comparable = round.whole == self.published_whole and self.published != ""
      same = got == peer.seen and comparable and round.fingerprint != self.published
      wrong = "none of its weights changed" if same else ""
    wrong = wrong or next(filter(None, (untied(tensors, sent) for _, tensors in got)), "")
    if wrong:
      lost = round.lost.get(peer, "")
      round.leave(peer, State.FENCED, f"{lost}{peer.control.url} failed verification: {wrong}")
    peer.seen = got

  def _compare_replicas(self, round: Round) -> None:
    """Replicas of one layout must hold the same bytes; no vote is taken on who is right."""
    groups: dict[tuple[bool, tuple[int, int]], list[Peer]] = {}
    for peer in round.live:
      groups.setdefault((peer.exact, peer.layout), []).append(peer)
    for peers in groups.values():
      if any(peer.seen != peers[0].seen for peer in peers):
        for peer in peers:
          round.leave(peer, State.FENCED, f"{peer.control.url} differs from its replicas")

  async def _flush(self, round: Round, peer: Peer) -> None:
    try:
      await peer.control.flush()
    except CallError as error:
      round.leave(peer, State.FENCED, error)

  async def _set_version(self, round: Round, peer: Peer) -> None:
    """Labels what was verified. A server that was restarted since serves other weights: it is asked
    who it is before the label, and after it, as both calls could straddle a restart. One that bears
    another run's stamp by now may have been written by that one, too.
    """
    text = f"{self.run_id}:{round.version}"
    try:
      await peer.same_process()
      if taken := self._taken(peer, await peer.control.held()):
        raise CallError("refused", taken)
      try:
        await peer.control.set_version(text)
      except CallError as error:
        held = await _asked(peer, error)
        if (held.run_id, held.version) != (self.run_id, round.version):
          raise
      await peer.same_process()
    except CallError as error:
      with contextlib.suppress(CallError):  # a new process does not know that it is paused
        await peer.control.pause(self.pause_mode)
      round.leave(peer, State.FENCED, error)

  async def _resume(self, round: Round, peer: Peer) -> None:
    """Lets it generate, and sees that it is still the one that was labelled."""
    try:
      await twice(peer.control.resume)
      held = await peer.control.held()
      if (held.run_id, held.version) != (self.run_id, round.version):
        message = f"serves {held.text!r} after a commit of version {round.version}: restarted"
        raise CallError("refused", f"{peer.control.url}/continue_generation: {message}")
    except CallError as error:
      with contextlib.suppress(CallError):
        await peer.control.pause(self.pause_mode)
      round.leave(peer, State.FENCED, error)
    else:
      round.resumed(peer)

  async def _settle_untouched(self, round: Round) -> None:
    """Servers that were never written to: beside a commit they are paused, else they go on with the
    old.
    """
    for peer in round.untouched:
      try:
        if round.live:
          await peer.control.pause(self.pause_mode)  # again, where its answer was no, or lost
          raise CallError("refused", f"{peer.control.url} missed version {round.version}")
        if peer in round.paused_at:
          await twice(peer.control.resume)
          round.resumed(peer)
      except CallError as error:
        round.ended[peer] = State.FENCED
        round.reasons.append(str(error))

  def _close_round(self, round: Round) -> PushReport:
    for peer in round.live:
      round.ended[peer] = State.COMMITTED
    now = time.perf_counter()
    idle = max([round.idle, *(now - start for start in round.paused_at.values())])
    state, message = round.state, "; ".join(round.reasons)
    if state is not State.ABORTED:
      self.fenced = state is not State.COMMITTED
    if state is State.COMMITTED:
      self.published, self.published_whole = round.fingerprint, round.whole
      if isinstance(self.transport, Retains):
        self.transport.retain(self._held_staging[round.key], round.version)
    if state not in (State.COMMITTED, State.ABORTED):
      self.blocked = message
    if State.UNKNOWN not in round.ended.values():
      self._release(round.key)
    receivers = {peer.control.url: ended for peer, ended in round.ended.items()}
    return PushReport(
      round.version,
      state,
      self.transport.name,
      round.clock.phases,
      round.fingerprint,
      idle,
      receivers,
      message,
      tuple(sorted(round.delivered)),
    )

  def _release(self, key: str) -> None:
    self._held_staging.pop(key, None)
    self.transport.release(key)


def _check_covered(peers: Iterable[Peer], chosen: Plan) -> None:
  """Raises PushError, naming a parameter that a server holds and that would stay as it was."""
  sent = {segment.name for segment in chosen.segments}
  for peer in peers:
    if peer.covered_by == chosen.digest:
      continue
    if left := unplanned(peer.parameters, sent):
      raise PushError(
        f"{peer.control.url} holds {left[0]}, which no weight of {len(sent)} makes: it would stay "
        f"old ({len(left)} of {len(peer.parameters)} such)"
      )
    peer.covered_by = chosen.digest


def _all_here(weights: Any) -> bool:
  return all(leaf.is_fully_addressable for leaf in jax.tree.leaves(weights))


async def _asked(peer: Peer, error: CallError) -> Held:
  """What it holds now. Raises CallError with both stories if it does not say."""
  try:
    return await peer.control.held()
  except CallError as silence:
    raise CallError(silence.failure, f"{error}; {silence}") from silence
