"""The table of the arms, and what it says: `python -m experiments.mpo.table [--write]`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_jax.envs.turn_chain import FAMILIES
from experiments import report
from experiments.mpo.config import ARMS, BASE, CRITIC
from experiments.report import UNKNOWN, Results, Verdict

CLAIM = "credit and updates at the scale of turns beat strong RL baselines"
SEEDS = (0, 1, 2)
BASELINES = ("token_token", "turn_token", "grpo", "gspo")
NAMES = {
  "mpo": "MPO (our reading)",
  "turn_turn": "turn GAE, turn ratio",
  "turn_token": "Turn-PPO (turn GAE, token ratio)",
  "token_turn": "token GAE, turn ratio",
  "token_token": "PPO (token GAE, token ratio)",
  "grpo": "GRPO",
  "gspo": "GSPO",
}
LAST_STEPS = 10
MARGIN = 0.1  # by which eta2 must exceed every control
LEAST_AUROC = 0.7

Result = Mapping[str, Any]


def late(result: Result) -> dict[str, float]:
  """Held-out success of each family, and `mean` over them: evaluations of the last 10 steps."""
  steps = sorted(map(int, result["held_out"]))
  used = [result["held_out"][str(s)] for s in steps if s >= steps[-1] - LAST_STEPS]
  found = {family: float(np.mean([row[family] for row in used])) for family in FAMILIES}
  return found | {"mean": float(np.mean([found[family] for family in FAMILIES]))}


def area(result: Result) -> float:
  """Under the held-out learning curve (mean over families), over its length."""
  steps = sorted(map(int, result["held_out"]))
  rows = [result["held_out"][str(s)] for s in steps]
  mean = [float(np.mean([row[family] for family in FAMILIES])) for row in rows]
  return float(np.trapezoid(mean, steps) / (steps[-1] - steps[0]))


def last(result: Result, name: str) -> float:
  """Mean of a training metric over the last 10 steps."""
  return float(np.mean([x for x in result["steps"][name][-LAST_STEPS:] if x is not None]))


def missing(results: Results) -> list[str]:
  return [f"{arm}_{seed}" for seed in SEEDS for arm in ARMS if (arm, seed) not in results]


def table(results: Results) -> str:
  """Markdown: the base, the arms, the critic, and which runs are missing."""
  parts = [_base(results), _arms(results), _differences(results), _critic(results)]
  lost = missing(results)
  if lost:
    parts.append(f"Not run: {', '.join(lost)} ({len(lost)} of {len(SEEDS) * len(ARMS)}).\n")
  return "\n".join(part for part in parts if part)


def verdict(results: Results) -> Verdict:
  """Supported where MPO beats the best baseline, and each family's; refuted where the mean paired
  difference is not above 0 with its 90 % interval; inconclusive while runs are missing.
  """
  lost = missing(results)
  if lost:
    effect = f"{len(lost)} of {len(SEEDS) * len(ARMS)} runs missing"
    return Verdict("mpo", CLAIM, "inconclusive", effect, None, **report.provenance(results))
  score = {arm: {seed: late(results[arm, seed]["result"]) for seed in SEEDS} for arm in ARMS}
  best = max(BASELINES, key=lambda arm: np.mean([row["mean"] for row in score[arm].values()]))

  def difference(column: str, other: str) -> report.Interval:
    one, two = ({s: score[arm][s][column] for s in SEEDS} for arm in ("mpo", other))
    return report.paired(one, two)

  found = difference("mean", best)
  everywhere = all(difference(f, arm).estimate > 0 for f in FAMILIES for arm in BASELINES)
  good = found.low > 0 and everywhere
  effect = f"success of MPO (our reading) minus {NAMES[best]}"
  if not good:
    effect = f"not reproduced at this scale: {effect}"
  word = "supported" if good else "refuted"
  return Verdict("mpo", CLAIM, word, effect, found, **report.provenance(results))


def _of(results: Results, arm: str) -> list[Result]:
  return [one["result"] for (name, _), one in sorted(results.items()) if name == arm]


def _base(results: Results) -> str:
  found = [one["success_at_temperature"] for one in _of(results, BASE)]
  if not found:
    return ""
  columns = (*FAMILIES, "all")
  rows = [
    [f"temperature {t}"] + [report.plus_minus([one[t][name] for one in found]) for name in columns]
    for t in found[0]
  ]
  return report.markdown([f"base ({len(found)} seeds)", *columns], rows)


def _arms(results: Results) -> str:
  head = ["arm", "seeds", *FAMILIES, "mean", "area", "turns", "tokens", "clipped", "published"]
  rows = []
  for arm in ARMS:
    found = _of(results, arm)
    if not found:
      continue
    scores = [late(one) for one in found]
    row = [NAMES[arm], str(len(found))]
    row += [report.plus_minus([s[name] for s in scores]) for name in (*FAMILIES, "mean")]
    row.append(report.plus_minus([area(one) for one in found]))
    row += [report.plus_minus([last(one, n) for one in found], digits=2) for n in
            ("turns", "sampled_tokens")]  # fmt: skip
    row.append(report.plus_minus([last(one, "clip_fraction") for one in found]))
    rows.append([*row, UNKNOWN.value])
  return report.markdown(head, rows) if rows else ""


def _differences(results: Results) -> str:
  """MPO minus each arm, over the seeds that both have."""
  mine = {seed: late(one["result"]) for (arm, seed), one in results.items() if arm == "mpo"}
  rows = []
  for arm in ARMS:
    theirs = {seed: late(one["result"]) for (a, seed), one in results.items() if a == arm}
    both = sorted(set(mine) & set(theirs))
    if arm == "mpo" or not both:
      continue
    row = [NAMES[arm], str(len(both))]
    for column in (*FAMILIES, "mean"):
      one, two = ({s: side[s][column] for s in both} for side in (mine, theirs))
      row.append(str(report.paired(one, two)) if len(both) > 1 else
                 f"{one[both[0]] - two[both[0]]:+.3f} (one seed)")  # fmt: skip
    rows.append(row)
  head = ["MPO minus", "seeds", *FAMILIES, "mean [90 %]"]
  return report.markdown(head, rows) if rows else ""


# --- the critic -----------------------------------------------------------------------------------


def _critic(results: Results) -> str:
  found = _of(results, CRITIC)
  if not found:
    return ""
  names = list(found[0]["constancy"])
  rows = [
    [name]
    + [report.plus_minus([one["constancy"][name][x] for one in found])
       for x in ("eta2", "inside", "between")]
    for name in names
  ]  # fmt: skip
  text = report.markdown(["values of", "eta2", "inside a turn", "between turns"], rows)
  enough = len(found) >= len(SEEDS)
  text += f"\nConstancy: {judged(enough, all(constant(one) for one in found))}.\n"
  text += f"Anomaly score: {judged(enough, alarming(found))}; {_alarms(found)}.\n"
  return text


def judged(enough: bool, good: bool) -> str:
  return ("supported" if good else "not supported") if enough else "inconclusive (seeds missing)"


def constant(result: Result) -> bool:
  """eta2 exceeds every control by more than the margin."""
  eta2 = {name: row["eta2"] for name, row in result["constancy"].items()}
  mine = eta2.pop("critic")
  return all(mine > other + MARGIN for other in eta2.values())


def retry_difference(found: Sequence[Result]) -> report.Interval | None:
  """Chance of success from the flagged turn minus that from a random one, over episodes."""
  flagged = [x for one in found for x in one["retries"].get("flagged", [])]
  random = [x for one in found for x in one["retries"].get("random", [])]
  return report.paired_tasks(flagged, random) if len(flagged) > 1 else None


def alarming(found: Sequence[Result]) -> bool:
  """AUROC above .7, and going back to flagged turns better than to random ones (90 %)."""
  scores = [one["alarms"]["auroc"] for one in found]
  gain = retry_difference(found)
  if gain is None or any(x is None for x in scores):
    return False
  return float(np.mean(scores)) > LEAST_AUROC and gain.low > 0


def _alarms(found: Sequence[Result]) -> str:
  def mean(name: str) -> str:
    values = [x for one in found if (x := one["alarms"][name]) is not None]
    return f"{np.mean(values):.3f}" if values else "-"

  retries = [one["retries"] for one in found if one["retries"]["episodes"]]
  chances = []
  for name in ("flagged", "random", "last", "continued"):
    values = [x for one in retries for x in one[name]]
    chances.append(f"{name} {np.mean(values) if values else math.nan:.3f}")
  gain = retry_difference(found)
  return (
    f"AUROC {mean('auroc')} ({mean('auroc_early')} before the last turn), failed runs flagged "
    f"{mean('caught')}, successful ones {mean('false')}, lead {mean('lead')} turns; success after "
    f"going back, at equal tokens: {', '.join(chances)}; "
    f"flagged minus random {gain or '-'}"
  )


if __name__ == "__main__":
  report.main("mpo", table, verdict)
