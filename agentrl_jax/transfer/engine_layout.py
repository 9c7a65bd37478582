"""How SGLang stores a checkpoint: which Hugging Face tensors share a parameter, and how ranks cut
it.

The same data gives the target of a direct push and the checksums that a rank must report after any
push.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.transfer.layout import Assembly, apply, assembly, full, fuse
from agentrl_jax.transfer.plan import Shard, Tensor

_FUSED = {
  "qkv_proj": ("q_proj", "k_proj", "v_proj"),
  "gate_up_proj": ("gate_proj", "up_proj"),
}
_ROW_PARALLEL = ("o_proj", "down_proj")  # weights cut along their input axis
_VOCAB = ("embed_tokens", "lm_head")
_VOCAB_PADDING = 64  # sglang/srt/layers/vocab_parallel_embedding.py


class Parameter(NamedTuple):
  """One engine parameter over all ranks; `axis` is cut evenly by rank, None is replicated."""

  assembly: Assembly
  axis: int | None


def parameters(published: Iterable[Assembly], ranks: int) -> tuple[Parameter, ...]:
  """The engine's parameters of a checkpoint whose tensors are made by `published`.

  Raises:
    ValueError: naming a tensor that does not divide over `ranks`.
  """
  groups: dict[str, dict[str, Assembly]] = {}
  for part in published:
    groups.setdefault(_engine_name(part.dst), {})[_module(part.dst)] = part
  made = []
  for name, parts in sorted(groups.items()):
    members = _FUSED.get(_module(name))
    if members:
      if set(parts) != set(members):
        raise ValueError(f"{name} needs {', '.join(members)}, the checkpoint has {sorted(parts)}")
      made.append(Parameter(fuse(name, [parts[member] for member in members], ranks), 0))
      continue
    (part,) = parts.values()
    axis = _axis(part)
    if axis is not None and part.shape[axis] % ranks:
      raise ValueError(f"{name} of shape {part.shape} does not divide over {ranks} ranks")
    made.append(Parameter(part._replace(dst=name), axis))
  return tuple(made)


def direct_target(made: Iterable[Parameter], dtype: str, ranks: int) -> tuple[Tensor, ...]:
  """The target layout of a push into the engine's own parameters."""
  return tuple(
    Tensor(
      a.dst,
      a.shape,
      dtype,
      tuple(Shard(r, _rank_box(a.shape, axis, r, ranks)) for r in range(ranks)),
    )
    for a, axis in made
  )


def expected_checksums(tensors: Mapping[str, np.ndarray], ranks: int) -> tuple[dict[str, str], ...]:
  """What each rank's `/weights_checker` reports on CPU: 8 bytes of SHA-256 of each parameter.

  Args:
    tensors: the whole checkpoint by Hugging Face name, in the engine's dtype.
  Returns:
    for each rank, checksum by the engine's parameter name. Vocabularies that the engine pads are
    left out.
  """
  identity = [assembly(name, name, array.shape) for name, array in tensors.items()]
  out: tuple[dict[str, str], ...] = tuple({} for _ in range(ranks))
  for made, axis in parameters(identity, ranks):
    if _module(made.dst) in _VOCAB and made.shape[0] % _VOCAB_PADDING:
      continue
    single = tensors.get(made.dst)
    value = apply(made, tensors) if single is None else single
    for rank in range(ranks):
      if rank and axis is None:
        out[rank][made.dst] = out[0][made.dst]
        continue
      box = _rank_box(made.shape, axis, rank, ranks)
      part = np.ascontiguousarray(value[tuple(slice(*span) for span in box)])
      out[rank][made.dst] = hashlib.sha256(part.reshape(-1).view(np.uint8)).hexdigest()[:16]
  return out


def _rank_box(shape: Sequence[int], axis: int | None, rank: int, ranks: int):
  box = list(full(shape))
  if axis is not None:
    size = shape[axis] // ranks
    box[axis] = (rank * size, (rank + 1) * size)
  return tuple(box)


def _module(name: str) -> str:
  """ "model.layers.0.self_attn.q_proj.weight" -> "q_proj"."""
  return name.split(".")[-2] if "." in name else name


def _engine_name(name: str) -> str:
  for fused, members in _FUSED.items():
    if _module(name) in members:
      return re.sub(rf"\.{_module(name)}\.(\w+)$", rf".{fused}.\1", name)
  return name


def _axis(part: Assembly) -> int | None:
  module, kind = _module(part.dst), part.dst.rpartition(".")[2]
  if module in _VOCAB:
    return 0
  if module in _ROW_PARALLEL:
    return 1 if kind == "weight" else None
  return None
