"""The story of a run, top to bottom: refill, continue, value, credit, learn, publish, record.

A fork of the library's loop (`orchestrate.sync_loop`) for a policy that is its own critic: two
optimizers take turns at one set of weights, and responses go on from replayed prefixes.
"""

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.learner import checkpoint
from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.optim import set_rate
from agentrl_jax.learner.shared import abstract_shared, make_shared, memories_of, turn_of
from agentrl_jax.learner.state import TrainState
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.losses.readiness import ClipController, RateController, decode_cost
from agentrl_jax.losses.replay import Replay
from agentrl_jax.models.hf import load_model
from agentrl_jax.models.model import Model
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.ops.stats import add_metrics
from agentrl_jax.orchestrate.engines import EngineContext, require_committed
from agentrl_jax.orchestrate.evaluate import evaluate, read_settings, write_records
from agentrl_jax.orchestrate.metrics import Clock, MetricsWriter, Progressing, to_floats
from agentrl_jax.orchestrate.pack import Packed, pack
from agentrl_jax.orchestrate.run import lock
from agentrl_jax.orchestrate.sync_loop import Mismatch
from agentrl_jax.rollout.episode import Limits, Play
from agentrl_jax.rollout.records import Episode, Outcome
from agentrl_jax.types import Aux, LossBatch, Metrics
from experiments.ac2 import critic
from experiments.ac2 import memory as memories
from experiments.ac2.critic import Valued
from experiments.ac2.memory import Memory, Spent, sampled
from experiments.ac2.plan import Plan, Run
from experiments.ac2.starts import (
  Start,
  choose,
  continue_from,
  flat,
  problem_of,
  prompt_tokens,
  refill,
  response,
)

CONTEXT = 64  # tokens of the engine: the critic's longest question and answer fit
ROW = 192  # positions: a group of eight whole responses that share their prompt
MISMATCH = 1e-4  # of log-probs in float32
ACTOR, CRITIC = 0, 1  # places of the optimizers


async def train(plan: Plan, workdir: Path, progress: Progressing) -> None:
  """Runs the plan in `workdir`, or the rest of it from its last checkpoint."""
  async with open_run(plan, workdir, progress) as run:
    await measure(run)
    while run.step < plan.steps:
      progress.update("steps", run.step, plan.steps)
      await take_step(run)
      await measure(run)
    progress.update("steps", run.step, plan.steps)


async def take_step(run: Run) -> None:
  """One step, from replayed states to published weights."""
  plan, before, clock = run.plan, run.memory, Clock()
  rng = np.random.default_rng((plan.seed, run.step))
  fresh, cursor = await refill(run)
  replay = before.replay.push([response(e) for e in fresh])
  starts, cursor = choose(run, replay, cursor, rng)
  groups = await continue_from(run, starts)
  clock.lap("rollout")
  valued = await critic.value(run, starts, groups)
  clock.lap("value")

  shares = packed_shares(run, groups)
  old = [jax.device_get(run.policy(run.state.weights, one.batch)) for one in shares]
  mismatch = max(mismatch_of(one, o.logp) for one, o in zip(shares, old, strict=True))
  entropy = entropy_at_start(starts, groups, shares, [one.entropy for one in old])
  clip = before.clip if entropy is None else before.clip.after_step(entropy)
  batches = [
    run.prepare(one.batch, aux_of(one, o.logp, valued.stated, clip))
    for one, o in zip(shares, old, strict=True)
  ]
  clock.lap("evaluate")

  right = [response(e) for e in (*fresh, *flat(groups)) if e.outcome is Outcome.SUCCESS]
  memory = dataclasses.replace(
    before,
    replay=replay,
    clip=clip,
    bank=memories.with_solved(before.bank, right),
    spent=rollout_cost(run, fresh, groups).plus(critic=valued.flops),
    cursor=cursor,
  )
  memory, taught = after_values(run, memory, starts, valued, rng)
  measured, memory = learn(run, batches, taught, memory)
  jax.block_until_ready(run.state)
  clock.lap("update")

  run.memory = memory
  run.step += 1
  require_committed(await run.host.publisher.publish(run.state.weights, run.step))
  clock.lap("publish")
  row = {**told(starts, fresh, groups, valued), **standing(run, starts, valued)}
  row |= {"mismatch_max": mismatch} | ({} if entropy is None else {"entropy_at_start": entropy})
  run.metrics.write(run.step - 1, {**row, **measured, **clock.seconds}, wall_time=time.time())
  if run.step % plan.checkpoint_every == 0 or run.step == plan.steps:
    carry = memories.to_carry(memory)
    run.saver.save(run.state, checkpoint.HostState(plan.seed, run.step, {}, {}, carry))


# --- credit ---------------------------------------------------------------------------------------


def packed_shares(run: Run, groups: Sequence[Sequence[Episode]]) -> list[Packed]:
  """Each update's groups, in order: each is a batch of its own, with its own token mean."""
  size = -(-len(groups) // run.plan.minibatches)
  return [
    pack(
      groups[first : first + size],
      row_length=ROW,
      micro_rows=1,
      share_prompts=True,
      least=(size, size * run.plan.members),
    )
    for first in range(0, len(groups), size)
  ]


def mismatch_of(packed: Packed, old_logp: np.ndarray) -> float:
  """The largest |old - behavior| log-prob of a sampled token. Raises Mismatch above `MISMATCH`."""
  batch = packed.batch
  worst = float(np.abs(np.where(batch.action, old_logp - batch.behavior_logp, 0.0)).max())
  if not worst <= MISMATCH:
    raise Mismatch(f"engine and trainer differ by {worst:.6f} in a log-prob, bound {MISMATCH:g}")
  return worst


def aux_of(
  packed: Packed, old_logp: np.ndarray, stated: Mapping[str, float], clip: ClipController
) -> Aux:
  """The critic's word where a continuation was left open, 0 where it used up its budget."""
  batch = packed.batch
  worth = np.array([stated.get(e.trajectory_id, 0.0) for e in packed.episodes], np.float32)
  end = (batch.traj >= 0) & np.logical_not(batch.action)
  value = np.where(end, worth[batch.traj], np.float32(0.0))
  return Aux(old_logp, value=value, clip_high=jnp.float32(clip.high))  # pyright: ignore


def entropy_at_start(
  starts: Sequence[Start],
  groups: Sequence[Sequence[Episode]],
  shares: Sequence[Packed],
  entropies: Sequence[np.ndarray],
) -> float | None:
  """Mean over tokens of responses to bare problems, in nats; None where the batch has none."""
  bare = {
    e.trajectory_id
    for start, group in zip(starts, groups, strict=True)
    for e in group
    if not start.state.ids
  }
  found = []
  for packed, entropy in zip(shares, entropies, strict=True):
    mine = np.array([e.trajectory_id in bare for e in packed.episodes])
    found.append(entropy[packed.batch.action & mine[packed.batch.traj]])
  tokens = np.concatenate(found)
  return float(tokens.mean()) if tokens.size else None


def after_values(
  run: Run, memory: Memory, starts: Sequence[Start], valued: Valued, rng: np.random.Generator
) -> tuple[Memory, list[list[Episode]]]:
  """What the step's values teach: readiness, by predictions from before the update, and the
  lessons of the critic, with the references from after the step.
  """
  plan = run.plan.critic
  if plan is None:
    return memory, []
  pairs = critic.targets(run, starts, valued)
  said = {s.state.problem: v for s, v in zip(starts, valued.starts, strict=True)}
  meant = {pair.state.problem: pair.target for pair in pairs}
  readiness = memory.readiness.after_step(said, meant, sorted(memory.bank))
  stored = memories.with_pairs(memory.pairs, pairs, plan.stored)
  drawn = memories.draw(stored, plan.drawn, rng)
  taught = critic.lessons(run, memory.bank, drawn)
  cost = 3 * sum(run.cost.forward(len(e.samples[0])) for group in taught for e in group)
  spent = memory.spent.plus(training=cost)
  return dataclasses.replace(memory, readiness=readiness, pairs=stored, spent=spent), taught


# --- learning -------------------------------------------------------------------------------------


def learn(
  run: Run, batches: Sequence[LossBatch], taught: Sequence[Sequence[Episode]], memory: Memory
) -> tuple[dict[str, float], Memory]:
  """The policy's updates with the critic's after the first; and the memory with its new rate."""
  actor: Metrics = {}
  lessons: Metrics = {}
  norms = []
  for i, batch in enumerate(batches):
    run.state, found = run.update(run.state, batch)
    norms.append(to_floats(found).get("update_norm", 0.0))
    actor = {n: add_metrics(actor[n], m) if n in actor else m for n, m in found.items()}
    if i == 0 and taught:
      run.state = at_rate(run.state, memory.rate)
      lessons = critic.learn(run, taught)
  measured = to_floats(actor) | {f"critic/{n}": x for n, x in to_floats(lessons).items()}
  if not taught:
    return measured, memory
  rate = memory.rate.after_step(measured.get("critic/update_norm", 0.0), sum(norms))
  return measured, dataclasses.replace(memory, rate=rate)


def at_rate(state: TrainState, rate: RateController) -> TrainState:
  """The state whose critic learns at the controller's rate."""
  opt_states = memories_of(state)
  opt_states[CRITIC] = set_rate(opt_states[CRITIC], rate.rate)
  return dataclasses.replace(state, opt_state=tuple(opt_states))


# --- story ----------------------------------------------------------------------------------------


def rollout_cost(run: Run, fresh: Sequence[Episode], groups: Sequence[Sequence[Episode]]) -> Spent:
  """What was spent before and by this step's rollout and the policy's training on it: one pass for
  the old log-probs and three to learn.
  """
  trained = flat(groups)
  lengths = [(prompt_tokens(e), e.action_tokens) for e in (*fresh, *trained)]
  prompts = [prompt_tokens(group[0]) for group in (*([e] for e in fresh), *groups)]
  return run.memory.spent.plus(
    decode=sampled(run.cost, lengths),
    prefill=sum(run.cost.forward(n) for n in prompts),
    training=4 * sum(run.cost.forward(prompt_tokens(e) + e.action_tokens) for e in trained),
  )


def told(
  starts: Sequence[Start],
  fresh: Sequence[Episode],
  groups: Sequence[Sequence[Episode]],
  valued: Valued,
) -> dict[str, float]:
  """What the step's episodes say."""
  whole = [e for s, g in zip(starts, groups, strict=True) if not s.chunked for e in flat([g])]
  row = {
    "chunked": float(np.mean([s.chunked for s in starts])),
    "prefix_tokens": float(np.mean([len(s.state.ids) for s in starts])),
    "sampled_tokens": float(np.mean([e.action_tokens for e in flat(groups)])),
    "worth_spread": float(np.mean([np.nanstd(w) for w in valued.worths if np.isfinite(w).any()])),
    "stated": float(len(valued.stated)),
    "invalid": float(sum(not np.isfinite(v) for v in (*valued.stated.values(), *valued.starts))),
  }
  if fresh:
    row["refill_success"] = float(np.mean([e.reward for e in fresh]))
  if whole:
    row["whole_success"] = float(np.mean([e.reward for e in whole]))
  return row


def standing(run: Run, starts: Sequence[Start], valued: Valued) -> dict[str, float]:
  """Controllers, readiness with its first unmet condition by problem, and FLOPs so far."""
  memory, plan = run.memory, run.plan.critic
  row = {
    "solved": len(memory.bank) / len(run.problems),
    "flops/decode": float(memory.spent.decode),
    "flops/total": float(memory.spent.total),
  }
  if plan is None:
    return row
  ready = [plan.trust(memory.readiness, name) for name in run.problems]
  row |= {"critic_rate": memory.rate.rate, "ready": float(np.mean(ready))}
  row |= critic_errors(starts, valued)
  why = [memory.readiness.why_not(name) or "ready" for name in run.problems]
  return row | {f"why/{name}": why.count(name) / len(why) for name in sorted(set(why))}


def critic_errors(starts: Sequence[Start], valued: Valued) -> dict[str, float]:
  """Mean |V - mean worth| of the groups; of those whose worths are all rewards; and of the latter
  where a reference is known, with it and without. What is no value errs by 1.
  """
  found: dict[str, list[float]] = {}
  for start, worths, aided, unaided in zip(
    starts, valued.worths, valued.starts, valued.unaided, strict=True
  ):
    known = [w for w in worths if np.isfinite(w)]
    if not known:
      continue
    mean = float(np.mean(known))
    found.setdefault("error", []).append(missed(aided, mean))
    if start.chunked:
      continue
    found.setdefault("error_whole", []).append(missed(aided, mean))
    if unaided is not None:
      found.setdefault("error_aided", []).append(missed(aided, mean))
      found.setdefault("error_unaided", []).append(missed(unaided, mean))
  return {name: float(np.mean(values)) for name, values in found.items()}


def missed(value: float, mean: float) -> float:
  """The error of a stated value, 1 of what is none."""
  return abs(value - mean) if np.isfinite(value) else 1.0


async def measure(run: Run) -> None:
  """Evaluates on held-out tasks where it is due after this step, unless that is done already."""
  plan = run.plan.evaluation
  if run.step % plan.every and run.step != run.plan.steps:
    return
  name = f"step_{run.step:06d}"
  path = run.workdir / "evaluation" / f"{name}.jsonl"
  asked = {"step": run.step, "tasks": plan.tasks, "samples": plan.samples}
  if read_settings(path) == asked:
    return
  records = await evaluate(
    run.limited(),
    run.plan.tasks.held_out[: plan.tasks],
    plan.samples,
    label=name,
    seed=run.plan.seed,
    concurrency=plan.tasks * plan.samples,
  )
  write_records(records, path, asked)
  await run.host.flush()


# --- opening --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_run(plan: Plan, workdir: Path, progress: Progressing) -> AsyncIterator[Run]:
  """A run, new or resumed; on leaving, its engine is stopped and files are closed."""
  directory = Path(plan.model)
  model, mesh = load_model(directory), make_mesh(devices=None)
  optimizers = [plan.optimizer, *([plan.critic.optimizer] if plan.critic else [])]
  with contextlib.ExitStack() as stack:
    stack.enter_context(lock(workdir))
    latest = checkpoint.latest(workdir / "checkpoints")
    if latest is None:
      state, step = make_shared(model, optimizers, mesh, directory=directory), 0
      memory = _fresh(plan)
    else:
      state, host_state = checkpoint.restore(latest, abstract_shared(model, optimizers, mesh))
      step, memory = host_state.weight_version, memories.from_carry(host_state.carry)
      progress.say(f"resuming after step {step}")
    saver = stack.enter_context(checkpoint.Saver(workdir / "checkpoints"))
    metrics = stack.enter_context(contextlib.closing(MetricsWriter(workdir, resume_step=step)))
    host = await plan.engine(
      EngineContext(model, state.weights, step, directory, workdir, CONTEXT, plan.seed)
    )
    try:
      yield Run(
        plan=plan,
        workdir=workdir,
        model=model,
        cost=_cost(model),
        state=state,
        memory=memory,
        step=step,
        host=host,
        play=Play(
          build=plan.tasks.build,
          engine=host.engine,
          renderer=plan.tasks.renderer(directory),
          limits=Limits(turn_tokens=CONTEXT, context_tokens=CONTEXT),
          combine=plan.tasks.combine,
          temperature=plan.temperature,
        ),
        saver=saver,
        metrics=metrics,
        progress=progress,
        problems={problem_of(task): task for task in plan.tasks.train.tasks},
        **_learner(plan, model, mesh),
      )
    finally:
      await host.close()


def _fresh(plan: Plan) -> Memory:
  rate = plan.critic.rate if plan.critic else RateController()
  return Memory(replay=Replay(capacity=plan.capacity), clip=plan.clip, rate=rate)


def _learner(plan: Plan, model: Model, mesh: Any) -> dict[str, Any]:
  update = make_step(
    model, plan.optimizer, plan.actor, mesh, micro_rows=1, temperature=plan.temperature
  )
  teach = None
  if plan.critic is not None:
    step = make_step(model, plan.critic.optimizer, plan.critic.algorithm, mesh, micro_rows=1)
    teach = make_prepare(plan.critic.algorithm), turn_of(step, CRITIC)
  return {
    "policy": make_evaluate(model, mesh, rows=1, temperature=plan.temperature),
    "prepare": make_prepare(plan.actor),
    "update": turn_of(update, ACTOR),
    "teach": teach,
  }


def _cost(model: Model) -> Any:
  c = model.config
  return decode_cost(
    layers=c.layers,
    embed=c.embed,
    heads=c.heads,
    kv_heads=c.kv_heads,
    head_dim=c.head_dim,
    ffw=c.ffw,
    vocab_size=c.vocab_size,
  )
