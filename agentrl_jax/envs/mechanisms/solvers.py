"""Exact optima with full knowledge, and the fixed naive policies, of each family.

Utilities are computed here from plans alone and share no code with the rules in `families`, so that
a replay through the tools checks both.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.envs.mechanisms.mechanism import Theta

MOST_ORDER, MOST_STOCK = 8, 15
FACTORS = (0.5, 2.0)  # of a wrong sticker in stopping
WRONG = 0.35  # share of stickers that are wrong
OFFERS = range(5, 31)


class Solution(NamedTuple):
  """A plan and its utility, probes not counted."""

  utility: float
  plan: Sequence[float]


class Unfinished(ValueError):
  """The optimum is to stop before the end: such parameters are not admitted."""


# --- inventory ------------------------------------------------------------------------------------


def inventory(theta: Theta) -> Solution:
  """Bellman's recursion over stock. Raises Unfinished if stopping before the end earns more."""
  demand = theta["demand"]

  @functools.cache
  def value(period: int, stock: int, leave: bool) -> tuple[float, int]:
    """What the rest is worth, `leave` where one may stop for nothing more, and the order."""
    if period == len(demand):
      return 0.0, 0
    choices = []
    for order in range(min(MOST_ORDER, MOST_STOCK - stock) + 1):
      left = max(0, stock + order - demand[period])
      earned = _earned(theta, period, stock, order)
      choices.append((earned + value(period + 1, left, leave)[0], -order))
    best, order = max(choices)
    return max(best, 0.0) if leave else best, -order

  stock, plan = theta["stock"], []
  whole, leaving = value(0, stock, False)[0], value(0, stock, True)[0]
  if leaving > whole:
    raise Unfinished(f"to the end {whole} at best, {leaving} by stopping before")
  for period, wanted in enumerate(demand):
    plan.append(value(period, stock, False)[1])
    stock = max(0, stock + plan[-1] - wanted)
  return Solution(float(whole), plan)


def _earned(theta: Theta, period: int, stock: int, order: int) -> float:
  wanted, held = theta["demand"][period], stock + order
  income = theta["price"] * min(wanted, held)
  expense = theta["cost"] * order + (theta["fixed"] if order else 0)
  expense += theta["holding"] * max(0, held - wanted) + theta["shortage"] * max(0, wanted - held)
  return income - expense


def naive_inventory(theta: Theta) -> Solution:
  """Each period it orders up to what is advertised."""
  stock, plan, total = theta["stock"], [], 0.0
  for period, advertised in enumerate(theta["forecast"]):
    order = min(max(0, advertised - stock), MOST_ORDER, MOST_STOCK - stock)
    total += _earned(theta, period, stock, order)
    stock = max(0, stock + order - theta["demand"][period])
    plan.append(order)
  return Solution(total, plan)


# --- knapsack -------------------------------------------------------------------------------------


def knapsack(theta: Theta) -> Solution:
  """0-1 knapsack over all items of all periods, one column a unit of budget."""
  weights = list(theta["weights"]) * len(theta["multipliers"])
  worth = [p * m for m in theta["multipliers"] for p in theta["profits"]]
  budget = theta["budget"]
  table = np.zeros((len(weights) + 1, budget + 1), np.int64)
  for i, (weight, profit) in enumerate(zip(weights, worth, strict=True)):
    table[i + 1] = table[i]
    if weight <= budget:
      with_it = table[i, : budget + 1 - weight] + profit
      table[i + 1, weight:] = np.maximum(table[i, weight:], with_it)
  plan = [0] * len(weights)
  left = budget
  for i in reversed(range(len(weights))):
    if table[i + 1, left] != table[i, left]:
      plan[i] = 1
      left -= weights[i]
  return Solution(float(table[-1, -1]), plan)


def naive_knapsack(theta: Theta) -> Solution:
  """The same budget for each period, filled by advertised profit a unit of weight."""
  weights, periods = theta["weights"], len(theta["multipliers"])
  order = sorted(range(len(weights)), key=lambda i: (-theta["stickers"][i] / weights[i], i))
  plan, total = [], 0.0
  for multiplier in theta["multipliers"]:
    left, row = theta["budget"] // periods, [0] * len(weights)
    for item in order:
      if weights[item] <= left:
        left -= weights[item]
        row[item] = 1
        total += theta["profits"][item] * multiplier
    plan += row
  return Solution(total, plan)


# --- routing --------------------------------------------------------------------------------------


def _matrix(nodes: int, legs: list[float]) -> np.ndarray:
  matrix = np.zeros((nodes, nodes))
  matrix[np.triu_indices(nodes, 1)] = legs
  return matrix + matrix.T


def routing(theta: Theta) -> Solution:
  """Held and Karp (1962): the cheapest way through each set of nodes to each of its last nodes."""
  nodes, cost = theta["nodes"], _matrix(theta["nodes"], theta["costs"])
  ways: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
    (1 << j, j): (cost[0, j], (j,)) for j in range(1, nodes)
  }
  for size in range(2, nodes):
    for chosen in itertools.combinations(range(1, nodes), size):
      mask = sum(1 << j for j in chosen)
      for j in chosen:
        before = [(ways[mask ^ (1 << j), k], k) for k in chosen if k != j]
        ways[mask, j] = min((w + cost[k, j], (*path, j)) for (w, path), k in before)
  whole = (1 << nodes) - 2
  total, path = min((ways[whole, j][0] + cost[j, 0], ways[whole, j][1]) for j in range(1, nodes))
  return Solution(-float(total), list(path))


def naive_routing(theta: Theta) -> Solution:
  """Always to the node that the map says is nearest."""
  nodes, said = theta["nodes"], _matrix(theta["nodes"], theta["map"])
  path = [0]
  while len(path) < nodes:
    path.append(min((said[path[-1], j], j) for j in range(nodes) if j not in path)[1])
  cost = _matrix(nodes, theta["costs"])
  total = sum(cost[a, b] for a, b in zip(path, [*path[1:], 0], strict=True))
  return Solution(-float(total), path[1:])


# --- linear programme -----------------------------------------------------------------------------


def linear(theta: Theta) -> Solution:
  """`scipy.optimize.linprog` (HiGHS). Raises ValueError where there is no optimum."""
  from scipy.optimize import linprog  # a quarter of a second that no other command should wait

  found = linprog(-np.asarray(theta["values"]), theta["use"], theta["limits"], method="highs")
  if not found.success:
    raise ValueError(f"linear programme: {found.message}")
  plan = [max(0.0, float(x)) for x in found.x]
  return Solution(float(np.dot(theta["values"], plan)), plan)


def naive_linear(theta: Theta) -> Solution:
  """Best advertised value for what it uses first, each as far as half of every limit allows."""
  use, half = np.asarray(theta["use"], float), np.asarray(theta["limits"], float) / 2
  ratio = np.asarray(theta["stickers"]) / (use / half[:, None]).sum(0)
  plan = [0.0] * len(ratio)
  for i in np.argsort(-ratio, kind="stable"):
    used = use[:, i] > 0
    plan[i] = float(np.min(half[used] / use[used, i]))
    half = half - use[:, i] * plan[i]
  return Solution(float(np.dot(theta["values"], plan)), plan)


# --- stopping -------------------------------------------------------------------------------------


def stopping(theta: Theta) -> Solution:
  """The best offer less the looks that lead to it, in hindsight."""
  worth = [offer - theta["look_cost"] * (t + 1) for t, offer in enumerate(theta["offers"])]
  at = int(np.argmax(worth))
  return Solution(float(worth[at]), [at])


def naive_stopping(theta: Theta) -> Solution:
  """Waits for the offer that is advertised highest."""
  at = int(np.argmax(theta["stickers"]))
  return Solution(float(theta["offers"][at] - theta["look_cost"] * (at + 1)), [at])


def online_stopping(theta: Theta) -> float:
  """Utility of the policy that is best on average over what stickers leave open, without probes.

  Backwards: going on from offer t is worth E[max(offer, going on)] less the look; offers are
  uniform on `OFFERS` before the sticker is seen.
  """
  going_on = [0.0] * (len(theta["stickers"]) + 1)  # the last: nothing is left
  going_on[-1] = -math.inf
  for t in reversed(range(len(theta["stickers"]))):
    chance = {v: _likelihood(theta["stickers"][t], v) for v in OFFERS}
    whole = sum(chance.values())
    expected = sum(p * max(float(v), going_on[t + 1]) for v, p in chance.items()) / whole
    going_on[t] = expected - theta["look_cost"]
  for t, offer in enumerate(theta["offers"]):
    if offer >= going_on[t + 1]:
      return float(offer - theta["look_cost"] * (t + 1))
  raise AssertionError("unreachable: the last offer is accepted")


def _likelihood(sticker: int, offer: int) -> float:
  """Of a sticker where the offer is `offer`."""
  wrong = sum(sticker == distorted(offer, factor) for factor in FACTORS) / len(FACTORS)
  return (1 - WRONG) * (sticker == offer) + WRONG * wrong


def distorted(value: float, factor: float) -> int:
  """A wrong sticker: a whole number of at least 1."""
  return max(1, math.floor(value * factor + 0.5))


# --- facility -------------------------------------------------------------------------------------


def _expense(theta: Theta, sites: tuple[int, ...]) -> float:
  opening = np.asarray(theta["opening"], float)[list(sites)].sum()
  service = np.asarray(theta["service"], float)[:, list(sites)]
  outside = np.full((len(service), 1), float(theta["outside"]))
  return float(opening + np.concatenate([service, outside], 1).min(1).sum())


def facility(theta: Theta) -> Solution:
  """All sets of sites, none included."""
  count = len(theta["opening"])
  every = [s for size in range(count + 1) for s in itertools.combinations(range(count), size)]
  cost, chosen = min((_expense(theta, sites), sites) for sites in every)
  return Solution(-cost, [int(i in chosen) for i in range(count)])


def naive_facility(theta: Theta) -> Solution:
  """Opens the half of the sites that is advertised cheapest."""
  count = len(theta["opening"])
  chosen = sorted(range(count), key=lambda i: (theta["stickers"][i], i))[: count // 2]
  return Solution(-_expense(theta, tuple(chosen)), [int(i in chosen) for i in range(count)])


Solve = Callable[[Theta], Solution]
BEST: Mapping[str, Solve] = {
  "inventory": inventory,
  "knapsack": knapsack,
  "routing": routing,
  "linear": linear,
  "stopping": stopping,
  "facility": facility,
}
NAIVE: Mapping[str, Solve] = {
  "inventory": naive_inventory,
  "knapsack": naive_knapsack,
  "routing": naive_routing,
  "linear": naive_linear,
  "stopping": naive_stopping,
  "facility": naive_facility,
}
