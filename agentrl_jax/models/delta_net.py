"""The layer of the gated delta rule: projections, short convolution, the rule, a gated norm (Yang
et al. 2025, as Qwen3.5 has it).

It sees a packed row, or continues the rows of a cache. Axis letters as in `delta_rule`; Z = J * R
value heads.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentrl_jax.models import layers
from agentrl_jax.models.delta_rule import convolve, convolve_on, delta_rule
from agentrl_jax.models.model import param

# (taps [X 1 C], channels [B T C], log decay [B T Z], strength [B T Z]) -> ([B T Z V], kept)
Remember = Callable[[Array, Array, Array, Array], tuple[Array, Any]]


@flax.struct.dataclass
class DeltaNet:
  """Channels are all heads' queries, then keys, then values."""

  mixed: Float[Array, "D C"]
  gate: Float[Array, "D Z*V"]
  decay: Float[Array, "D Z"]
  strength: Float[Array, "D Z"]
  taps: Float[Array, "X 1 C"]
  decay_log: Float[Array, "Z"]
  decay_bias: Float[Array, "Z"]
  norm: Float[Array, "V"]
  output: Float[Array, "Z*V D"]

  @classmethod
  def abstract(cls, config: Any, depth: int) -> "DeltaNet":
    """Specs of `depth` layers; of `config` the sizes of the rule are read.

    Channels are whole on every device of a tensor axis: an even cut would mix queries, keys and
    values.
    """
    embed, heads = config.embed, config.value_heads
    channels = 2 * config.key_heads * config.key_dim + heads * config.value_dim

    def spec(inputs: int, outputs: int, axes: tuple[str | None, str | None]) -> Any:
      return param((depth, inputs, outputs), ("layers", *axes), layers.scaled_normal)

    def each(init: Any, axis: str | None = "value_heads", size: int = heads) -> Any:
      return param((depth, size), ("layers", axis), init)

    return cls(
      mixed=spec(embed, channels, ("embed", None)),
      gate=spec(embed, heads * config.value_dim, ("embed", "value_heads")),
      decay=spec(embed, heads, ("embed", "value_heads")),
      strength=spec(embed, heads, ("embed", "value_heads")),
      taps=param((depth, config.taps, 1, channels), ("layers", None, None, None), _taps),
      decay_log=each(_decay_log),
      decay_bias=each(layers.ones),
      norm=each(layers.ones, None, config.value_dim),
      output=spec(heads * config.value_dim, embed, ("value_heads", "embed")),
    )


def _taps(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-3] ** -0.5, dtype)


def _decay_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """As transformers: rates evenly between 0.01 and 16."""
  return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def delta_net(
  config: Any,
  weights: DeltaNet,
  x: Float[Array, "B T D"],
  remember: Remember,
  matmul: layers.Matmul,
) -> tuple[Float[Array, "B T D"], Any]:
  """The output projection, without a residual, and what `remember` kept.

  Args:
    remember: convolution and rule, over packed rows or a cache.
  """
  step = matmul(x, weights.decay).astype(jnp.float32)
  step = jax.nn.softplus(step + weights.decay_bias.astype(jnp.float32)[None, None])
  log_decay = -jnp.exp(weights.decay_log.astype(jnp.float32))[None, None] * step
  strength = jax.nn.sigmoid(matmul(x, weights.strength).astype(jnp.float32))
  read, kept = remember(weights.taps, matmul(x, weights.mixed), log_decay, strength)
  gate = matmul(x, weights.gate).reshape(read.shape)
  normed = layers.rms_norm(read.astype(x.dtype), weights.norm, config.norm_epsilon)
  gated = normed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
  return matmul(gated.astype(x.dtype).reshape(*x.shape[:-1], -1), weights.output), kept


def remember_row(
  config: Any,
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None,
  taps: Float[Array, "X 1 C"],
  channels: Float[Array, "B T C"],
  log_decay: Float[Array, "B T Z"],
  strength: Float[Array, "B T Z"],
) -> tuple[Float[Array, "B T Z V"], None]:
  """Of packed rows; `sample` and `parent` as of `delta_rule`."""
  parts = _heads(config, convolve(channels, taps, sample, parent), log_decay, strength)
  read, _ = delta_rule(*parts, sample, parent)
  return _join_heads(read), None


def remember_cache(
  config: Any,
  position: Int[Array, "B N"],
  cache: tuple[Float[Array, "B C X-1"], Float[Array, "B Z P V"]],
  taps: Float[Array, "X 1 C"],
  channels: Float[Array, "B N C"],
  log_decay: Float[Array, "B N Z"],
  strength: Float[Array, "B N Z"],
) -> tuple[Float[Array, "B N Z V"], tuple[Array, Array]]:
  """Of rows that go on where the cache's end, or begin at position 0; -1, at the end, is padding,
  which leaves the cache as it is.
  """
  fresh = (position[:, 0] == 0)[:, None, None]
  before, memory = cache
  before = jnp.where(fresh, jnp.zeros_like(before), before)
  memory = jnp.where(fresh[..., None], jnp.zeros_like(memory), memory)
  real = position >= 0
  convolved, whole = convolve_on(channels, taps, before)
  log_decay = jnp.where(real[..., None], log_decay, 0.0)
  strength = jnp.where(real[..., None], strength, 0.0)
  parts = _heads(config, convolved, log_decay, strength)
  by_key = memory.reshape(len(memory), config.key_heads, -1, *memory.shape[2:])
  read, by_key = delta_rule(*parts, jnp.zeros_like(position), memory=by_key)
  last = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(before.shape[2])[None]
  before = jnp.take_along_axis(whole, last[:, None], axis=2)
  return _join_heads(read), (before, by_key.reshape(memory.shape))


def _heads(
  config: Any, channels: Float[Array, "B T C"], log_decay: Array, strength: Array
) -> tuple[Array, Array, Array, Array, Array]:
  """The first five arguments of `delta_rule`, from convolved channels."""
  keys = config.key_heads * config.key_dim
  query, key, value = jnp.split(jax.nn.silu(channels), [keys, 2 * keys], axis=-1)
  start, heads = channels.shape[:2], config.key_heads
  return (
    query.reshape(*start, heads, config.key_dim),
    key.reshape(*start, heads, config.key_dim),
    value.reshape(*start, heads, -1, config.value_dim),
    log_decay.reshape(*start, heads, -1),
    strength.reshape(*start, heads, -1),
  )


def _join_heads(read: Float[Array, "B T J R V"]) -> Float[Array, "B T Z V"]:
  return read.reshape(*read.shape[:2], -1, read.shape[-1])
