"""Layouts of Qwen3-30B-A3B, by hand: shapes as in its published config.json."""

import itertools

from agentrl_jax.transfer.layout import assembly
from agentrl_jax.transfer.plan import Shard, Tensor

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM = 48, 2048, 32, 4, 128
EXPERTS, WIDTH, VOCAB = 128, 768, 151_936

FSDP, TENSOR, EXPERT = "fsdp", "tensor", "expert"


def tree():
  """path -> (shape, mesh axis of each axis, published name, its axes after layer and expert)."""
  heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
  out = {
    "embedding": ((VOCAB, EMBED), (TENSOR, FSDP), "model.embed_tokens.weight", (0, 1)),
    "unembedding": ((EMBED, VOCAB), (FSDP, TENSOR), "lm_head.weight", (1, 0)),
    "final_norm": ((EMBED,), (None,), "model.norm.weight", (0,)),
  }
  for path, shape, axes, name in [
    ("input_norm", (EMBED,), (None,), "input_layernorm"),
    ("output_norm", (EMBED,), (None,), "post_attention_layernorm"),
    ("query", (EMBED, heads), (FSDP, TENSOR), "self_attn.q_proj"),
    ("key", (EMBED, kv), (FSDP, TENSOR), "self_attn.k_proj"),
    ("value", (EMBED, kv), (FSDP, TENSOR), "self_attn.v_proj"),
    ("output", (heads, EMBED), (TENSOR, FSDP), "self_attn.o_proj"),
    ("query_norm", (HEAD_DIM,), (None,), "self_attn.q_norm"),
    ("key_norm", (HEAD_DIM,), (None,), "self_attn.k_norm"),
    ("router", (EMBED, EXPERTS), (FSDP, None), "mlp.gate"),
  ]:
    name = f"model.layers.{{layer}}.{name}.weight"
    perm = (1, 0) if len(shape) == 2 else (0,)
    out[f"layers.{path}"] = ((LAYERS, *shape), (None, *axes), name, perm)
  for path, shape, axes in [
    ("gate", (EMBED, WIDTH), (FSDP, TENSOR)),
    ("up", (EMBED, WIDTH), (FSDP, TENSOR)),
    ("down", (WIDTH, EMBED), (TENSOR, FSDP)),
  ]:
    name = f"model.layers.{{layer}}.mlp.experts.{{expert}}.{path}_proj.weight"
    shape, axes = (LAYERS, EXPERTS, *shape), (None, EXPERT, *axes)
    out[f"layers.experts.{path}"] = (shape, axes, name, (1, 0))
  return out


TREE = tree()


def source(mesh: dict[str, int], layers=LAYERS):
  """Layouts of the tree over a mesh of the product of its sizes in ranks."""
  tensors = []
  for path, (shape, axes, name, _) in TREE.items():
    if "{layer}" in name:
      shape = (layers, *shape[1:])
    shards = []
    for rank, place in enumerate(itertools.product(*(range(n) for n in mesh.values()))):
      at = dict(zip(mesh, place, strict=True))
      index = []
      for size, axis in zip(shape, axes, strict=True):
        parts = mesh.get(axis, 1)
        step = size // parts
        k = at.get(axis, 0)
        index.append((k * step, (k + 1) * step))
      shards.append(Shard(rank, tuple(index)))
    tensors.append(Tensor(path, shape, "float32", tuple(shards)))
  return tuple(tensors)


def published(layers=LAYERS):
  """One assembly for each tensor of the checkpoint."""
  made = []
  for path, (shape, _, name, perm) in TREE.items():
    if "{layer}" not in name:
      made.append(assembly(name, path, shape, perm=perm))
      continue
    shape = (layers, *shape[1:])
    for layer in range(layers):
      if "{expert}" not in name:
        made.append(assembly(name.format(layer=layer), path, shape, index=(layer,), perm=perm))
        continue
      made += [
        assembly(
          name.format(layer=layer, expert=expert), path, shape, index=(layer, expert), perm=perm
        )
        for expert in range(EXPERTS)
      ]
  return made
