"""The pytrees and function types that the device side is composed of; no logic.

Axis letters: B packed rows, T positions, R trajectories, U turns, G groups. Everything at position
t is about token t itself: `logp[b, t]` is the log-probability *of* `tokens[b, t]`.

Three policies, three names everywhere: *behavior* sampled the tokens (engine), *old* is the
trainer at the start of the step, *policy* is being differentiated.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.struct
from jaxtyping import Array, Bool, Float, Int


class Metric(NamedTuple):
  """A mean that adds exactly over micro-batches, hosts and steps: value = total / count."""

  total: Float[Array, ""]
  count: Float[Array, ""]


Metrics = Mapping[str, Metric]


@flax.struct.dataclass
class TrajectoryBatch:
  """Packed rollouts. Labels are -1 on padding; a trajectory lies within one micro-batch of rows.

  Samples with the same beginning may share it: one stream holds it once in their row, belongs to no
  trajectory, and is named as their `parent`; their positions count on from its end.

  Each truncated trajectory carries one non-action sentinel position after its last token (same
  `traj`, `turn` -1): a critic's value there is what estimators bootstrap from.
  """

  tokens: Int[Array, "B T"]
  position: Int[Array, "B T"]  # within the sample, from 0; rope and causality read this
  sample: Int[Array, "B T"]  # one contiguous stream that attends to itself; ordered in a trajectory
  traj: Int[Array, "B T"]  # in [0, R)
  turn: Int[Array, "B T"]  # in [0, U), unique in the batch; -1 outside the policy's turns
  action: Bool[Array, "B T"]  # sampled by the policy, so may carry loss
  behavior_logp: Float[Array, "B T"]  # from the engine that sampled it
  behavior_version: Int[Array, "B T"]  # weight version that sampled it
  turn_reward: Float[Array, "U"]  # outcome reward sits on the last turn
  turn_traj: Int[Array, "U"]  # turns of a trajectory in order
  traj_group: Int[Array, "R"]  # -1 on padding and on unscored (faulted) trajectories
  traj_truncated: Bool[Array, "R"]  # cut by a limit: bootstrap from its sentinel; terminated: not
  parent: Int[Array, "B T"] | None = None  # the stream a sample continues; its own id where none
  # Experts that the engine's L routers took for the token, -1 where none is told: replayed.
  experts: Int[Array, "B T L K"] | None = None


@flax.struct.dataclass
class RouterSums:
  """What a model's L routers did, summed over the positions that are not padding: sums of
  micro-batches add up to those of the batch. E experts.
  """

  assigned: Float[Array, "L E"]  # times an expert was chosen; a constant for gradients
  probability: Float[Array, "L E"]  # what the router gave it, over all experts summing to one
  squared_log_total: Float[Array, "L"]  # logsumexp(logits)^2
  tokens: Float[Array, "L"]


@flax.struct.dataclass
class Aux:
  """Frozen model outputs, made once a step without gradient, and what a controller decided.

  `value` is of the state before token t, at action tokens and sentinels.
  """

  old_logp: Float[Array, "B T"]
  ref_logp: Float[Array, "B T"] | None = None
  value: Float[Array, "B T"] | None = None
  clip_high: Float[Array, ""] | None = None  # this step's upper clip, where a controller moves it
  explained: Float[Array, ""] | None = None  # most of the targets' variance in a step before this
  routers: RouterSums | None = None  # of the whole batch, by the policy at the start of the step


@flax.struct.dataclass
class PolicyEval:
  """All that a loss may ask of the model being differentiated."""

  logp: Float[Array, "B T"]
  entropy: Float[Array, "B T"]
  value: Float[Array, "B T"] | None = None
  value_logits: Float[Array, "B T K"] | None = None  # of a categorical critic's K bins
  routers: RouterSums | None = None  # of a mixture of experts
  # The centres of the critic's first and last bin, where it tells them.
  value_span: tuple[float, float] | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class Credit:
  """Who gets what: constants for the loss, zero off the action mask.

  `value_weight` sums to one and says where a critic is trained; zero weights have no target.
  """

  advantage: Float[Array, "B T"]
  value_target: Float[Array, "B T"] | None = None
  value_weight: Float[Array, "B T"] | None = None


@flax.struct.dataclass
class LossBatch:
  """What `prepare` hands to the loss. `weight` already holds every denominator and correction."""

  traj: TrajectoryBatch
  aux: Aux
  credit: Credit
  weight: Float[Array, "B T"]


AdvantageFn = Callable[[TrajectoryBatch, Aux], Credit]
RatioFn = Callable[[Float[Array, "B T"], LossBatch], Float[Array, "B T"]]
SurrogateFn = Callable[
  [Float[Array, "B T"], Float[Array, "B T"]], tuple[Float[Array, "B T"], Bool[Array, "B T"]]
]
PenaltyFn = Callable[[PolicyEval, LossBatch], Float[Array, "B T"]]
WeightFn = Callable[[TrajectoryBatch, Aux, Credit], Float[Array, "B T"]]
LossFn = Callable[[PolicyEval, LossBatch], tuple[Float[Array, ""], Metrics]]
CheckFn = Callable[[TrajectoryBatch], None]  # on numpy arrays, raises ValueError


class Algorithm(NamedTuple):
  """A learner's whole opinion: credit and weights once a batch, then a plain weighted sum.

  `needs` names fields of `Aux`; `checks` refuse batches that the algorithm has no meaning for.
  """

  advantage: AdvantageFn
  weight: WeightFn
  loss: LossFn
  needs: frozenset[str] = frozenset()  # subset of {"ref_logp", "value", "routers"}
  checks: tuple[CheckFn, ...] = ()
