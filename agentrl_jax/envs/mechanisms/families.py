"""The six families: what a call changes and what the result is worth. No solver is used here."""

import math
from collections.abc import Mapping, Sequence

from agentrl_jax.envs.mechanisms.mechanism import (
  ALREADY_DONE,
  COMMIT,
  INFEASIBLE,
  Acted,
  Mechanism,
  Plan,
  State,
  Theta,
  tool,
)
from agentrl_jax.rollout.environment import Tool, ToolCall

MOST_ORDER, MOST_STOCK = 8, 15
MOST_PLACES = 31  # of anything that has an index
TOLERANCE = 1e-9  # of a linear constraint, relative to its bound


def _index(theta: Theta, arguments: Mapping[str, int], *, of: str) -> int | None:
  index = arguments["index"]
  return index if index < len(theta[of]) else None


def _probe(what: str) -> Tool:
  return tool("probe", f"The true {what} of an index, for a fee.", index=(0, MOST_PLACES))


def _bits(plan: Plan) -> list[bool]:
  """Raises ValueError for other numbers than 0 and 1."""
  if any(x not in (0, 1) for x in plan):
    raise ValueError(f"plan {list(plan)}, expected zeros and ones")
  return [bool(x) for x in plan]


def _whole(plan: Plan) -> list[int]:
  if any(x != int(x) for x in plan):
    raise ValueError(f"plan {list(plan)}, expected whole numbers")
  return [int(x) for x in plan]


def _ended(theta: Theta, state: State) -> bool:
  del theta
  return state["ended"]


# --- inventory: order each period before its demand is known --------------------------------------


def _order(theta: Theta, state: State, call: ToolCall) -> Acted:
  quantity, period = call.arguments["quantity"], state["period"]
  held = state["stock"] + quantity
  if held > MOST_STOCK:
    return INFEASIBLE
  sold = min(theta["demand"][period], held)
  left, unmet = held - sold, theta["demand"][period] - sold
  earned = theta["price"] * sold - theta["cost"] * quantity - theta["fixed"] * (quantity > 0)
  earned -= theta["holding"] * left + theta["shortage"] * unmet
  after = {"period": period + 1, "stock": left, "earned": state["earned"] + earned}
  return after, {"period": period + 1, "stock": left}


def _order_calls(theta: Theta, plan: Plan) -> list[ToolCall]:
  del theta
  return [ToolCall("order", {"quantity": q}) for q in _whole(plan)]


INVENTORY = Mechanism(
  name="inventory",
  anchor="attainable",
  hidden="demand",
  advertised="forecast",
  constants=("price", "cost", "holding", "shortage"),
  probe_cost=0.5,
  probe=_probe("demand"),
  place=lambda theta, arguments: _index(theta, arguments, of="demand"),
  tools=(tool("order", "Orders, then sells for one period.", quantity=(0, MOST_ORDER)),),
  start=lambda theta: {"period": 0, "stock": theta["stock"], "earned": 0},
  act=_order,
  over=lambda theta, state: state["period"] == len(theta["demand"]),
  utility=lambda theta, state: float(state["earned"]),
  longest=lambda theta: len(theta["demand"]),
  plan_length=lambda theta: len(theta["demand"]),
  calls=_order_calls,
  checked=("period", "stock"),
)


# --- knapsack: items come again each period, worth more in some, one budget for all ---------------


def _take(theta: Theta, state: State, call: ToolCall) -> Acted:
  if call.name == "advance":
    after = {**state, "period": state["period"] + 1, "taken": ()}
    return after, {"budget": after["budget"], "period": after["period"]}
  item = call.arguments["item"]
  if item in state["taken"]:
    return ALREADY_DONE
  if item >= len(theta["weights"]) or theta["weights"][item] > state["budget"]:
    return INFEASIBLE
  earned = theta["profits"][item] * theta["multipliers"][state["period"]]
  after = {
    "period": state["period"],
    "budget": state["budget"] - theta["weights"][item],
    "taken": (*state["taken"], item),
    "earned": state["earned"] + earned,
  }
  return after, {"budget": after["budget"]}


def _take_calls(theta: Theta, plan: Plan) -> list[ToolCall]:
  items, chosen = len(theta["weights"]), _bits(plan)
  calls = []
  for period in range(len(theta["multipliers"])):
    row = chosen[period * items : (period + 1) * items]
    calls += [ToolCall("take", {"item": item}) for item, taken in enumerate(row) if taken]
    calls.append(ToolCall("advance", {}))
  return calls


KNAPSACK = Mechanism(
  name="knapsack",
  anchor="attainable",
  hidden="profits",
  advertised="stickers",
  constants=(),
  probe_cost=1.0,
  probe=_probe("profit"),
  place=lambda theta, arguments: _index(theta, arguments, of="profits"),
  tools=(
    tool("take", "Takes an item in this period.", item=(0, MOST_PLACES)),
    tool("advance", "Goes to the next period; after the last the task is over."),
  ),
  start=lambda theta: {"period": 0, "budget": theta["budget"], "taken": (), "earned": 0},
  act=_take,
  over=lambda theta, state: state["period"] == len(theta["multipliers"]),
  utility=lambda theta, state: float(state["earned"]),
  longest=lambda theta: (len(theta["weights"]) + 1) * len(theta["multipliers"]),
  plan_length=lambda theta: len(theta["weights"]) * len(theta["multipliers"]),
  calls=_take_calls,
  checked=("budget", "period", "taken"),
)


# --- routing: a round trip whose legs may cost something else than the map says -------------------


def edge(nodes: int, i: int, j: int) -> int:
  """The place of the leg between two different nodes in a flat list of all legs."""
  low, high = min(i, j), max(i, j)
  return low * nodes - low * (low + 1) // 2 + high - low - 1


def _leg(theta: Theta, arguments: Mapping[str, int]) -> int | None:
  i, j, nodes = arguments["i"], arguments["j"], theta["nodes"]
  return edge(nodes, i, j) if i != j and max(i, j) < nodes else None


def _move(theta: Theta, state: State, call: ToolCall) -> Acted:
  node = call.arguments["node"]
  if node >= theta["nodes"]:
    return INFEASIBLE
  if node in state["visited"]:
    return ALREADY_DONE
  cost = theta["costs"][edge(theta["nodes"], state["visited"][-1], node)]
  after = {"visited": (*state["visited"], node), "paid": state["paid"] + cost}
  return after, {"node": node}


def _tour(theta: Theta, state: State) -> float:
  """Minus the cost of the way so far and home, and of a detour to each node left out: twice the
  dearest leg, which no detour exceeds.
  """
  nodes, at = theta["nodes"], state["visited"][-1]
  home = theta["costs"][edge(nodes, 0, at)] if at else 0
  missed = nodes - len(state["visited"])
  return -float(state["paid"] + home + 2 * max(theta["costs"]) * missed)


def _move_calls(theta: Theta, plan: Plan) -> list[ToolCall]:
  del theta
  return [ToolCall("move", {"node": node}) for node in _whole(plan)]


ROUTING = Mechanism(
  name="routing",
  anchor="attainable",
  hidden="costs",
  advertised="map",
  constants=(),
  probe_cost=0.5,
  probe=tool("probe", "The true cost of a leg, for a fee.", i=(0, MOST_PLACES), j=(0, MOST_PLACES)),
  place=_leg,
  tools=(
    tool("move", "Goes to a node; after the last the way leads home.", node=(0, MOST_PLACES)),
  ),
  start=lambda theta: {"visited": (0,), "paid": 0},
  act=_move,
  over=lambda theta, state: len(state["visited"]) == theta["nodes"],
  utility=_tour,
  longest=lambda theta: theta["nodes"] - 1,
  plan_length=lambda theta: theta["nodes"] - 1,
  calls=_move_calls,
  checked=("visited",),
)


# --- linear programme: levels within constraints --------------------------------------------------


def _set_level(theta: Theta, state: State, call: ToolCall) -> Acted:
  if call.name == "commit":
    return {**state, "ended": True}, {}
  variable, value = call.arguments["variable"], float(call.arguments["value"])
  if variable >= len(theta["values"]):
    return INFEASIBLE
  levels = list(state["levels"])
  levels[variable] = value
  for row, bound in zip(theta["use"], theta["limits"], strict=True):
    used = math.fsum(a * x for a, x in zip(row, levels, strict=True))
    if used > bound + TOLERANCE * max(1.0, bound):
      return INFEASIBLE
  return {**state, "levels": tuple(levels)}, {"levels": tuple(levels)}


def _worth(theta: Theta, state: State) -> float:
  return math.fsum(c * x for c, x in zip(theta["values"], state["levels"], strict=True))


def _level_calls(theta: Theta, plan: Plan) -> list[ToolCall]:
  del theta
  levels = [ToolCall("set_level", {"variable": i, "value": x}) for i, x in enumerate(plan) if x > 0]
  return [*levels, ToolCall("commit", {})]


LINEAR = Mechanism(
  name="linear",
  anchor="attainable",
  hidden="values",
  advertised="stickers",
  constants=(),
  probe_cost=0.5,
  probe=_probe("value"),
  place=lambda theta, arguments: _index(theta, arguments, of="values"),
  tools=(
    tool("set_level", "Sets the level of a variable.", variable=(0, MOST_PLACES), value="number"),
    COMMIT,
  ),
  start=lambda theta: {"levels": (0.0,) * len(theta["values"]), "ended": False},
  act=_set_level,
  over=_ended,
  utility=_worth,
  longest=lambda theta: len(theta["values"]) + 1,
  plan_length=lambda theta: len(theta["values"]),
  calls=_level_calls,
  checked=("levels",),
)


# --- stopping: offers come one by one and do not come back ----------------------------------------


def _look(theta: Theta, state: State, call: ToolCall) -> Acted:
  if call.name == "accept":
    if not state["looked"]:
      return INFEASIBLE
    return {**state, "ended": True, "got": theta["offers"][state["looked"] - 1]}, {}
  if state["looked"] == len(theta["offers"]):
    return INFEASIBLE
  after = {**state, "looked": state["looked"] + 1}
  return after, {"offer": theta["offers"][state["looked"]]}


def _look_calls(theta: Theta, plan: Plan) -> list[ToolCall]:
  (at,) = _whole(plan)
  if not 0 <= at < len(theta["offers"]):
    raise ValueError(f"plan {at}, expected an offer from 0 to {len(theta['offers']) - 1}")
  return [*[ToolCall("advance", {})] * (at + 1), ToolCall("accept", {})]


STOPPING = Mechanism(
  name="stopping",
  anchor="hindsight",
  hidden="offers",
  advertised="stickers",
  constants=("look_cost",),
  probe_cost=1.0,
  probe=_probe("value of an offer"),
  place=lambda theta, arguments: _index(theta, arguments, of="offers"),
  tools=(tool("advance", "Looks at the next offer."), tool("accept", "Takes the offer seen last.")),
  start=lambda theta: {"looked": 0, "got": 0, "ended": False},
  act=_look,
  over=_ended,
  utility=lambda theta, state: float(state["got"] - theta["look_cost"] * state["looked"]),
  longest=lambda theta: len(theta["offers"]) + 1,
  plan_length=lambda theta: 1,
  calls=_look_calls,
  checked=("looked",),
)


# --- facility: which sites to open for customers who go to the nearest ----------------------------


def _open(theta: Theta, state: State, call: ToolCall) -> Acted:
  if call.name == "commit":
    return {**state, "ended": True}, {}
  site = call.arguments["site"]
  if site >= len(theta["opening"]):
    return INFEASIBLE
  if site in state["open"]:
    return ALREADY_DONE
  after = (*state["open"], site)
  return {**state, "open": after}, {"open": after}


def _expense(theta: Theta, state: State) -> float:
  """Minus what the open sites and the customers cost; a customer may stay outside."""
  opened: Sequence[int] = state["open"]
  served = (min([theta["outside"], *(row[site] for site in opened)]) for row in theta["service"])
  return -float(sum(theta["opening"][site] for site in opened) + sum(served))


def _open_calls(theta: Theta, plan: Plan) -> list[ToolCall]:
  del theta
  chosen = [ToolCall("open_site", {"site": i}) for i, bit in enumerate(_bits(plan)) if bit]
  return [*chosen, ToolCall("commit", {})]


FACILITY = Mechanism(
  name="facility",
  anchor="attainable",
  hidden="opening",
  advertised="stickers",
  constants=("outside",),
  probe_cost=0.5,
  probe=_probe("opening cost"),
  place=lambda theta, arguments: _index(theta, arguments, of="opening"),
  tools=(tool("open_site", "Opens a site.", site=(0, MOST_PLACES)), COMMIT),
  start=lambda theta: {"open": (), "ended": False},
  act=_open,
  over=_ended,
  utility=_expense,
  longest=lambda theta: len(theta["opening"]) + 1,
  plan_length=lambda theta: len(theta["opening"]),
  calls=_open_calls,
  checked=("open",),
)

FAMILIES: Mapping[str, Mechanism] = {
  m.name: m for m in (INVENTORY, KNAPSACK, ROUTING, LINEAR, STOPPING, FACILITY)
}


def family(name: str) -> Mechanism:
  """Raises ValueError for a name that is not one of `FAMILIES`."""
  if name not in FAMILIES:
    raise ValueError(f"family {name!r}, expected one of {', '.join(FAMILIES)}")
  return FAMILIES[name]
