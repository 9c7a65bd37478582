"""Parameters drawn, solved and admitted: the reward is fixed before there is an environment.

A task holds theta, the optimum and the naive utility; not the plans. Draws that fail a check are
drawn again, and the task says how many it took.
"""

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from agentrl_jax.envs.mechanisms import solvers
from agentrl_jax.envs.mechanisms.environment import PRESENTATIONS, Playing, Problem, score
from agentrl_jax.envs.mechanisms.families import FAMILIES, edge, family
from agentrl_jax.envs.mechanisms.mechanism import Theta
from agentrl_jax.envs.mechanisms.skins import PLACES
from agentrl_jax.envs.mechanisms.solvers import WRONG, Solution, Unfinished, distorted
from agentrl_jax.rollout.environment import ToolCall
from agentrl_jax.rollout.records import Task

SPLITS = ("train", "held_out")
SPREAD = 0.1  # of max(1, |best|), that the best utility lies above the naive one at least
EXACT = {"linear": 1e-6}  # relative error of a replay; others 1e-9
MOST_ATTEMPTS = 1000

# --- parameters -----------------------------------------------------------------------------------


def _inventory(draw: random.Random, *, periods: int = 4) -> dict[str, Any]:
  demand = [draw.randint(0, 6) for _ in range(periods)]
  off = set(draw.sample(range(periods), periods // 2))
  forecast = []
  for period, wanted in enumerate(demand):
    near = [wanted + by for by in (-4, -3, 3, 4) if 0 <= wanted + by <= 6]
    forecast.append(draw.choice(near) if period in off else wanted)
  return {
    "stock": draw.randint(0, 3),
    "fixed": draw.randint(1, 5),
    "forecast": forecast,
    "demand": demand,
    "price": 6,
    "cost": 2,
    "holding": 1,
    "shortage": 2,
  }


def _stickers(draw: random.Random, true: list[int], factors: tuple[float, ...]) -> list[int]:
  return [distorted(x, draw.choice(factors)) if draw.random() < WRONG else x for x in true]


def _knapsack(draw: random.Random, *, items: int = 4, periods: int = 3) -> dict[str, Any]:
  weights = [draw.randint(1, 5) for _ in range(items)]
  profits = [draw.randint(2, 20) for _ in range(items)]
  return {
    "budget": -(-45 * periods * sum(weights) // 100),
    "weights": weights,
    "multipliers": [draw.randint(1, 3) for _ in range(periods)],
    "stickers": _stickers(draw, profits, (0.25, 0.5, 2.0, 3.0)),
    "profits": profits,
  }


def _routing(draw: random.Random, *, nodes: int = 5) -> dict[str, Any]:
  costs = [draw.randint(1, 30) for _ in range(edge(nodes, nodes - 2, nodes - 1) + 1)]
  return {"nodes": nodes, "map": _stickers(draw, costs, (0.5, 2.0, 3.0)), "costs": costs}


def _linear(draw: random.Random, *, variables: int = 3, limits: int = 2) -> dict[str, Any]:
  values = [draw.randint(1, 10) for _ in range(variables)]
  return {
    "use": [[draw.randint(1, 5) for _ in range(variables)] for _ in range(limits)],
    "limits": [draw.randint(10, 30) for _ in range(limits)],
    "stickers": _stickers(draw, values, (0.5, 2.0, 3.0)),
    "values": values,
  }


def _stopping(draw: random.Random, *, periods: int = 6) -> dict[str, Any]:
  offers = [draw.choice(solvers.OFFERS) for _ in range(periods)]
  return {"look_cost": 1, "stickers": _stickers(draw, offers, solvers.FACTORS), "offers": offers}


def _facility(draw: random.Random, *, sites: int = 6, customers: int = 6) -> dict[str, Any]:
  opening = [draw.randint(3, 15) for _ in range(sites)]
  return {
    "service": [[draw.randint(1, 10) for _ in range(sites)] for _ in range(customers)],
    "outside": 12,
    "stickers": _stickers(draw, opening, (0.5, 2.0, 3.0)),
    "opening": opening,
  }


DRAWN: Mapping[str, Callable[..., dict[str, Any]]] = {
  "inventory": _inventory,
  "knapsack": _knapsack,
  "routing": _routing,
  "linear": _linear,
  "stopping": _stopping,
  "facility": _facility,
}

# --- admission ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Solved:
  """Parameters with what the solver and the naive rule make of them."""

  family: str
  theta: Theta
  best: Solution
  naive: Solution

  def problem(self, presentation: str, skin: int = 0) -> Problem:
    return Problem(
      family(self.family), self.theta, self.best.utility, self.naive.utility, presentation, skin
    )


def solve(name: str, theta: Theta) -> Solved:
  """Raises `Unfinished` where the best is to stop before the end."""
  return Solved(name, theta, solvers.BEST[name](theta), solvers.NAIVE[name](theta))


def replay(problem: Problem, calls: list[ToolCall]) -> Playing:
  """The calls one after the other until the episode is over."""
  played = Playing(problem)
  for call in calls:
    if not played.over:
      played.call(call)
  return played


def refused(solved: Solved) -> str | None:
  """Why parameters are not admitted, None where they are.

  Spread and band first: the best plan must beat the naive one by `SPREAD`, and the naive one must
  not lie below doing nothing by more than it is beaten. Then both plans are replayed through the
  tools: they must reach an end, and their utilities.
  """
  mechanism, theta = family(solved.family), solved.theta
  best, naive = solved.best.utility, solved.naive.utility
  idle = mechanism.utility(theta, mechanism.start(theta))
  if best - naive < SPREAD * max(1.0, abs(best)):
    return "spread"
  if naive < idle - (best - naive):
    return "band"
  for plan, utility in ((solved.best, best), (solved.naive, naive)):
    played = replay(solved.problem("I"), mechanism.calls(theta, plan.plan))
    exact = EXACT.get(solved.family, 1e-9) * max(1.0, abs(utility))
    if not played.ended or abs(played.utility() - utility) > exact:
      return "replay"
    score(played.problem, played.utility())
  return None


def draw_solved(name: str, draw: random.Random, sizes: Mapping[str, int]) -> tuple[Solved, int]:
  """The first parameters that are admitted, and the draws it took. Raises RuntimeError if none of
  `MOST_ATTEMPTS` is.
  """
  for attempt in range(1, MOST_ATTEMPTS + 1):
    try:
      solved = solve(name, DRAWN[name](draw, **sizes))
    except Unfinished:
      continue
    if refused(solved) is None:
      return solved, attempt
  raise RuntimeError(f"{name} with {dict(sizes)}: no draw of {MOST_ATTEMPTS} was admitted")


# --- tasks ----------------------------------------------------------------------------------------


def make_task(name: str, presentation: str, split: str, seed: int, **sizes: int) -> Task:
  """The task of a seed; presentations of one seed share parameters. A quarter of all parameters is
  held out, by their hash alone.

  Args:
    name: of a family.
    presentation: F, I or A.
    split: train or held_out.
    seed: of the draws.
    sizes: of the family, as `items` and `periods` of the knapsack; defaults are the CPU presets.

  Raises:
    ValueError: an unknown family, presentation or split.
  """
  if presentation not in PRESENTATIONS:
    raise ValueError(f"presentation {presentation!r}, expected one of F, I, A")
  params = _params(name, split, seed, tuple(sorted(sizes.items())))
  return Task(name, split, seed, {"presentation": presentation, **params})


@functools.lru_cache(maxsize=1 << 16)
def _params(
  name: str, split: str, seed: int, sizes: tuple[tuple[str, int], ...]
) -> Mapping[str, Any]:
  if split not in SPLITS:
    raise ValueError(f"split {split!r}, expected one of {', '.join(SPLITS)}")
  family(name)
  draw = random.Random(f"mechanisms/{name}/{split}/{seed}")
  attempts = 0
  while True:
    solved, taken = draw_solved(name, draw, dict(sizes))
    attempts += taken
    if split_of(name, solved.theta) == split:
      break
  found = {
    "theta": solved.theta,
    "best": solved.best.utility,
    "naive": solved.naive.utility,
    "skin": seed % len(PLACES),
    "attempts": attempts,
  }
  if FAMILIES[name].anchor == "hindsight":
    found["online"] = solvers.online_stopping(solved.theta)
  return found


def split_of(name: str, theta: Theta) -> str:
  """Of parameters, whatever drew them."""
  key = json.dumps([name, theta], sort_keys=True).encode()
  return "held_out" if hashlib.sha256(key).digest()[0] % 4 == 0 else "train"
