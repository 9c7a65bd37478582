"""What a plan is made of before anything is compiled."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl_jax.analysis.planning.jaxpr_cost import Known


@dataclasses.dataclass(frozen=True)
class Traced:
  """A program ready to lower. `known` are its flat arguments, None where they are unknown;
  `holds` names which of the run's long-lived arrays are among them.
  """

  name: str
  once_per: str
  trace: Callable[[], Any]
  known: Sequence[Known]
  holds: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Run:
  """All programs of a run, and the bytes a device holds between them, by what they are."""

  programs: tuple[Traced, ...]
  resident: Mapping[str, int]
  parameters: int
  tokens: int  # of a training step
  rows: int
  attention: tuple[str, ...]  # the implementations that the learner's layers take, in words
