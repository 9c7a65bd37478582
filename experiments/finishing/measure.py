"""One pair of models on one set of problems, measured: what a result file keeps of it, and back.

Counts of every problem are kept, so a split can be made again, and pooled, from the result alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_jax.analysis.finishing import Split, Survival, decompose, summarize, survival
from agentrl_jax.analysis.intervals import Interval
from agentrl_jax.analysis.pass_at_k import curves
from agentrl_jax.analysis.samples import Samples, from_counts, lengths

CONTROLLED = ("finishing", "reliability", "reach")  # arms whose truth is known
RECIPES = ("grpo", "dr_grpo", "dapo", "rloo", "cispo")
RECORDED = ("smollm2", "calculator", "game24", "visits", "workdirs")
BUDGET = 30  # tokens; the base leaves 30 to 50 % unfinished
EXTENDED = 2 * BUDGET

SHOWN = (
  "pass@1 base", "pass@1 rl", "change", "finishing", "reliability", "reach",
  "null reach, split half", "null reach, posterior", "net reach, split half",
  "net reach, posterior", "finished base", "finished rl", "finishing, finishing first",
  "finishing, accuracy first", "finishing, undefined as zero",
)  # fmt: skip


def measure(
  pair: str,
  problems: str,
  budget: str,
  base: Samples,
  rl: Samples,
  *,
  extended: Samples | None = None,
  fresh: tuple[Samples, Samples] | None = None,
  least: int = 1,
  resamples: int = 2000,
) -> dict[str, Any]:
  """The split of a pair as JSON values.

  Args:
    pair, problems, budget: names for the table.
    base, rl: samples of both models on the same problems, at the same budget.
    extended: other samples of the base, at a larger budget.
    fresh: new samples of base and RL model, for survival.
    least: successes of the RL model that survival asks for.
    resamples: of the bootstrap.
  """
  split = decompose(base, rl, extended)
  summary = summarize(split, resamples=resamples)
  most = int(min(base.counts()[0].min(), rl.counts()[0].min()))
  ks = tuple(k for k in (1, 2, 4, 8, 16, 32, 64) if k <= most)
  tables = {"base": base, "rl": rl} | ({} if extended is None else {"extended": extended})
  return {
    "pair": pair,
    "set": problems,
    "budget": budget,
    "problems": len(base.problems),
    "summary": {name: list(summary[name]) for name in SHOWN},
    "share of finishing": list(summary.share) if summary.share else summary.share_reason,
    "survival": None if fresh is None else _survival(survival(split, *fresh, least=least)),
    "curves": {
      who: {
        curve: {str(k): list(value) for k, value in points.items()}
        for curve, points in curves(table, ks, resamples=resamples).items()
      }
      for who, table in (("base", base), ("rl", rl))
    },
    "lengths": {who: lengths(table) for who, table in (("base", base), ("rl", rl))},
    "right but unfinished": list(split.unfinished_correct),
    "counts": {who: _words(table) for who, table in tables.items()},
  }


def _survival(found: Survival) -> dict[str, Any]:
  share = None if not found.credited else list(found.share)
  return {"credited": len(found.credited), "survived": len(found.survived), "share": share}


def _words(table: Samples) -> str:
  """samples/finished/successful of each problem, in the order of names."""
  return " ".join("/".join(map(str, row)) for row in np.stack(table.counts(), axis=1))


def split_again(measured: Mapping[str, Any]) -> Split:
  """The split of a measured pair, from its counts."""

  def table(who: str) -> Samples | None:
    words = measured["counts"].get(who)
    if words is None:
      return None
    rows = [tuple(map(int, word.split("/"))) for word in words.split()]
    return from_counts({f"{i:05d}": row for i, row in enumerate(rows)})  # pyright: ignore

  base, rl = table("base"), table("rl")
  assert base is not None and rl is not None
  return decompose(base, rl, table("extended"))


def interval(measured: Mapping[str, Any], name: str) -> Interval:
  """One row of a measured pair's summary."""
  return Interval(*measured["summary"][name])


def pooled(measured: Sequence[Mapping[str, Any]], *, resamples: int = 2000):
  """The summary of several pairs, pooled with equal weight."""
  return summarize(*map(split_again, measured), resamples=resamples)
