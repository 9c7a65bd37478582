"""Clip ranges for coarse ratios: `python -m experiments.mpo.pilot`, once, before any comparison.

Ratios of turns and trajectories move less than those of tokens, so a range does not transfer. One
run of the arm mpo measures, at each scale, which share of tokens lies in a unit that a range would
clip; `config.CLIP` then holds the range with about 2 %. The run is of a seed that no comparison
uses, and low : high stays 3 : 4.
"""

import json
import tempfile
from pathlib import Path

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float

from agentrl_jax.losses.compose import add
from agentrl_jax.losses.ratios import at_scale
from agentrl_jax.losses.surrogates import clip
from agentrl_jax.ops.scales import TOKEN, TRAJ, TURN
from agentrl_jax.ops.stats import masked
from agentrl_jax.orchestrate.metrics import Progressing, read_metrics
from agentrl_jax.orchestrate.sync_loop import train
from agentrl_jax.types import Algorithm, LossBatch, Metrics, PolicyEval
from experiments.mpo import config
from experiments.study import write_json
from launch import command

BASE = flags.DEFINE_string("base", "runs/mpo-cpu/base_0/run/model", "The starting policy.")
STEPS = flags.DEFINE_integer("steps", 8, "Steps of the pilot.", lower_bound=2)
OUTPUT = flags.DEFINE_string("output", "experiments/mpo/results/pilot.json", "JSON file.")
SEED = 1000
SCALES = {"token": TOKEN, "turn": TURN, "trajectory": TRAJ}
LOWS = tuple(float(x) for x in np.geomspace(1e-4, 0.4, 19))


def measuring(algorithm: Algorithm) -> Algorithm:
  """The same algorithm, which also counts what each range would clip at each scale."""

  def counted(policy: PolicyEval, batch: LossBatch) -> tuple[Float[Array, ""], Metrics]:
    live = batch.traj.action & (batch.weight != 0)
    advantage = jnp.where(live, batch.credit.advantage, 0.0)
    difference = jnp.where(batch.traj.action, policy.logp - batch.aux.old_logp, 0.0)
    found = {}
    for name, scale in SCALES.items():
      log_ratio = jnp.where(live, at_scale(scale)(difference, batch), 0.0)
      for low in LOWS:
        _, clipped = clip(low, low * 4 / 3)(log_ratio, advantage)
        found[f"clipped/{name}/{low:.3g}"] = masked(clipped, live)
    return jnp.zeros((), jnp.float32), found

  return algorithm._replace(loss=add(algorithm.loss, counted))


def main(arguments: object) -> int:
  del arguments
  planned = config.experiment("mpo", "cpu", SEED)
  planned.model = BASE.value
  planned.steps, planned.evaluation.tasks = STEPS.value, 0
  planned.algorithm = fdl.Config(measuring, planned.algorithm)
  with tempfile.TemporaryDirectory() as workdir, Progressing() as progress:
    command.run_async(train(fdl.build(planned), Path(workdir), progress))
    rows = read_metrics(Path(workdir) / "metrics.jsonl")
  # A step in which the policy waits for its critic counts nothing.
  names = sorted({name for row in rows for name in row if name.startswith("clipped/")})
  shares = {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
  write_json(Path(OUTPUT.value), {"seed": SEED, "steps": STEPS.value, "shares": shares})
  print(json.dumps(shares, indent=1))
  return 0


if __name__ == "__main__":
  command.run(main)
