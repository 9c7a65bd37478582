"""Six stories around the same numbers: what a person would call the things of a problem.

A story changes words only, never a number, a tool or what the environment's state is.
"""

from typing import Protocol

from agentrl_jax.envs.mechanisms.mechanism import Mechanism, Theta

PLACES = (
  "a bakery at the harbour",
  "a clinic in the hills",
  "an orchard by the railway",
  "a museum's workshop",
  "a shipyard in spring",
  "a small observatory",
)

RULES = {
  "inventory": "Each period you order first; then as much of the period's demand is sold as is in "
  "stock. You earn `price` for each unit sold, and pay `cost` for each ordered, `fixed` for each "
  "order above zero, `holding` for each unit left and `shortage` for each unit of demand not met. "
  "A plan is the order of each period.",
  "knapsack": "In each period every item can be taken once. An item uses its weight of the budget, "
  "which is one for all periods, and earns its profit times the period's multiplier. A plan has a "
  "0 or 1 for each item of the first period, then of the second, and so on.",
  "routing": "Start at node 0, visit every other node once; the way home is added. A leg costs the "
  "same both ways; costs are listed for the pairs 0-1, 0-2, ..., 1-2, 1-3, ... A plan is the order "
  "of the nodes after node 0.",
  "linear": "Set levels of at least 0. Each row of `use` says what a unit of each level uses of a "
  "limit; no limit may be exceeded. You earn each level times its value. A plan is the levels.",
  "stopping": "Offers come one by one and do not come back. Each look at the next offer costs "
  "`look_cost`; you may accept the offer seen last. A plan is the place of the offer to accept, "
  "counted from 0.",
  "facility": "Open sites at their opening costs. Each customer is then served by the open site "
  "that serves it for least (rows of `service` are customers), or from outside at cost `outside`. "
  "A plan has a 0 or 1 for each site.",
}
ENDINGS = {
  "F": "All numbers are exact. Answer with the whole plan.",
  "I": "All numbers are exact; `{advertised}` is what was advertised for `{hidden}`. Act call by "
  "call. A probe costs {fee:g}.",
  "A": "`{advertised}` is only what is advertised for the true `{hidden}`, which is not told: a "
  "probe reveals one true number and costs {fee:g}. Act call by call.",
}


class Presented(Protocol):
  """What a story depends on beside the mechanism and its parameters."""

  @property
  def presentation(self) -> str: ...
  @property
  def skin(self) -> int: ...


def story(mechanism: Mechanism, theta: Theta, presented: Presented) -> str:
  """The first message of an episode. Raises IndexError for a skin that is not there."""
  m, presentation = mechanism, presented.presentation
  shown = m.shown(theta, presentation)
  numbers = "\n".join(f"{name}: {shown[name]}" for name in shown)
  ending = ENDINGS[presentation].format(advertised=m.advertised, hidden=m.hidden, fee=m.probe_cost)
  return f"You run {PLACES[presented.skin]}. {RULES[m.name]}\n{numbers}\n{ending}"
