"""What losses cost: `python benchmarks/losses.py` writes benchmarks/results/losses.json.

Each recipe's prepare + loss + gradient with respect to log-probs at 64 trajectories x 4,096 packed
tokens, against one training step of an 8-layer model of width 256 on the same tokens; and log-probs
from hidden states at a vocabulary of 151,936, chunked against dense, in time and peak memory.
"""

import argparse
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentrl_jax.learner.step import make_prepare  # noqa: E402
from agentrl_jax.models import llama  # noqa: E402
from agentrl_jax.models.model import initialize  # noqa: E402
from agentrl_jax.ops.logprobs import token_logprobs  # noqa: E402
from agentrl_jax.types import Aux, PolicyEval, TrajectoryBatch  # noqa: E402
from launch.explain import algorithms  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "losses.json"
VOCAB = 151_936


def timed(function, repeats: int = 3) -> tuple[float, float]:
  """(wall, CPU) seconds of the fastest of `repeats` calls after a first one that compiles."""
  jax.block_until_ready(function())
  best = (float("inf"), float("inf"))
  for _ in range(repeats):
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    best = min(best, (time.perf_counter() - wall, time.process_time() - cpu), key=lambda x: x[1])
  return best


def packed(trajectories: int, length: int) -> tuple[TrajectoryBatch, Aux, PolicyEval]:
  """A row each: turns of 50-150 tokens with 20-60 observation tokens between, groups of eight."""
  rng = np.random.default_rng(0)
  shape = (trajectories, length)
  turn, action = np.full(shape, -1, np.int32), np.zeros(shape, bool)
  owner, k = [], 0
  for r in range(trajectories):
    t = int(rng.integers(50, 200))
    while t < length - 160:
      n = int(rng.integers(50, 150))
      turn[r, t : t + n], action[r, t : t + n] = k, True
      owner.append(r)
      k, t = k + 1, t + n + int(rng.integers(20, 60))
  traj = np.repeat(np.arange(trajectories, dtype=np.int32)[:, None], length, 1)
  rewards = np.zeros(k, np.float32)
  rewards[np.flatnonzero(np.diff([*owner, -1]))] = rng.random(trajectories) < 0.5
  logp = np.where(action, -rng.exponential(1.0, shape), 0).astype(np.float32)
  near = lambda: jnp.asarray(np.where(action, logp + rng.normal(0, 0.1, shape), 0), jnp.float32)  # noqa: E731
  batch = TrajectoryBatch(
    tokens=jnp.asarray(rng.integers(0, 4096, shape), jnp.int32),
    position=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape),
    sample=jnp.asarray(traj),
    traj=jnp.asarray(traj),
    turn=jnp.asarray(turn),
    action=jnp.asarray(action),
    behavior_logp=near(),
    behavior_version=jnp.zeros(shape, jnp.int32),
    turn_reward=jnp.asarray(rewards),
    turn_traj=jnp.asarray(owner, jnp.int32),
    traj_group=jnp.arange(trajectories, dtype=jnp.int32) // 8,
    traj_truncated=jnp.arange(trajectories) % 4 == 0,
  )
  value = jnp.asarray(rng.normal(0, 1, shape), jnp.float32)
  policy = PolicyEval(jnp.asarray(logp), jnp.ones(shape, jnp.float32), value)
  return batch, Aux(near(), near(), value), policy


def model_step(batch: TrajectoryBatch, rows: int) -> tuple[float, float]:
  """(wall, CPU) of a gradient through 8 layers of width 256 on `rows` rows, scaled to all."""
  model = llama.bind(
    llama.Config(
      vocab_size=4096, embed=256, ffw=768, layers=8, heads=4, kv_heads=4, head_dim=64,
      max_position=batch.tokens.shape[1], tied=True,
    )
  )  # fmt: skip
  weights = initialize(model, jax.random.key(0))
  part = jax.tree.map(lambda x: x[:rows] if x.ndim == 2 else x, batch)

  @jax.jit
  def gradient(weights):
    def loss(weights):
      hidden = model.forward(weights, part.tokens, part.sample, part.position)
      unembedding = model.unembedding(weights)
      logp, _ = token_logprobs(hidden, unembedding, part.tokens, part.sample, part.action)
      return logp.sum()

    return jax.grad(loss)(weights)

  scale = batch.tokens.shape[0] / rows
  return tuple(scale * x for x in timed(lambda: gradient(weights), repeats=1))


def recipes(batch, aux, policy) -> dict[str, tuple[float, float]]:
  found = {}
  for name, algorithm in algorithms(["all"]).items():
    prepare = make_prepare(algorithm)
    slope = jax.jit(jax.grad(lambda p, b, a=algorithm: a.loss(p, b)[0]))
    found[name] = timed(lambda p=prepare, s=slope: s(policy, p(batch, aux)))
    print(f"{name:24} {found[name][1]:.3f} CPU-s", flush=True)
  return found


def head(tokens: int, width: int) -> dict[str, dict[str, float]]:
  """Time and peak temporary memory of value and gradient, chunked and dense."""
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(0, 1, (1, tokens, width)), jnp.float32)
  unembedding = jnp.asarray(rng.normal(0, 0.02, (width, VOCAB)), jnp.float32)
  ids = jnp.asarray(rng.integers(0, VOCAB, (1, tokens)), jnp.int32)
  everywhere = jnp.zeros((1, tokens), jnp.int32)

  def dense(hidden, unembedding):
    log_p = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", hidden, unembedding)[:, :-1])
    logp = jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1)[..., 0]
    return logp.sum() - 0.1 * (jnp.exp(log_p) * log_p).sum()

  def chunked(hidden, unembedding):
    logp, entropy = token_logprobs(hidden, unembedding, ids, everywhere, everywhere == 0)
    return logp.sum() + 0.1 * entropy.sum()

  found, results = {}, {}
  for name, function in (("dense", dense), ("chunked", chunked)):
    run = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
    memory = run.lower(hidden, unembedding).compile().memory_analysis().temp_size_in_bytes
    wall, cpu = timed(lambda r=run: r(hidden, unembedding))
    found[name] = {"wall_s": wall, "cpu_s": cpu, "temporary_mib": memory / 2**20}
    results[name] = run(hidden, unembedding)
  pairs = zip(jax.tree.leaves(results["dense"]), jax.tree.leaves(results["chunked"]), strict=True)
  found["largest_difference"] = max(
    float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in pairs
  )
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--trajectories", type=int, default=64)
  parser.add_argument("--length", type=int, default=4096)
  parser.add_argument("--model_rows", type=int, default=1, help="rows the model step is timed on")
  parser.add_argument("--head_tokens", type=int, default=1024)
  parser.add_argument("--head_width", type=int, default=256)
  options = parser.parse_args()
  batch, aux, policy = packed(options.trajectories, options.length)
  step = model_step(batch, options.model_rows)
  print(f"model step {step[1]:.1f} CPU-s", flush=True)
  costs = recipes(batch, aux, policy)
  share = {name: cpu / step[1] for name, (_, cpu) in costs.items()}
  result = {
    "tokens": options.trajectories * options.length,
    "model_step_cpu_s": step[1],
    "recipe_cpu_s": {name: cpu for name, (_, cpu) in costs.items()},
    "recipe_share_of_step": share,
    "head": head(options.head_tokens, options.head_width),
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
  }
  RESULTS.parent.mkdir(exist_ok=True)
  RESULTS.write_text(json.dumps(result, indent=2) + "\n")
  print(f"largest share {max(share.values()):.4f}; head {json.dumps(result['head'])}")


if __name__ == "__main__":
  main()
