"""What losses cost: `python -m benchmarks.losses` writes benchmarks/results/losses.json.

Each recipe's prepare + loss + gradient with respect to log-probs at 64 trajectories x 4,096 packed
tokens, against a gradient of an 8-layer model of width 256 on the same tokens; and log-probs from
hidden states at a vocabulary of 151,936, chunked against dense, in time and peak memory. All take
turns, `--rounds` times; reported are medians.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from agentrl_jax.learner.step import make_prepare
from agentrl_jax.models import llama
from agentrl_jax.models.model import initialize
from agentrl_jax.ops.logprobs import token_logprobs
from agentrl_jax.types import Aux, PolicyEval, TrajectoryBatch
from launch.explain import algorithms

RESULTS = pathlib.Path(__file__).parent / "results" / "losses.json"
VOCAB = 151_936

Call = Callable[[], Any]


def in_turns(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, float]]:
  """Median wall and CPU seconds of each call; they take turns, after a round that compiles."""
  found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
  with rich.progress.Progress() as progress:
    bar = progress.add_task("benchmark", total=(rounds + 1) * len(calls))
    for _ in range(rounds + 1):
      for name, call in calls.items():
        progress.update(bar, advance=1, description=name)
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
  return {
    name: {
      "wall_s": statistics.median(wall for wall, _ in times[1:]),
      "cpu_s": statistics.median(cpu for _, cpu in times[1:]),
    }
    for name, times in found.items()
  }


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


def model_gradient(batch: TrajectoryBatch, rows: int) -> Call:
  """A gradient through 8 layers of width 256 on the first `rows` rows."""
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

  return lambda: gradient(weights)


def recipe_calls(batch: TrajectoryBatch, aux: Aux, policy: PolicyEval) -> dict[str, Call]:
  """Of each recipe: credit and weights, the loss, and its gradient."""

  def call(algorithm) -> Call:
    prepare = make_prepare(algorithm)
    slope = jax.jit(jax.grad(lambda p, b: algorithm.loss(p, b)[0]))
    return lambda: slope(policy, prepare(batch, aux))

  return {name: call(algorithm) for name, algorithm in algorithms(["all"]).items()}


def heads(tokens: int, width: int, rounds: int) -> dict[str, Any]:
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

  runs = {f.__name__: jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (dense, chunked)}
  calls = {name: lambda run=run: run(hidden, unembedding) for name, run in runs.items()}
  found: dict[str, Any] = dict(in_turns(calls, rounds))
  for name, run in runs.items():
    memory = run.lower(hidden, unembedding).compile().memory_analysis().temp_size_in_bytes
    found[name]["temporary_mib"] = memory / 2**20
  leaves = [jax.tree.leaves(call()) for call in calls.values()]
  found["largest_difference"] = max(
    float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in zip(*leaves, strict=True)
  )
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--trajectories", type=int, default=64)
  parser.add_argument("--length", type=int, default=4096)
  parser.add_argument("--model_rows", type=int, default=2, help="rows the model step is timed on")
  parser.add_argument("--head_tokens", type=int, default=1024)
  parser.add_argument("--head_width", type=int, default=256)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--smoke", action="store_true", help="small sizes; writes nothing")
  options = parser.parse_args()
  if options.smoke:
    options.trajectories, options.length, options.head_tokens, options.rounds = 8, 512, 32, 1
  batch, aux, policy = packed(options.trajectories, options.length)
  calls = {"model": model_gradient(batch, options.model_rows), **recipe_calls(batch, aux, policy)}
  costs = in_turns(calls, options.rounds)
  scale = options.trajectories / options.model_rows
  step = {name: scale * seconds for name, seconds in costs.pop("model").items()}
  share = {name: cost["cpu_s"] / step["cpu_s"] for name, cost in costs.items()}
  result = {
    "tokens": options.trajectories * options.length,
    "rounds": options.rounds,
    "model_step": step,
    "recipes": costs,
    "recipe_share_of_step_cpu": share,
    "head": heads(options.head_tokens, options.head_width, options.rounds),
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
  }
  if not options.smoke:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
  most = max(share, key=lambda name: share[name])
  print(f"largest share {share[most]:.4f} ({most}); head {json.dumps(result['head'])}")


if __name__ == "__main__":
  main()
