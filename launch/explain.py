"""Explains losses: `python -m launch.explain --config=config:quickstart [--recipes=a,b] [--png=F]`.

Prints what a configuration's algorithm is made of (slots, needs, numbers, formulas) and draws the
credit it gives on a small made-up group: one row an algorithm, one column a token. `--recipes=all`
or names of functions of `agentrl_jax.losses.recipes` stand beside or instead of a configuration.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from agentrl_jax.learner.step import make_prepare
from agentrl_jax.losses import recipes
from agentrl_jax.losses.describe import describe
from agentrl_jax.types import Algorithm, Aux, PolicyEval, TrajectoryBatch
from launch import command, configuration

CONFIG = configuration.define_config()
RECIPES = flags.DEFINE_list("recipes", [], "Recipes to explain, or `all`.")
PNG = flags.DEFINE_string("png", "", "Where to draw the credit; not drawn if empty.")

# Arguments that a recipe has no default for, sized for the batch below.
SMALL = {"length": 8.0, "limit": 8, "buffer": 4}
EPISODES = (  # turns of three episodes of one task: tokens, observation after, reward
  ([3, 2, 3], 2, [0.0, 0.0, 1.0], False),
  ([2, 4], 2, [0.0, 0.0], False),
  ([3, 3], 2, [0.25, 0.0], True),
)


def main(arguments: Sequence[str]) -> int:
  del arguments
  console = Console()
  chosen = algorithms(RECIPES.value)
  if CONFIG.present:
    algorithm = configuration.given(CONFIG).algorithm
    made_by = fdl.get_callable(algorithm) if isinstance(algorithm, fdl.Buildable) else None
    name = ": ".join(["config", *filter(None, [getattr(made_by, "__name__", None)])])
    chosen = {name: fdl.build(algorithm), **chosen}
  if not chosen:
    raise ValueError("nothing to explain: give --config=config:NAME or --recipes=NAME,...")
  for name, algorithm in chosen.items():
    console.print(explanation(name, algorithm), soft_wrap=True)
  if PNG.value:
    picture(chosen).savefig(PNG.value, dpi=70)
    console.print(f"credit drawn in {PNG.value}")
  return 0


def algorithms(names: Sequence[str]) -> Mapping[str, Algorithm]:
  """Recipes by name, with small-batch arguments where they have no default."""
  public = {
    name: make
    for name, make in vars(recipes).items()
    if inspect.isfunction(make) and make.__module__ == recipes.__name__ and name[0] != "_"
  }
  names = list(public) if list(names) == ["all"] else names
  unknown = sorted(set(names) - set(public))
  if unknown:
    raise ValueError(f"no recipe is called {', '.join(unknown)}; there are {', '.join(public)}")
  return {name: _with_small_arguments(public[name]) for name in names}


def _with_small_arguments(make) -> Algorithm:
  parameters = inspect.signature(make).parameters.values()
  given = {p.name: SMALL[p.name] for p in parameters if p.default is inspect.Parameter.empty}
  return make(**given)


def explanation(name: str, algorithm: Algorithm) -> Text:
  """Composition, needs and formulas, as text."""
  text = Text(f"\n{name}", style="bold")
  text.append(f"   needs {', '.join(sorted(algorithm.needs)) or 'nothing beyond old log-probs'}\n")
  for part in describe(algorithm):
    text.append(f"  {part}\n", style="cyan")
    if part.formula:
      text.append(f"  {'  ' * part.depth}  {part.formula}\n", style="dim")
  return text


def small_batch() -> tuple[TrajectoryBatch, Aux, PolicyEval]:
  """Three episodes of one task, a row each; a made-up critic and slightly different policies."""
  rng = np.random.default_rng(0)
  length = 1 + max(sum(t) + len(t) * gap + cut for t, gap, _, cut in EPISODES)
  shape, size = (len(EPISODES), length), sum(len(turns) for turns, *_ in EPISODES)
  turn, action = np.full(shape, -1, np.int32), np.zeros(shape, bool)
  traj = np.full(shape, -1, np.int32)
  rewards, owner = np.zeros(size, np.float32), np.zeros(size, np.int32)
  k = 0
  for r, (turns, gap, given, cut) in enumerate(EPISODES):
    t = 1
    for tokens, reward in zip(turns, given, strict=True):
      turn[r, t : t + tokens], action[r, t : t + tokens] = k, True
      rewards[k], owner[k], k, t = reward, r, k + 1, t + tokens + gap
    traj[r, : t + cut] = r
  logp = np.where(action, -rng.exponential(0.7, shape), 0).astype(np.float32)
  near = lambda sd: np.where(action, logp + rng.normal(0, sd, shape), 0).astype(np.float32)  # noqa: E731
  # Rises with every turn of the first episode, falls in the second: near-constant inside turns.
  trend = np.array([[0.3], [-0.25], [0.1]]) * np.maximum(turn - turn.max(1, keepdims=True) + 2, 0)
  value = (0.45 + trend + rng.normal(0, 0.03, shape)).astype(np.float32)
  fields = {
    "tokens": rng.integers(0, 2, shape).astype(np.int32),
    "position": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
    "sample": traj,
    "traj": traj,
    "turn": turn,
    "action": action,
    "behavior_logp": near(0.1),
    "behavior_version": np.where(action, 0, -1).astype(np.int32),
    "turn_reward": rewards,
    "turn_traj": owner,
    "traj_group": np.zeros(len(EPISODES), np.int32),
    "traj_truncated": np.array([cut for *_, cut in EPISODES]),
  }
  batch = TrajectoryBatch(**{name: jnp.asarray(x) for name, x in fields.items()})
  old, ref, values = map(jnp.asarray, (near(0.1), near(0.3), value))
  aux = Aux(old, ref, values)
  bins = jnp.zeros((*shape, 3))
  return batch, aux, PolicyEval(jnp.asarray(logp), jnp.full(shape, 0.7), jnp.asarray(value), bins)


def credit(algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
  """(advantage, push): push is -dL/dlogp, what a step does to each token of the small batch.

  As in a run, only what the algorithm says it needs is there.
  """
  batch, aux, policy = small_batch()
  optional = {"ref_logp", "value"} - algorithm.needs
  aux = dataclasses.replace(aux, **dict.fromkeys(optional))
  if "value" in optional:
    policy = dataclasses.replace(policy, value=None, value_logits=None)
  prepared = make_prepare(algorithm)(batch, aux)

  def gain(logp):
    return -algorithm.loss(dataclasses.replace(policy, logp=logp), prepared)[0]

  push = jax.jit(jax.grad(gain))(policy.logp)
  return np.asarray(prepared.credit.advantage), np.asarray(push)


def picture(chosen: Mapping[str, Algorithm]) -> Figure:
  """Two heat maps side by side, a row an algorithm and a column a token of the three episodes.

  Crosses mark tokens whose advantage moves nothing, because a clip stopped it.
  """
  batch, _, _ = small_batch()
  action = np.asarray(batch.action)
  shown = [np.flatnonzero(row >= 0) for row in np.asarray(batch.traj)]

  def line(numbers: np.ndarray) -> np.ndarray:
    numbers = np.where(action, numbers, np.nan)
    return np.concatenate([np.append(numbers[r, at], np.nan) for r, at in enumerate(shown)])

  lines = [[line(numbers) for numbers in credit(algorithm)] for algorithm in chosen.values()]
  advantages, pushes = map(np.array, zip(*lines, strict=True))
  figure = Figure(figsize=(13, 1.2 + 0.24 * len(chosen)), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  for axes, rows, title in ((left, advantages, "advantage"), (right, pushes, "push = -dL/dlogp")):
    rows = rows / np.maximum(np.nanmax(np.abs(rows), axis=1, keepdims=True), 1e-12)
    axes.imshow(rows, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_facecolor("0.85")
    axes.set_yticks(range(len(chosen)), list(chosen))
    edges = np.cumsum([0] + [len(at) + 1 for at in shown])
    labels = ["succeeds", "fails", "cut off"]
    axes.set_xticks((edges[:-1] + edges[1:]) / 2 - 1, labels)
    axes.set_title(f"{title}, each row over its largest (blue up, red down)", fontsize=10)
  stopped = np.argwhere((advantages != 0) & np.isfinite(advantages) & (pushes == 0))
  right.plot(stopped[:, 1], stopped[:, 0], "x", color="0.6", markersize=4)
  return figure


if __name__ == "__main__":
  command.run(main)
