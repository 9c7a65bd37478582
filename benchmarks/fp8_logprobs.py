"""What FP8 does to log-probs: `python -m benchmarks.fp8_logprobs --model=DIR` writes
benchmarks/results/fp8_logprobs.json.

The same tokens (this repository's own texts) through the model in bfloat16, and with products,
weights or the cache of keys and values in FP8. Reported are differences of the log-probs of those
tokens, in nats, and the Kullback-Leibler divergence of the next token from the bfloat16 model's.
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from tokenizers import Tokenizer

from agentrl_jax.models import matmul_fp8, precision
from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.model import Model, Weights, cast
from agentrl_jax.models.precision import Fp8
from agentrl_jax.sampler.placement import SamplerFp8, cache_dtype, own_copy

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fp8_logprobs.json"
TEXTS = ("README.md", "docs/losses.md", "docs/transfer.md")
FORWARD = {
  "float32": (jnp.float32, None),
  "products, 128 x 128 blocks": (jnp.bfloat16, Fp8()),
  "products, one scale an operand": (jnp.bfloat16, Fp8(blocks=False)),
}
SAMPLER = {
  "bfloat16 sampler": SamplerFp8(),
  "weights": SamplerFp8(weights=True),
  "cache": SamplerFp8(cache=True),
  "weights and cache": SamplerFp8(weights=True, cache=True),
}


def tokens_of(directory: pathlib.Path, rows: int, length: int) -> np.ndarray:
  """[rows length] ids of the repository's texts, one piece after another."""
  tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
  text = "\n\n".join((ROOT / name).read_text() for name in TEXTS)
  ids = np.asarray(tokenizer.encode(text).ids, np.int32)
  if len(ids) < rows * length:
    raise ValueError(f"{len(ids)} tokens of text, {rows} rows of {length} need {rows * length}")
  return ids[: rows * length].reshape(rows, length)


def forward(model: Model, dtype: Any, how: Fp8 | None) -> Callable[[Weights, Any], jax.Array]:
  """(weights, tokens [1 T]) -> log-probs of the next token [T V], as the learner computes them."""
  options: dict[str, Any] = {} if how is None else {"matmul": matmul_fp8.matmul}

  @jax.jit
  def run(weights: Weights, tokens: jax.Array) -> jax.Array:
    used = cast(weights, dtype)
    used = used if how is None else precision.marked(used, how)
    position = jnp.arange(tokens.shape[1])[None]
    hidden = model.forward(used, tokens, jnp.zeros_like(tokens), position, dtype=dtype, **options)
    return log_softmax(model, used, hidden)

  return run


def sampler(model: Model, fp8: SamplerFp8) -> Callable[[Weights, Any], jax.Array]:
  """The same through the sampler's weights and cache, in bfloat16."""
  dtype = jnp.dtype(jnp.bfloat16)
  held: list[Weights] = []

  @jax.jit
  def run(own: Weights, tokens: jax.Array) -> jax.Array:
    cache = model.init_cache(1, tokens.shape[1], cache_dtype(dtype, fp8))
    position = jnp.arange(tokens.shape[1])[None]
    hidden, _ = model.decode(own, cache, tokens, position, dtype=dtype, **fp8.options)
    return log_softmax(model, own, hidden)

  def call(weights: Weights, tokens: jax.Array) -> jax.Array:
    if not held:
      held.append(own_copy(weights, dtype, fp8))
    return run(held[0], tokens)

  return call


def log_softmax(model: Model, weights: Weights, hidden: jax.Array) -> jax.Array:
  head = model.unembedding(weights).astype(hidden.dtype)
  logits = jnp.einsum("btd,dv->btv", hidden, head, preferred_element_type=jnp.float32)
  return jax.nn.log_softmax(logits[0, :-1])


def difference(logp: np.ndarray, base: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
  """Of one row's [T V] from the baseline's, at each position."""
  picked = [np.take_along_axis(x, ids[1:, None], 1)[:, 0] for x in (logp, base)]
  divergence = np.sum(np.exp(base) * (base - logp), axis=1)
  return {"difference": picked[0] - picked[1], "kl": divergence}


def summary(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
  joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
  size = np.abs(joined["difference"])
  return {
    "mean_abs": float(size.mean()),
    "median_abs": float(np.median(size)),
    "p99_abs": float(np.quantile(size, 0.99)),
    "max_abs": float(size.max()),
    "mean": float(joined["difference"].mean()),
    "kl": float(joined["kl"].mean()),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", type=pathlib.Path, required=True)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--length", type=int, default=256)
  parser.add_argument("--smoke", action="store_true", help="one short row; nothing is written")
  options = parser.parse_args()
  rows, length = (1, 32) if options.smoke else (options.rows, options.length)
  model = load_model(options.model)
  weights = load_weights(model, options.model)
  tokens = tokens_of(options.model, rows, length)
  base = each_row(forward(model, jnp.bfloat16, None), weights, tokens)
  kinds = {name: forward(model, *how) for name, how in FORWARD.items()}
  kinds |= {name: sampler(model, fp8) for name, fp8 in SAMPLER.items()}
  report: dict[str, Any] = {"model": options.model.name, "tokens": rows * (length - 1)}
  report["from_bfloat16"] = {}
  with rich.progress.Progress() as progress:
    for name in progress.track(kinds, description="kinds"):
      made = each_row(kinds[name], weights, tokens)
      parts = [difference(*row) for row in zip(made, base, tokens, strict=True)]
      report["from_bfloat16"][name] = summary(parts)
      print(name, report["from_bfloat16"][name], flush=True)
  if not options.smoke:
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def each_row(
  run: Callable[[Weights, Any], jax.Array], weights: Weights, tokens: np.ndarray
) -> list[np.ndarray]:
  return [np.asarray(run(weights, row[None])) for row in tokens]


if __name__ == "__main__":
  main()
