"""A configuration's device programs, traced on shapes alone: evaluate, step, prefill, decode.

The batch is the fullest there can be: every episode ends at the limit of its context, and all its
tokens but the first were sampled. Its integers are real, so that loops over them can be counted.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.analysis.planning.jaxpr_cost import known_leaves
from agentrl_jax.analysis.planning.traced import Run, Traced
from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.learner.rows import goes_whole, rows_per_micro_batch
from agentrl_jax.learner.step import make_prepare, make_step
from agentrl_jax.models import attention, context
from agentrl_jax.models.model import Model, is_spec
from agentrl_jax.models.precision import Stored
from agentrl_jax.models.sharding import batch_sharding, replicated
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.pack import bucket
from agentrl_jax.orchestrate.run import abstract_of, algorithm_of, critic_of, learner_options
from agentrl_jax.sampler.placement import (
  NO_FP8,
  SamplerFp8,
  cache_dtype,
  cache_sharding,
  own_copy,
)
from agentrl_jax.sampler.programs import RowState, make_programs
from agentrl_jax.sampler.schedule import default_buckets
from agentrl_jax.types import Algorithm, Aux, PolicyEval, TrajectoryBatch

PROGRAMS = ("evaluate", "step", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Sampler:
  """What of the embedded engine decides its programs, as `orchestrate.engines.embedded` says it."""

  slots: int
  dtype: str
  fp8: SamplerFp8 = NO_FP8
  max_steps: int = 32
  prefill_tokens: int = 4096


def trace_run(experiment: Experiment, model: Model, mesh: Mesh, sampler: Sampler | None) -> Run:
  """The programs of one run on a mesh, which may be of devices that do not exist.

  Raises ValueError as the run itself would: sizes that do not fit together.
  """
  critic = critic_of(experiment)
  state = abstract_of(experiment, model, mesh)
  batch = full_batch(experiment, mesh)
  shaped = _shaped(batch, mesh)
  options = learner_options(experiment)
  rows = experiment.batch.micro_rows
  evaluate = make_evaluate(model, mesh, rows=rows, **options)
  algorithm = algorithm_of(experiment.algorithm, experiment.routers, model)
  update = make_step(
    model, experiment.optimizer, algorithm, mesh, micro_rows=rows, critic=critic,
    remat=experiment.remat, correction_rate=experiment.routers.correction_rate, **options,
  )  # fmt: skip
  old = jax.eval_shape(evaluate, state.weights, shaped, state.critic, state.beside)
  loss_batch = _loss_batch(experiment, algorithm, batch, old)
  full = jax.tree.map(lambda x: np.ones(x.shape, np.float32), loss_batch.weight)
  known_loss = dataclasses.replace(loss_batch, traj=batch, weight=full)
  if loss_batch.credit.value_weight is not None:
    credit = dataclasses.replace(loss_batch.credit, value_weight=full)
    known_loss = dataclasses.replace(known_loss, credit=credit)
  programs = [
    Traced(
      "evaluate", "training step, for each of old and reference policy",
      lambda: evaluate.trace(state.weights, shaped, state.critic, state.beside),
      known_leaves((state.weights, batch, state.critic, state.beside)),
      frozenset({"weights", "critic", "beside"}),
    ),
    Traced(
      "step", "training step", lambda: update.trace(state, _shaped(loss_batch, mesh)),
      known_leaves((state, known_loss)), frozenset({"weights", "critic", "beside", "optimizer"}),
    ),
  ]  # fmt: skip
  resident = {
    "weights": bytes_a_device(state.weights),
    "optimizer": bytes_a_device(state.opt_state),
  }
  if state.beside is not None:
    resident["beside"] = bytes_a_device(state.beside)
  if critic is not None:
    resident["critic"] = bytes_a_device(state.critic)
  if "ref_logp" in experiment.algorithm.needs and experiment.lora is None:
    resident["reference"] = bytes_a_device(state.weights)
  if sampler is not None:
    more, kept = _sampler_programs(experiment, model, mesh, state.weights, sampler)
    programs += more
    resident |= kept
  return Run(
    programs=tuple(programs),
    resident=resident,
    parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.weights)),
    tokens=batch.tokens.size,
    rows=batch.tokens.shape[0],
    attention=attention_of(experiment, model, mesh, batch),
  )


def attention_of(
  experiment: Experiment, model: Model, mesh: Mesh, batch: TrajectoryBatch
) -> tuple[str, ...]:
  """What `context.choose` says to the layers of the learner, each different answer once."""
  said: dict[str, None] = {}
  platform = mesh.devices.flat[0].platform

  def listen(query: Any, key: Any, value: Any, sample: Any, parent: Any, window: Any) -> Any:
    chosen = context.choose(
      query, key, value, parent, window, platform=platform, kernels=experiment.kernels
    )
    said[chosen.said] = None
    return attention.attend_plain(query, key, value, sample, parent, window)

  def forward(weights: Any) -> Any:
    return model.forward(
      weights,
      *(jnp.asarray(x[:1]) for x in (batch.tokens, batch.sample, batch.position)),
      parent=None if batch.parent is None else jnp.asarray(batch.parent[:1]),
      dtype=jnp.dtype(experiment.dtype),
      attend_rows=listen,
    )

  shapes = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), model.abstract(), is_leaf=is_spec
  )
  jax.eval_shape(forward, shapes)
  return tuple(said)


def bytes_a_device(tree: Any) -> int:
  """Bytes on one device of arrays that carry their shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(tree)
  )


def full_batch(experiment: Experiment, mesh: Mesh) -> TrajectoryBatch:
  """The fullest batch that the packer can make of a step's episodes, as numpy arrays."""
  layout, limits = experiment.batch, experiment.limits
  episodes, size = layout.groups * layout.members, limits.context_tokens
  in_row = layout.row_length // (size + 1)
  block = rows_per_micro_batch(layout.micro_rows, mesh)
  rows = bucket(math.ceil(math.ceil(episodes / in_row) / block)) * block
  turns = bucket(episodes * math.ceil(size / limits.turn_tokens))
  shape = rows, layout.row_length
  column = np.broadcast_to(np.arange(shape[1]), shape)
  sample = np.arange(rows)[:, None] * in_row + column // (size + 1)
  inside = (column // (size + 1) < in_row) & (sample < episodes)
  sample = np.where(inside, sample, -1).astype(np.int32)
  position = np.where(inside, column % (size + 1), 0).astype(np.int32)
  action = inside & (position > 0) & (position < size)
  turn = np.where(action, sample, -1).astype(np.int32)
  fields: dict[str, Any] = dict(
    tokens=np.zeros(shape, np.int32),
    position=position,
    sample=sample,
    traj=sample,
    turn=turn,
    action=action,
    behavior_logp=np.zeros(shape, np.float32),
    behavior_version=np.where(action, 0, -1).astype(np.int32),
    turn_reward=np.zeros(turns, np.float32),
    turn_traj=np.full(turns, -1, np.int32),
    traj_group=np.full(bucket(episodes), -1, np.int32),
    traj_truncated=np.zeros(bucket(episodes), bool),
    parent=sample if layout.share_prompts else None,
  )
  return TrajectoryBatch(**fields)


def _loss_batch(
  experiment: Experiment, algorithm: Algorithm, batch: TrajectoryBatch, old: PolicyEval
) -> Any:
  per_token = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32)
  needs = algorithm.needs
  aux = Aux(
    old_logp=per_token,  # pyright: ignore
    ref_logp=per_token if "ref_logp" in needs else None,  # pyright: ignore
    value=per_token if "value" in needs else None,  # pyright: ignore
    clip_high=None if experiment.clip is None else jax.ShapeDtypeStruct((), jnp.float32),  # pyright: ignore
    routers=old.routers,
  )
  return jax.eval_shape(make_prepare(algorithm), batch, aux)


def _shaped(tree: Any, mesh: Mesh) -> Any:
  """Shapes on the mesh: [B T ...] arrays as the batch lies, the rest everywhere."""

  def shape(x: Any) -> Any:
    if goes_whole(x):
      return jax.tree.map(lambda part: place(part, replicated(mesh)), x)
    return place(x, replicated(mesh) if len(x.shape) < 2 else batch_sharding(mesh))

  def place(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(shape, tree, is_leaf=goes_whole)


def _sampler_programs(
  experiment: Experiment, model: Model, mesh: Mesh, weights: Any, sampler: Sampler
) -> tuple[list[Traced], Mapping[str, int]]:
  """Prefill of the largest chunk and one decoding step, over all rows at full length."""
  context, slots = experiment.limits.context_tokens, sampler.slots
  buckets = default_buckets(slots, context)
  dtype = jnp.dtype(sampler.dtype)
  own = _sampler_weights(weights, dtype, sampler.fp8)
  kept = cache_dtype(dtype, sampler.fp8)
  empty = jax.eval_shape(lambda: model.init_cache(slots, context, kept))
  placed = cache_sharding(weights, empty)
  cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), empty)
  programs = make_programs(
    model, dtype=dtype, max_steps=sampler.max_steps, sharding=placed, fp8=sampler.fp8
  )
  everywhere = replicated(mesh)

  def whole(shape: tuple[int, ...], of: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, of, sharding=everywhere)

  rows, options = whole((slots,)), {"length": context, "whole": True}
  filled = min(slots, max(1, sampler.prefill_tokens // buckets.chunk[-1]))
  tokens = whole((slots, buckets.chunk[-1]))
  each = {"temperature": jnp.float32}
  fields: dict[str, Any] = {
    f.name: whole((slots,), each.get(f.name, jnp.int32)) for f in dataclasses.fields(RowState)
  }
  fields["key"] = whole((slots, 2), jnp.uint32)
  state = RowState(**fields)
  table, scalar = whole((4, model.config.vocab_size), jnp.bool_), whole(())
  held = frozenset({"sampler weights", "sampler cache"})
  made = [
    Traced(
      "prefill", f"{buckets.chunk[-1]} prompt tokens of up to {filled} of {slots} rows",
      lambda: programs.prefill.trace(own, cache, rows, tokens, tokens, **options),
      known_leaves((own, cache, rows, tokens, tokens)), held,
    ),
    Traced(
      "decode", f"token of each of {slots} rows",
      lambda: programs.decode.trace(
        own, cache, rows, state, table, scalar, scalar, **options
      ),
      known_leaves((own, cache, rows, state, table, scalar, scalar)), held,
    ),
  ]  # fmt: skip
  return made, {"sampler weights": bytes_a_device(own), "sampler cache": bytes_a_device(cache)}


def _sampler_weights(weights: Any, dtype: Any, fp8: SamplerFp8) -> Any:
  """What `placement.own_copy` makes of the weights, as shapes that lie as the weights do."""
  own = jax.eval_shape(lambda w: own_copy(w, dtype, fp8), weights)
  stacks = {f.name for f in dataclasses.fields(own) if isinstance(getattr(own, f.name), tuple)}

  def placed(name: str) -> Any:
    given, made = getattr(weights, name), getattr(own, name)
    if name not in stacks:
      return jax.tree.map(_like, given, made)
    one = jax.tree.map(_one_layer, given)
    return tuple(jax.tree.map(_like, one, layer) for layer in made)

  return own.replace(**{f.name: placed(f.name) for f in dataclasses.fields(own)})


def _like(given: jax.ShapeDtypeStruct, made: Any) -> Any:
  if isinstance(made, Stored):
    scales = jax.ShapeDtypeStruct(
      made.scales.shape,
      made.scales.dtype,
      sharding=replicated(given.sharding.mesh),  # pyright: ignore
    )
    return dataclasses.replace(made, values=_like(given, made.values), scales=scales)
  return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=given.sharding)


def _one_layer(stacked: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  spec = PartitionSpec(*stacked.sharding.spec[1:])  # pyright: ignore
  sharding = NamedSharding(stacked.sharding.mesh, spec)  # pyright: ignore
  return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype, sharding=sharding)
