"""Draws the pictures of docs/losses.md: `python docs/draw_losses.py` from the repository root."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentrl_jax.losses import recipes, surrogates  # noqa: E402
from agentrl_jax.losses.gae import gae  # noqa: E402
from agentrl_jax.ops.scales import GROUP, TOKEN, TRAJ, TURN, fixed_chunks  # noqa: E402
from agentrl_jax.types import Algorithm  # noqa: E402
from launch.explain import algorithms, picture, small_batch  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def scales() -> Figure:
  """Two trajectories, a row a scale: tokens of one unit share a colour, observations are grey."""
  batch, _, _ = small_batch()
  keep = [0, 1]
  figure = Figure(figsize=(10, 2.6), layout="constrained")
  axes = figure.subplots()
  rows = []
  for scale in (TOKEN, fixed_chunks(2), TURN, TRAJ, GROUP):
    ids = np.asarray(scale(batch).ids)[keep]
    unit = np.full(ids.shape, np.nan)
    unit[ids >= 0] = np.unique(ids[ids >= 0], return_inverse=True)[1] % 10
    cells = [np.append(unit[r, batch.traj[r] >= 0], np.nan) for r in range(len(keep))]
    rows.append(np.concatenate(cells))
  axes.imshow(rows, cmap="tab10", vmin=0, vmax=9, aspect="auto", interpolation="nearest")
  axes.set_facecolor("0.88")
  axes.set_yticks(range(5), ["TOKEN", "fixed_chunks(2)", "TURN", "TRAJ", "GROUP"])
  axes.set_xticks([])
  for y in range(4):
    axes.axhline(y + 0.5, color="white", lw=3)
  axes.set_title("a scale is an id array (grey: prompt and observations, in no unit)")
  return figure


def gradients() -> Figure:
  """The gradient coefficient of each surrogate against the ratio, for A = +1 and A = -1."""
  members = {
    "reinforce()": surrogates.reinforce(),
    "reinforce(cap=1.28)": surrogates.reinforce(cap=1.28),
    "clip(.2, .28)": surrogates.clip(0.2, 0.28),
    "clip(.2, .28, dual=3)": surrogates.clip(0.2, 0.28, dual=3.0),
    "gated_reinforce(.2, .28)": surrogates.gated_reinforce(0.2, 0.28),
    "soft_gate()": surrogates.soft_gate(),
  }
  ratio = jnp.linspace(0.05, 4, 400)
  figure = Figure(figsize=(10, 3), layout="constrained")
  for axes, sign in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
    for i, (name, member) in enumerate(members.items()):
      push = jax.grad(lambda d, f=member, a=sign: -f(d, jnp.full_like(d, a))[0].sum())(
        jnp.log(ratio)
      )
      axes.plot(ratio, push, label=name, lw=2, alpha=0.75, ls=("-", "--", ":")[i % 3])
    axes.axvline(1, color="0.7", lw=1)
    axes.set(title=f"A = {sign:+.0f}", xlabel="ratio policy / old", ylim=(-4.1, 4.1))
  figure.axes[0].set_ylabel("push = -d loss / d logp")
  figure.axes[0].legend(fontsize=7, loc="lower right")
  return figure


def chunked() -> Algorithm:
  """Credit and ratio at a scale between token and turn, which no recipe has as its default."""
  scale = fixed_chunks(2)
  return recipes.mpo(advantage=gae(scale), scale=scale, low=0.2, high=0.28)


def main() -> None:
  IMAGES.mkdir(exist_ok=True)
  for name, figure in [
    ("scales", scales()),
    ("surrogates", gradients()),
    ("credit", picture({**algorithms(["all"]), "mpo, chunks of 2": chunked()})),
  ]:
    path = IMAGES / f"{name}.png"
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    figure.savefig(path, dpi=70, metadata={"Description": "\n".join(rows)})  # for a test
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
  main()
