"""What a family of problems is: pure functions of its parameters (theta) and of a state.

All chance lies in theta, so that the optimum with full knowledge bounds every episode.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentrl_jax.rollout.environment import Tool, ToolCall

Theta = Mapping[str, Any]
State = Mapping[str, Any]
Facts = Mapping[str, Any]  # what an observation tells
Plan = Sequence[float]
Acted = tuple[State, Facts] | str  # the next state and what is seen, or the code of an error

LARGEST = 10**9  # of any number in an argument
LONGEST = 64  # of any array in an argument

UNKNOWN_TOOL, BAD_ARGS = "UNKNOWN_TOOL", "BAD_ARGS"
INFEASIBLE, ALREADY_DONE, ENDED = "INFEASIBLE", "ALREADY_DONE", "ENDED"
ERRORS = (UNKNOWN_TOOL, BAD_ARGS, INFEASIBLE, ALREADY_DONE, ENDED)


@dataclasses.dataclass(frozen=True)
class Mechanism:
  """The rules of one family.

  Attributes:
    name: of the family.
    anchor: whether the optimum can be reached by someone who sees what the policy sees, or only in
      hindsight.
    hidden: theta's list of numbers that only probes reveal; `advertised` has a value for each that
      may be wrong.
    constants: fields that are the same in every theta.
    probe_cost: of each number revealed.
    probe: the tool that reveals one; `place` is the index in `hidden` of its arguments, None where
      there is none.
    tools: what acts.
    start: the state before the first act.
    act: one call of `tools` with valid arguments. It does not change the state it is given.
    over: whether nothing is left to do.
    utility: what has been realised, without the cost of probes; defined for every state.
    longest: acts of the longest plan.
    plan_length: numbers in a whole plan.
    calls: the acts that carry out a plan. Raises ValueError where it has no meaning.
    checked: the state's parts that a policy may ask for.
  """

  name: str
  anchor: Literal["attainable", "hindsight"]
  hidden: str
  advertised: str
  constants: tuple[str, ...]
  probe_cost: float
  probe: Tool
  place: Callable[[Theta, Mapping[str, int]], int | None]
  tools: tuple[Tool, ...]
  start: Callable[[Theta], State]
  act: Callable[[Theta, State, ToolCall], Acted]
  over: Callable[[Theta, State], bool]
  utility: Callable[[Theta, State], float]
  longest: Callable[[Theta], int]
  plan_length: Callable[[Theta], int]
  calls: Callable[[Theta, Plan], list[ToolCall]]
  checked: tuple[str, ...]

  def shown(self, theta: Theta, presentation: str) -> Facts:
    """What the policy is told at first: in `A` everything but what is hidden."""
    return {k: v for k, v in theta.items() if presentation != "A" or k != self.hidden}


def tool(name: str, description: str, **arguments: str | tuple[int, int]) -> Tool:
  """A tool whose arguments are all needed: whole numbers in a range, "number" or "array"."""
  schema = {
    "type": "object",
    "properties": {word: _schema(kind) for word, kind in arguments.items()},
    "required": list(arguments),
    "additionalProperties": False,
  }
  return Tool(name, description, schema)


def _schema(kind: str | tuple[int, int]) -> dict[str, Any]:
  match kind:
    case (low, high):
      return {"type": "integer", "minimum": low, "maximum": high}
    case "number":
      return {"type": "number", "minimum": 0, "maximum": LARGEST}
    case "array":
      number = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
      return {"type": "array", "items": number, "minItems": 1, "maxItems": LONGEST}
  raise ValueError(f"an argument of kind {kind!r}")


STATUS = tool("status", "Where things stand.")
LIST_ITEMS = tool("list_items", "What was told at the beginning, again.")
ANSWER = tool(
  "answer", "The whole plan at once; it is carried out and ends the task.", plan="array"
)
COMMIT = tool("commit", "Ends the task as it stands.")
