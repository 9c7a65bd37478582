"""The table of the arms, and what it says: `python -m experiments.vhd_play.table [--write]`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_jax.analysis.intervals import Interval
from experiments import report
from experiments.report import UNKNOWN, Published, Results, Verdict
from experiments.vhd_play.config import ARMS, BASE, FAMILIES
from experiments.vhd_play.failures import LABELS

CLAIM = "what a model lacks is acting, which solved mechanisms teach, and not knowing"
SEEDS = (0, 1, 2)
FORMS = ("F", "I", "A")
UNSEEN = "unseen"
NAMES = {
  BASE: "supervised training alone",
  "mechanism": "RL on A, mechanism's reward",
  "answers": "RL on F, as many tokens",
  "checklist": "RL on A, checklist's reward",
}
RISE, STILL = 0.3, 0.1  # expected of `mechanism`: at least so much on A and I, at most so on F
DIGEST = "third-party notes of arXiv 2609.27321"
PUBLISHED = {
  "inventory": ".976→.999, .469→.968, .449→.912",
  "knapsack": ".984→.996, .132→.948, .117→.843",
  UNSEEN: "held-out same families +.56; other families +.63, +.24, +.16",
}

Result = Mapping[str, Any]
Row = Mapping[str, Any]  # of one arm, seed and form


def rows(results: Results, arm: str, form: str) -> dict[int, Row]:
  """By seed, of an arm that has been run."""
  return {seed: r["measured"][form] for seed, r in report.by_seed(results, arm).items()}


def scores(row: Row, family: str | None = None) -> np.ndarray:
  """By task; families take turns, as in `run.held_out`."""
  every = np.asarray(row["score"], float)
  return every if family is None else every[FAMILIES.index(family) :: len(FAMILIES)]


def means(results: Results, arm: str, form: str, family: str | None = None) -> list[float]:
  return [float(scores(row, family).mean()) for row in rows(results, arm, form).values()]


def missing(results: Results) -> list[str]:
  return [f"{arm}_{s}" for s in SEEDS for arm in (BASE, *ARMS) if (arm, s) not in results]


# --- decision -------------------------------------------------------------------------------------


def difference(results: Results, one: str, other: str, form: str) -> tuple[list[float], Interval]:
  """`one` minus `other` in a form: the mean of each seed that both have, and that over tasks, each
  the mean over these seeds, with the bootstrap's 90 % interval over tasks.

  Raises ValueError where no seed has both.
  """
  ours, theirs = rows(results, one, form), rows(results, other, form)
  both = sorted(set(ours) & set(theirs))
  if not both:
    raise ValueError(f"no seed has both {one} and {other}")
  per_seed = [float((scores(ours[s]) - scores(theirs[s])).mean()) for s in both]
  pooled = [np.mean([scores(side[s]) for s in both], axis=0) for side in (ours, theirs)]
  return per_seed, report.paired_tasks(pooled[0].tolist(), pooled[1].tolist())


def decided(per_seed: Sequence[float], found: Interval) -> str:
  """The specification's rule: one sign in all seeds, and an interval that excludes 0."""
  if min(per_seed) > 0 and found.low > 0:
    return "supported"
  if max(per_seed) < 0 and found.high < 0:
    return "refuted"
  return "inconclusive"


def verdict(results: Results) -> Verdict:
  """On A, practice for the mechanism's reward must beat supervised training alone, answering and
  the checklist; the line shows the least of these differences.
  """
  lost = missing(results)
  if lost:
    effect = f"{len(lost)} of {len(SEEDS) * len(NAMES)} runs missing"
    return Verdict("vhd_play", CLAIM, "inconclusive", effect, None, **report.provenance(results))
  found = {arm: difference(results, "mechanism", arm, "A") for arm in NAMES if arm != "mechanism"}
  words = {arm: decided(*one) for arm, one in found.items()}
  word = "supported" if set(words.values()) == {"supported"} else "inconclusive"
  word = "refuted" if "refuted" in words.values() else word
  least = min(found, key=lambda arm: found[arm][1].estimate)
  effect = f"score when acting, {NAMES['mechanism']} minus {NAMES[least]}"
  return Verdict("vhd_play", CLAIM, word, effect, found[least][1], **report.provenance(results))


# --- tables ---------------------------------------------------------------------------------------


def table(results: Results) -> str:
  """Markdown: families by form, arms, differences, what was expected, which runs are missing."""
  parts = [_families(results), _arms(results), _failures(results), _differences(results)]
  parts.append(_expected(results))
  lost = missing(results)
  if lost:
    parts.append(f"Not run: {', '.join(lost)} ({len(lost)} of {len(SEEDS) * len(NAMES)}).\n")
  return "\n".join(part for part in parts if part)


def _families(results: Results) -> str:
  """Before and after practice for the mechanism's reward, over the seeds that have both."""
  if not rows(results, "mechanism", "A"):
    return ""
  lines = []
  for family in (*FAMILIES, UNSEEN):
    line = ["routing, 4 nodes (unseen)" if family == UNSEEN else family]
    for form in FORMS:
      if family == UNSEEN and form != "A":
        line.append("-")
        continue
      column, one = (UNSEEN, None) if family == UNSEEN else (form, family)
      before, after = (means(results, arm, column, one) for arm in (BASE, "mechanism"))
      line.append(f"{report.plus_minus(before)} → {report.plus_minus(after)}")
    lines.append([*line, str(Published(PUBLISHED[family], DIGEST))])
  seeds = len(rows(results, "mechanism", "A"))
  head = [f"before → after ({seeds} seeds)", *FORMS, "published F, I, A"]
  return report.markdown(head, lines)


def _arms(results: Results) -> str:
  head = ["arm", "seeds", *FORMS, "A, unseen family", "probes in A", "calls in A", "ended in A"]
  lines = []
  for arm, name in NAMES.items():
    found = rows(results, arm, "A")
    if found:
      line = [name, str(len(found))]
      line += [report.plus_minus(means(results, arm, form)) for form in (*FORMS, UNSEEN)]
      for number in ("probes", "calls", "ended"):
        line.append(report.plus_minus([row[number] for row in found.values()], digits=2))
      lines.append([*line, UNKNOWN.value])
  bases = list(report.by_seed(results, BASE, "scripts").values())[
    :1
  ]  # tasks are those of each seed
  for script in ("oracle", "naive") if bases else ():
    values = [f"{bases[0][form][script]:.3f}" for form in (*FORMS, UNSEEN)]
    lines.append([f"script: {script}", "-", *values, *["-"] * 4])
  return report.markdown([*head, "published"], lines) if lines else ""


def _failures(results: Results) -> str:
  """Share of acting episodes that failed for a reason."""
  lines = []
  for arm, name in NAMES.items():
    found = rows(results, arm, "A").values()
    if found:
      shares = [report.plus_minus([row["failures"][label] for row in found]) for label in LABELS]
      lines.append([name, *shares])
  return report.markdown(["failures in A", *LABELS], lines) if lines else ""


def _differences(results: Results) -> str:
  lines = []
  for other in NAMES:
    both = set(rows(results, "mechanism", "A")) & set(rows(results, other, "A"))
    if other == "mechanism" or not both:
      continue
    line = [NAMES[other], str(len(both))]
    for form in (*FORMS, UNSEEN):
      line.append(str(difference(results, "mechanism", other, form)[1]))
    per_seed, found = difference(results, "mechanism", other, "A")
    enough = len(both) == len(SEEDS)
    lines.append([*line, decided(per_seed, found) if enough else "seeds missing"])
  head = [f"{NAMES['mechanism']}, minus", "seeds", *FORMS, "unseen", "on A [90 % over tasks]"]
  return report.markdown(head, lines) if lines else ""


def _expected(results: Results) -> str:
  """What was expected of the arms beforehand, and whether it came so."""
  have = {arm for arm in NAMES if rows(results, arm, "A")}
  if {BASE, "mechanism"} - have:
    return ""

  def rise(arm: str, form: str) -> float:
    return difference(results, arm, BASE, form)[1].estimate

  lines = [
    (f"on A by at least {RISE}", rise("mechanism", "A"), rise("mechanism", "A") >= RISE),
    (f"on I by at least {RISE}", rise("mechanism", "I"), rise("mechanism", "I") >= RISE),
    (f"on F by at most {STILL}", rise("mechanism", "F"), abs(rise("mechanism", "F")) <= STILL),
  ]
  ours = rise("mechanism", "A")
  if "answers" in have:
    lines.append((f"{NAMES['answers']}: on A by at most {STILL}", rise("answers", "A"),
                  abs(rise("answers", "A")) <= STILL))  # fmt: skip
  if "checklist" in have:
    theirs = rise("checklist", "A")
    lines.append((f"{NAMES['checklist']}: on A less than half as much", theirs, theirs < ours / 2))
  said = [[name, f"{value:+.3f}", "yes" if met else "no"] for name, value, met in lines]
  return report.markdown(["expected change from supervised training", "found", "met"], said)


if __name__ == "__main__":
  report.main("vhd_play", table, verdict)
