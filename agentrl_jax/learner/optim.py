"""The optimizer as one optax chain: clip the global norm, Adam, decoupled weight decay, warm-up."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from agentrl_jax.models.model import Weights

WeightsMask = Callable[[Weights], Any]  # weights -> same tree of bools

NOT_DECAYED = (
  *("norm", "bias", "embed", "correction", "decay_log"),
  *("mixing_scale", "sinks", "table"),
)


def decayed(weights: Weights) -> Any:
  """True for weights that decay: all but norms, biases, embeddings, sinks, the scales of residual
  streams, the corrections and tables of routers and the delta rule's own rates, by the names in the
  tree. An output head of its own decays.
  """

  def decays(path: Any, _: Any) -> bool:
    name = jax.tree_util.keystr(path).lower().replace("unembed", "head")
    return not any(word in name for word in NOT_DECAYED)

  return jax.tree_util.tree_map_with_path(decays, weights)


def adamw(
  learning_rate: float,
  *,
  warmup_steps: int = 0,
  clip_norm: float = 1.0,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  decays: WeightsMask = decayed,
) -> optax.GradientTransformation:
  """AdamW (Loshchilov & Hutter, 2019) after clipping by the global norm.

  Args:
    learning_rate: step size after warm-up.
    warmup_steps: updates over which it rises linearly: update k (from 0) uses (k + 1) /
      warmup_steps of it.
    clip_norm: largest global gradient norm that is let through unscaled; inf turns clipping off.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: times learning rate times weight is subtracted where `decays`.
    decays: which weights decay.
  """
  if not clip_norm > 0:
    raise ValueError(f"clip_norm is {clip_norm}, expected > 0 (inf turns clipping off)")
  if warmup_steps < 0:
    raise ValueError(f"warmup_steps is {warmup_steps}, expected >= 0")
  rate = learning_rate
  if warmup_steps > 0:
    rate = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, warmup_steps - 1)
  return optax.chain(
    optax.clip_by_global_norm(clip_norm) if clip_norm < float("inf") else optax.identity(),
    optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
    optax.add_decayed_weights(weight_decay, mask=decays) if weight_decay else optax.identity(),
    optax.scale_by_learning_rate(rate),
  )


def only(
  optimizer: optax.GradientTransformation, trainable: WeightsMask
) -> optax.GradientTransformation:
  """`optimizer` for the weights that `trainable` marks; the others stay, and have no state."""

  def label(weights: Weights) -> Any:
    return jax.tree.map(lambda yes: "trained" if yes else "frozen", trainable(weights))

  return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, label)


def with_critic(
  actor: optax.GradientTransformation, critic: optax.GradientTransformation
) -> optax.GradientTransformation:
  """`actor` for the policy's weights and `critic` for the critic's, each with its own clipping.

  For runs whose algorithm needs values: without a critic there is nothing to partition.
  """
  return optax.partition({"actor": actor, "critic": critic}, ("actor", "critic"))


def with_rate(
  make: Callable[[float], optax.GradientTransformation], learning_rate: float
) -> optax.GradientTransformation:
  """`make(learning_rate)` whose learning rate is part of its state, for `set_rate`."""
  made = optax.inject_hyperparams(lambda learning_rate: make(learning_rate))
  return made(learning_rate=learning_rate)


def set_rate(opt_state: Any, learning_rate: float) -> Any:
  """The state of a `with_rate` optimizer with another learning rate from the next update on.

  Raises ValueError for another optimizer's.
  """
  known = getattr(opt_state, "hyperparams", {})
  if "learning_rate" not in known:
    raise ValueError(f"{type(opt_state).__name__} holds no learning rate, expected with_rate's")
  rate = jax.device_put(np.float32(learning_rate), known["learning_rate"].sharding)
  return opt_state._replace(hyperparams={**known, "learning_rate": rate})
