"""Packed attention by fused kernels that keep scores on the chip: splash on TPU, cuDNN on GPU.

`context` says where they are used. A kernel sees padding as one more sample, so that no query is
without a key, and its zeros are put there afterwards. Axis letters as in `attention`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentrl_jax.models import attention
from agentrl_jax.models.attention import MIXED, AttendRows, Window


class Kernel(NamedTuple):
  """`refuses(query, key, value, parent, window)` looks at shapes and dtypes and says in a few words
  what `attend` cannot do of this, or nothing.
  """

  name: str
  attend: AttendRows
  refuses: Callable[[Any, Any, Any, Any, Any], str]


def attend_splash(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  sample: Int[Array, "B T"],
  parent: Array | None = None,
  window: Window | None = None,
  *,
  interpret: bool = False,
) -> Float[Array, "B T N V"]:
  """JAX's splash attention (jax.experimental.pallas.ops.tpu.splash_attention): a flash attention
  with segment ids.

  Blocks above the diagonal are skipped; between samples they are computed and masked. Queries are
  scaled before they are multiplied, in their dtype.

  Args:
    interpret: run the kernel's steps as ordinary operations, on any platform.
  """
  del parent, window  # `_splash_refuses` saw to it that there are none
  # Not at the top: the kernels for TPU take long to import, and other platforms need none.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  length, heads = query.shape[1:3]
  block = attention.block_of(length, "tpu")
  padded = length + -length % block

  def pad(x: Array, fill: int) -> Array:
    return jnp.pad(
      x, [(0, 0), (0, padded - length), *[(0, 0)] * (x.ndim - 2)], constant_values=fill
    )

  def heads_first(x: Array) -> Array:
    return jnp.swapaxes(pad(x, 0), 1, 2)

  scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
  own = pad(sample, -1)
  run = splash.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((padded, padded))] * heads),
    block_sizes=splash.BlockSizes(
      **{name: block for name in _SPLASH_BLOCKS},  # pyright: ignore
    ),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=MIXED,
    interpret=interpret,
  )
  with jax.named_scope(f"triangle_of_{padded // block}_blocks"):  # read by `jaxpr_cost`
    mixed: Any = jax.vmap(run)(
      *(heads_first(x) for x in (scaled, key, value)), splash.SegmentIds(own, own)
    )
  return _without_padding(jnp.swapaxes(mixed, 1, 2)[:, :length], sample)


_SPLASH_BLOCKS = (
  "block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq",
)  # fmt: skip
_LANES = 64  # head sizes that are a multiple of it are known to compile


def _splash_refuses(query: Any, key: Any, value: Any, parent: Any, window: Any) -> str:
  del key
  if parent is not None:
    return "prompts laid once for several samples"
  if window is not None:
    return "windows that differ from layer to layer"
  sizes = query.shape[-1], value.shape[-1]
  if any(size % _LANES for size in sizes):
    return f"heads of {_one_or_both(*sizes)}, which {_LANES} does not divide"
  return ""


def attend_cudnn(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  sample: Int[Array, "B T"],
  parent: Int[Array, "B T"] | None = None,
  window: Window | None = None,
  *,
  implementation: str = "cudnn",
) -> Float[Array, "B T N H"]:
  """cuDNN's flash attention through `jax.nn.dot_product_attention`.

  It knows no samples: which keys of the triangle are seen goes in as a mask, from which jax makes
  a bias [B 1 T T] in the queries' dtype. Scores stay on the chip, that does not.

  Args:
    implementation: "xla" computes the same without cuDNN.
  """
  seen = sample[:, :, None] == sample[:, None, :]
  if parent is not None:
    seen |= parent[:, :, None] == sample[:, None, :]
  if window is not None:
    seen &= window.position[:, :, None] - window.position[:, None, :] < window.size
  mixed = jax.nn.dot_product_attention(
    query,
    key,
    value,
    mask=seen[:, None],
    is_causal=True,
    implementation=implementation,  # pyright: ignore
  )
  return _without_padding(mixed, sample)


_LONGEST_MASK = 8192  # positions of a row; its bias takes 128 MiB


def _cudnn_refuses(query: Any, key: Any, value: Any, parent: Any, window: Any) -> str:
  """What `check_layout` and `check_is_flash_attention` of jax refuse for Hopper, and long masks."""
  del key, parent, window
  length, size = query.shape[1], query.shape[-1]
  if query.dtype not in (jnp.bfloat16, jnp.float16):
    return f"{query.dtype}"
  if value.shape[-1] != size or size % 8 or size > 256:
    return f"heads of {_one_or_both(size, value.shape[-1])}"
  if length % 2:
    return f"rows of {length}, an odd number"
  if length > _LONGEST_MASK:
    return f"rows of {length}, as its mask would be that number squared"
  return ""


def _one_or_both(keys: int, values: int) -> str:
  return f"{keys}" if keys == values else f"{keys} and {values}"


def _without_padding(mixed: Float[Array, "B T N V"], sample: Int[Array, "B T"]) -> Array:
  return jnp.where((sample >= 0)[:, :, None, None], mixed, jnp.zeros((), mixed.dtype))


Kernels = Mapping[str, Kernel]  # by platform
SPLASH = Kernel("splash", attend_splash, _splash_refuses)
CUDNN = Kernel("cuDNN", attend_cudnn, _cudnn_refuses)
PROVEN: Kernels = {"tpu": SPLASH}


def with_cudnn() -> Kernels:
  """Those that are proven, and cuDNN's, which has to be asked for: docs/attention.md."""
  return {**PROVEN, "gpu": CUDNN}
