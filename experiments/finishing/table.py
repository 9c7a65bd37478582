"""The study's table and verdict: `python -m experiments.finishing.table [--write]`.

Verdict by the specification's rule, on the pooled pairs of base and RL model that this study
trained: refuted if the pooled share of finishing is below 50 % with an interval that excludes it,
or net reach is above 2.1 points with an interval that excludes them, or more than 25 % of what is
credited to reach survives. Supported if none of it is so, the share's interval is above 50 % and
that of net reach not above 2.1 points. Else inconclusive.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.analysis.finishing import Summary
from agentrl_jax.analysis.intervals import Interval, wilson
from experiments import report
from experiments.finishing.measure import (
  BUDGET,
  CONTROLLED,
  EXTENDED,
  RECIPES,
  interval,
  pooled,
)
from experiments.report import Published, Results, Verdict

PAPER = "finishing"
CLAIM = "RL raises pass@1 mainly by finishing within the budget; it hardly reaches new problems"
SOURCE = "summary of the study; its text was not available"
PUBLISHED = {
  "share of finishing": Published("82 %", SOURCE),
  "net reach": Published("at most 2.1 points", SOURCE),
  "survival": Published("3.5 % of physics problems that only RL solved", SOURCE),
}
MOST_REACH, MOST_SURVIVAL, LEAST_SHARE = 0.021, 0.25, 0.5
Measured = Mapping[str, Any]


def splits(results: Results, arms: Sequence[str], budget: int | None = None) -> list[Measured]:
  """The measured pairs of these arms, in order, at one budget or at all."""
  found = [one for (arm, _), r in results.items() if arm in arms for one in r["result"]["splits"]]
  return [one for one in found if budget is None or one["budget"] == str(budget)]


def distinct(pairs: Sequence[Measured]) -> list[Measured]:
  """Without pairs that repeat another sample by sample, as two algorithms do where they agree."""
  found: dict[tuple[str, ...], Measured] = {}
  for one in pairs:
    found.setdefault((one["set"], one["counts"]["base"], one["counts"]["rl"]), one)
  return list(found.values())


def controls(results: Results) -> list[Measured]:
  """Bases against themselves."""
  found = []
  for (arm, _), one in results.items():
    if arm == "base":
      found += one["result"]["controls"]
    elif arm in CONTROLLED:
      found.append(one["result"]["control"])
  return found


def survived(pairs: Sequence[Measured]) -> Interval:
  """Share of all problems credited to reach that stood up to fresh samples (Wilson)."""
  known = [one["survival"] for one in pairs if one["survival"]]
  return wilson(sum(one["survived"] for one in known), sum(one["credited"] for one in known))


def verdict(results: Results) -> Verdict:
  pairs = distinct(splits(results, RECIPES, BUDGET))
  if not pairs:
    return Verdict(PAPER, CLAIM, "not run", **report.provenance(results))
  summary, survival = pooled(pairs), survived(pairs)
  reach, share = summary["net reach, split half"], summary.share
  against = []
  if share is not None and share.high < LEAST_SHARE:
    against.append("the share")
  if reach.low > MOST_REACH:
    against.append(f"net reach {points(reach)} points")
  if survival.estimate > MOST_SURVIVAL:
    against.append(f"survival {_ratio(survival)}")
  supported = share is not None and share.low > LEAST_SHARE and reach.high <= MOST_REACH
  word = "refuted" if against else "supported" if supported else "inconclusive"
  effect = f"share of finishing, {len(pairs)} different pairs pooled"
  if against:
    effect = f"against it: {' and '.join(against)}; {effect}"
  return Verdict(PAPER, CLAIM, word, effect, share, **report.provenance(results))


def table(results: Results) -> str:
  """Controlled runs, trained pairs, real models, controls; all of it or what there is."""
  parts = [
    ("Runs whose truth is known (points of pass@1: measured, in brackets its 95 % interval, then "
     "the truth)", _truth(results)),
    ("Trained pairs at the budget", _rows(splits(results, RECIPES, BUDGET), pool=True)),
    ("The same at twice the budget", _rows(splits(results, RECIPES, EXTENDED), pool=True)),
    ("Bases against themselves", _rows(controls(results))),
    ("Real models, recorded samples",
     _rows(splits(results, ("smollm2", "calculator", "visits")))),
    ("Runs of other experiments", _rows(splits(results, ("workdirs",)))),
    ("A change without training", _rows(splits(results, ("game24",)))),
    ("Published beside ours", _published(results)),
  ]  # fmt: skip
  return "\n".join(f"### {name}\n\n{text}" for name, text in parts if text)


def _truth(results: Results) -> str:
  rows = []
  for (arm, seed), one in results.items():
    if arm not in CONTROLLED:
      continue
    for at in one["result"]["splits"]:
      cells = [f"only {arm}", str(seed), at["budget"]]
      for part in ("finishing", "reliability", "reach"):
        cells.append(f"{points(interval(at, part))}; {100 * at['truth'][part]:+.1f}")
      rows.append((*cells, points(interval(at, "net reach, split half"))))
  head = ("trained", "seed", "budget", "finishing", "reliability", "reach", "net reach")
  return report.markdown(head, rows) if rows else ""


HEAD = (
  "pair", "set", "budget", "pass@1 base", "pass@1 RL", "change", "finishing", "reliability",
  "reach", "net reach", "finished base", "finished RL", "share of finishing", "survival",
)  # fmt: skip


def _rows(pairs: Sequence[Measured], *, pool: bool = False) -> str:
  rows = [_row(one) for one in pairs]
  if pool and pairs:
    pairs = distinct(pairs)
    summary, survival = pooled(pairs), survived(pairs)
    numbers = [points(summary[name]) for name in NUMBERS[:5]]
    name = f"**{len(pairs)} different pairs pooled**"
    rows.append((
      name, "both", pairs[0]["budget"], _percent(summary["pass@1 base"]),
      _percent(summary["pass@1 rl"]), *numbers, _percent(summary["finished base"]),
      _percent(summary["finished rl"]), _share(summary),
      _survival(survival) if any(one["survival"] for one in pairs) else "-",
    ))  # fmt: skip
  return report.markdown(HEAD, rows) if rows else ""


NUMBERS = ("change", "finishing", "reliability", "reach", "net reach, split half")


def _row(one: Measured) -> tuple[str, ...]:
  share, found = one["share of finishing"], one["survival"]
  kept = "-"
  if found:
    kept = f"{found['survived']} of {found['credited']}"
  return (
    one["pair"], one["set"], one["budget"],
    _percent(interval(one, "pass@1 base")), _percent(interval(one, "pass@1 rl")),
    *(points(interval(one, name)) for name in NUMBERS),
    _percent(interval(one, "finished base")), _percent(interval(one, "finished rl")),
    _ratio(Interval(*share)) if isinstance(share, list) else f"not quoted: {share}", kept,
  )  # fmt: skip


def _published(results: Results) -> str:
  pairs = distinct(splits(results, RECIPES, BUDGET))
  if not pairs:
    return ""
  summary, survival = pooled(pairs), survived(pairs)
  ours = {
    "share of finishing": _share(summary),
    "net reach": f"{points(summary['net reach, split half'])} points",
    "survival": _survival(survival),
  }
  rows = [(name, str(PUBLISHED[name]), value) for name, value in ours.items()]
  return report.markdown(("quantity", "published", "ours, other models and tasks"), rows)


def points(value: Interval) -> str:
  """Hundredths of pass@1 with their interval."""
  return f"{100 * value.estimate:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


def _ratio(value: Interval) -> str:
  return f"{value.estimate:.0%} [{value.low:.0%}, {value.high:.0%}]"


def _percent(value: Interval) -> str:
  return f"{value.estimate:.1%}"


def _share(summary: Summary) -> str:
  return _ratio(summary.share) if summary.share else f"not quoted: {summary.share_reason}"


def _survival(value: Interval) -> str:
  return "nothing credited" if value.estimate != value.estimate else _ratio(value)


if __name__ == "__main__":
  report.main(PAPER, table, verdict)
