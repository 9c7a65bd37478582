"""How SGLang stores a checkpoint: which Hugging Face tensors share a parameter, and how ranks cut
it.

The same data gives the target of a direct push and the checksums that a rank must report after any
push.
"""

import concurrent.futures
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models.hf import entries
from agentrl_jax.models.model import Model, Weights, on_host
from agentrl_jax.ops.quantize import Quantization, dequantize
from agentrl_jax.transfer.layout import (
  Assembly,
  apply,
  assemblies,
  assembly,
  cut,
  full,
  fuse,
  stack,
)
from agentrl_jax.transfer.plan import Plan, Shard, Tensor, plan, whole, with_dtypes

_FUSED = {
  "qkv_proj": ("q_proj", "k_proj", "v_proj"),
  "gate_up_proj": ("gate_proj", "up_proj"),
  "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
  "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_CHANNELS = ("in_proj_qkv", "conv1d")  # rows are queries, keys and values: a rank has some of each
_DELTA = ".linear_attn."  # of layers of the delta rule, beside which SGLang has no `self_attn`
_SHARED = ("k_proj", "v_proj")  # repeated over neighbouring ranks where heads are fewer than ranks
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)$")
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")  # weights cut along their input axis
_QUANTIZED = (
  *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
  *("in_proj_qkv", "in_proj_z", "out_proj"),
)
# Embeddings, head, norms, routers, a critic's head, what is small in the delta rule: all else must
# be in one of the lists.
_KEPT = re.compile(
  r"embed_tokens|lm_head|norm|layernorm|q_norm|k_norm|gate|value_head|score"
  r"|conv1d|in_proj_a|in_proj_b|linear_attn"
)
_VOCAB = ("embed_tokens", "lm_head")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# What a server holds beside what is pushed, rightly: tables that it computes from its
# configuration, what its loaders derive from a weight that is pushed, scales of its KV cache, and
# the parts of a checkpoint that are neither trained nor read here (images, further tokens).
_ITS_OWN = re.compile(
  r"(^|\.)(visual|mtp)\.|(^|[._])(rotary_emb|inv_freq|freqs_cis|(cos|sin|cos_sin)_cache)(\.|$)"
  r"|\.(expert_mask_gpu|embed_scale|gemma_weight|[kv]_scale)$"
)
_THREADS = 8  # hashing frees the interpreter lock
VOCAB_PADDING = 64  # sglang/srt/layers/vocab_parallel_embedding.py


class Parameter(NamedTuple):
  """One engine parameter over all ranks; `axis` is cut evenly by rank, None is replicated."""

  assembly: Assembly
  axis: int | None


def push_plan(
  model: Model,
  source: Sequence[Tensor],
  dtype: str,
  ranks: int = 0,
  *,
  quantization: Quantization | None,
  bucket_bytes: int,
  align: int,
) -> Plan:
  """From a weight tree's layout to checkpoint tensors, or to the parameters of `ranks` ranks where
  it is not zero. What a checkpoint keeps in float32 is sent so: the engine holds it so, too.

  Raises ValueError as `plan`.
  """
  shapes = {t.name: t.shape for t in source}
  made = assemblies(model.rules, shapes)
  wide = assemblies((rule for rule in model.rules if rule.float32), shapes)
  quantized = quantized_weights(made, quantization) if quantization else {}
  target = whole(made, dtype, quantized=quantized)
  if ranks:
    kv_heads = model.units.get("kv_heads")
    placed = parameters(made, ranks, kv_heads=kv_heads)
    quantized = quantized_parameters(placed, quantized)
    target = with_dtypes(direct_target(placed, dtype, ranks), quantized)
    made = [parameter.assembly for parameter in placed]
    wide = tuple(one.assembly for one in parameters(wide, ranks, kv_heads=kv_heads))
  names = {one.dst for one in wide}
  target = [t._replace(dtype="float32") if t.name in names else t for t in target]
  return plan(
    source,
    target,
    made,
    quantized=quantized,
    bucket_bytes=bucket_bytes,
    align=align,
    split=False,
  )


def parameters(
  published: Iterable[Assembly], ranks: int, *, kv_heads: int | None = None
) -> tuple[Parameter, ...]:
  """The engine's parameters of a checkpoint whose tensors are made by `published`.

  A vocabulary that the engine pads keeps its own rows here.

  Args:
    kv_heads: of the model; ranks beyond them hold repeated ones. None: not fewer than ranks.
  Raises:
    ValueError: naming a tensor that does not divide over `ranks`.
  """
  published = tuple(published)
  hybrid = any(_DELTA in part.dst for part in published)
  value_rows = {
    part.dst.rpartition(".in_proj_z.")[0]: part.shape[0]
    for part in published
    if _module(part.dst) == "in_proj_z"
  }
  groups: dict[str, dict[str, Assembly]] = {}
  experts: dict[tuple[str, str], dict[str, dict[int, Assembly]]] = {}
  for part in published:
    if found := _EXPERT.match(part.dst):
      prefix, number, module, kind = found.groups()
      experts.setdefault((prefix, kind), {}).setdefault(module, {})[int(number)] = part
      continue
    name = _engine_name(part.dst)
    name = name.replace(".self_attn.", ".") if hybrid else name
    groups.setdefault(name, {})[_module(part.dst)] = part
  sharing = max(1, ranks // kv_heads) if kv_heads else 1
  made = []
  for name, parts in groups.items():
    members = _FUSED.get(_module(name))
    if members:
      if set(parts) != set(members):
        raise ValueError(f"{name} needs {', '.join(members)}, the checkpoint has {sorted(parts)}")
      whole = [piece for member in members for piece in _cuts(parts[member], value_rows)]
      shared = [sharing if _module(piece.dst) in _SHARED else 1 for piece in whole]
      made.append(Parameter(fuse(name, whole, ranks, sharing=shared), 0))
      continue
    (part,) = parts.values()
    if _module(name) in _CHANNELS:
      made.append(Parameter(fuse(name, _cuts(part, value_rows), ranks), 0))
      continue
    axis = _axis(part)
    if axis is not None and part.shape[axis] % ranks:
      raise ValueError(f"{name} of shape {part.shape} does not divide over {ranks} ranks")
    made.append(Parameter(part._replace(dst=name), axis))
  for (prefix, kind), modules in experts.items():
    made += _experts(prefix, kind, modules, ranks)
  return tuple(sorted(made, key=lambda parameter: parameter.assembly.dst))


def _cuts(part: Assembly, value_rows: Mapping[str, int]) -> list[Assembly]:
  """The parts of a tensor that each rank has some of: queries, keys and values of channels.

  Args:
    value_rows: how many rows are values, by the prefix of a layer's tensors.
  """
  if _module(part.dst) not in _CHANNELS:
    return [part]
  rows, values = part.shape[0], value_rows[part.dst.rsplit(".", 2)[0]]
  keys = (rows - values) // 2
  edges = (0, keys, 2 * keys, rows)
  return [cut(part, 0, start, stop) for start, stop in itertools.pairwise(edges)]


def _experts(
  prefix: str, kind: str, modules: Mapping[str, Mapping[int, Assembly]], ranks: int
) -> list[Parameter]:
  """All experts of a layer as the two parameters that SGLang's fused layer holds: w13 [E, 2 F, D]
  and w2 [E, D, F].
  """
  wanted = ("gate_proj", "up_proj", "down_proj")
  if set(modules) != set(wanted):
    raise ValueError(f"{prefix} needs {', '.join(wanted)}, the checkpoint has {sorted(modules)}")
  stacked = {
    module: stack(f"{prefix}.{module}", [parts[e] for e in sorted(parts)])
    for module, parts in modules.items()
  }
  w13 = fuse(f"{prefix}.w13_{kind}", [stacked["gate_proj"], stacked["up_proj"]], ranks, axis=1)
  w2 = stacked["down_proj"]._replace(dst=f"{prefix}.w2_{kind}")
  if w2.shape[2] % ranks:
    raise ValueError(f"{w2.dst} of shape {w2.shape} does not divide over {ranks} ranks")
  return [Parameter(w13, 1), Parameter(w2, 2)]


def quantized_weights(published: Iterable[Assembly], how: Quantization) -> dict[str, Quantization]:
  """Which tensors of a checkpoint are quantised: the matrices of attention, MLPs and experts.

  Biases, and matrices with a side shorter than a block, keep the engine's dtype.

  Raises:
    ValueError: naming a tensor that is in neither list: none is left as it was by oversight.
  """
  found = {}
  for part in published:
    module, kind = _module(part.dst), part.dst.rpartition(".")[2]
    if module in _QUANTIZED and kind == "weight":
      if how.block is None or all(n >= b for n, b in zip(part.shape, how.block, strict=True)):
        found[part.dst] = how
    elif kind != "bias" and not _KEPT.search(module):
      raise ValueError(f"{part.dst} is neither among what is quantised nor among what is kept")
  return found


def quantized_parameters(
  made: Iterable[Parameter], quantized: Mapping[str, Quantization]
) -> dict[str, Quantization]:
  """The same choice for the engine's parameters, where it is of all that one is fused of.

  Raises:
    ValueError: naming a parameter of which only a part is quantised, or whose parts end inside a
      block: its blocks would not be those of the checkpoint.
  """
  found = {}
  kinds = {_engine_name(name): how for name, how in quantized.items()}
  for parameter, _ in made:
    how = kinds.get(parameter.dst)
    if how is None:
      continue
    for piece in parameter.pieces:
      edges = piece.dst_box[0] if len(parameter.pieces) > 1 else (0, 0)
      if how.block is None or any(edge % how.block[0] for edge in edges):
        raise ValueError(f"{parameter.dst}: rows {edges} are not whole blocks of {how.block}")
    found[parameter.dst] = how
  return found


def unplanned(held: Iterable[str], published: Iterable[str]) -> list[str]:
  """The parameters of `held`, by the engine's names, that would keep their values after a push of
  `published`, sorted. A head that is not published is tied: `untied` says whether it really is.

  Args:
    published: names of the checkpoint, or of the engine's parameters, scales included.
  """
  published = set(published)
  made = {_engine_name(_EXPERT.sub(_expert_name, name)) for name in published}
  if any(_DELTA in name for name in published):
    made |= {name.replace(".self_attn.", ".") for name in made}
  if _EMBEDDING in made:
    made.add(_HEAD)
  return sorted(name for name in held if name not in made and not _ITS_OWN.search(name))


def untied(checksums: Mapping[str, str], published: Iterable[str]) -> str:
  """One line on a rank's head that is not published and is not the embedding, or ""."""
  if _HEAD not in checksums or _HEAD in published:
    return ""
  same = checksums[_HEAD] == checksums.get(_EMBEDDING)
  return "" if same else f"{_HEAD} is not sent and is not {_EMBEDDING}"


def direct_target(
  made: Iterable[Parameter], dtype: str, ranks: int, replicas: int = 1
) -> tuple[Tensor, ...]:
  """The target layout of a push into the engine's own parameters; ranks of replica k follow those
  of k - 1.

  Raises:
    ValueError: naming a vocabulary that the engine pads.
  """
  made = tuple(made)
  for a, _ in made:
    if _module(a.dst) in _VOCAB and a.shape[0] % VOCAB_PADDING:
      raise ValueError(f"{a.dst} has {a.shape[0]} rows, the engine pads to {VOCAB_PADDING}s")
  return tuple(
    Tensor(
      a.dst,
      a.shape,
      dtype,
      tuple(
        Shard(replica * ranks + r, _rank_box(a.shape, axis, r, ranks))
        for replica in range(replicas)
        for r in range(ranks)
      ),
    )
    for a, axis in made
  )


def expected_checksums(
  tensors: Mapping[str, np.ndarray],
  ranks: int,
  *,
  kv_heads: int | None = None,
  block: tuple[int, int] | None = None,
  padding: int = VOCAB_PADDING,
) -> tuple[dict[str, str], ...]:
  """What each rank's `/weights_checker` reports on CPU.

  Args:
    tensors: the whole checkpoint by Hugging Face name, in the engine's dtype.
    kv_heads: as of `parameters`.
    block: of weights that are quantised in blocks.
    padding: what the engine pads vocabularies to multiples of.
  Returns:
    for each rank, checksum by the engine's parameter name. Vocabularies that the engine pads are
    left out.
  """
  identity, sources = _identity(tensors)
  held: tuple[dict[str, np.ndarray], ...] = tuple({} for _ in range(ranks))
  for made, axis in parameters(identity, ranks, kv_heads=kv_heads):
    if _module(made.dst) in _VOCAB and made.shape[0] % padding:
      continue
    single = sources.get(made.dst)
    value = apply(made, sources) if single is None else single
    for rank in range(ranks):
      box = _rank_box(made.shape, axis, rank, ranks)
      held[rank][made.dst] = value[tuple(slice(*span) for span in box)]
  return tuple(checksums_of(parts, block) for parts in held)


def checksums_here(model: Model, weights: Weights, dtype: str) -> dict[str, str]:
  """The same for weights of this process, as an engine that pads nothing holds them in `dtype`."""
  tensors = {e.name: e.read() for e in entries(model, on_host(weights), np.dtype(dtype))}
  (made,) = expected_checksums(tensors, 1, kv_heads=model.units.get("kv_heads"), padding=1)
  return made


def checksums_of(
  parts: Mapping[str, np.ndarray], block: tuple[int, int] | None = None
) -> dict[str, str]:
  """One rank's checksums on CPU: 8 bytes of SHA-256 of each parameter.

  Of a weight with scales of blocks, SGLang hashes the bfloat16 product of both, under the weight's
  name (sglang/srt/utils/weight_checker.py).
  """

  def digest(name: str) -> str:
    value, scales = parts[name], parts.get(f"{name}_scale_inv")
    if block and scales is not None:
      plain = functools.partial(dequantize, how=Quantization(block=block))
      made = plain(value, scales) if value.ndim == 2 else jax.vmap(plain)(value, scales)
      value = np.asarray(made.astype(jnp.bfloat16))
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return hashlib.sha256(data).hexdigest()[:16]

  within_products = {f"{name}_scale_inv" for name in parts} if block else set()
  names = [name for name in parts if name not in within_products]
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(names, pool.map(digest, names), strict=True))


def _identity(
  tensors: Mapping[str, np.ndarray],
) -> tuple[list[Assembly], dict[str, np.ndarray]]:
  """Each tensor as an assembly of itself, experts as elements of one source array."""
  made, sources, stacks = [], {}, {}
  for name, array in tensors.items():
    if found := _EXPERT.match(name):
      prefix, number, module, kind = found.groups()
      stacks.setdefault(f"{prefix}.{module}.{kind}", {})[int(number)] = (name, array)
      continue
    sources[name] = array
    made.append(assembly(name, name, array.shape))
  for source, members in stacks.items():
    sources[source] = np.stack([members[e][1] for e in sorted(members)])
    made += [
      assembly(members[e][0], source, sources[source].shape, index=(n,))
      for n, e in enumerate(sorted(members))
    ]
  return made, sources


def _rank_box(shape: Sequence[int], axis: int | None, rank: int, ranks: int):
  box = list(full(shape))
  if axis is not None:
    size = shape[axis] // ranks
    box[axis] = (rank * size, (rank + 1) * size)
  return tuple(box)


def _module(name: str) -> str:
  """ "model.layers.0.self_attn.q_proj.weight" -> "q_proj"."""
  return name.split(".")[-2] if "." in name else name


def _expert_name(found: re.Match[str]) -> str:
  prefix, _, module, kind = found.groups()
  return f"{prefix}.{'w2' if module == 'down_proj' else 'w13'}_{kind}"


def _engine_name(name: str) -> str:
  for fused, members in _FUSED.items():
    if _module(name) in members:
      return re.sub(rf"\.{_module(name)}\.(\w+)$", rf".{fused}.\1", name)
  return name


def _axis(part: Assembly) -> int | None:
  module = _module(part.dst)
  if module in _VOCAB or part.dst.endswith((".A_log", ".dt_bias")):
    return 0
  if module in _ROW_PARALLEL:
    return 1 if len(part.shape) == 2 else None
  return None
