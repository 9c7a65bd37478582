"""The table of the arms, and what it says: `python -m experiments.ac2.table [--write]`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import report
from experiments.ac2.config import ARMS, BASE, CRITIC, PROBE
from experiments.report import Published, Results, Verdict

CLAIM = "a critic that scores chunks reaches the peak of whole-response RL with less decoding"
SEEDS = (0, 1, 2)
NAMES = {
  "grpo": "GRPO",
  "prefix_grpo": "Prefix-GRPO",
  "ac2": "AC2",
  "no_readiness": "AC2, no local readiness",
  "short_chunks": "AC2, one-token chunks",
}
SHARES = (0.25, 0.5, 0.75, 1.0)
LAST_STEPS = 10
SOURCE = "arXiv 2609.39247"
PUBLISHED: Mapping[str, Published] = {
  "grpo": Published("peak 18.50 % at 1.99e20 decoding FLOPs, step 120", SOURCE),
  "prefix_grpo": Published("behind AC2 per FLOP, no number in the text", SOURCE),
  "ac2": Published("peak 20.57 %; GRPO's at 0.79e20, step 90: ratio 2.5, steps 1.33", SOURCE),
  "no_readiness": Published("13.56 % at step 30, 13.10 % at 40 (AC2 15.33 % at 40)", SOURCE),
  "short_chunks": Published("2k chunks: 16.62 % at step 100, 13.57 % at 120", SOURCE),
}

Result = Mapping[str, Any]


def curve(result: Result) -> dict[int, float]:
  """Steps taken -> held-out score."""
  return {int(step): row["score"] for step, row in result["held_out"].items()}


def spent(result: Result, step: int, what: str) -> float:
  """FLOPs (`decode` or `total`) of the first `step` steps."""
  return float(result["steps"][f"flops/{what}"][step - 1]) if step else 0.0


def peak(result: Result) -> tuple[int, float]:
  """The step of the highest score, the first such, and that score."""
  scores = curve(result)
  step = max(sorted(scores), key=lambda s: scores[s])
  return step, scores[step]


def reached(result: Result, score: float) -> int | None:
  """The first evaluated step with at least this score; None where there is none."""
  return next((step for step, found in sorted(curve(result).items()) if found >= score), None)


def whole_budget(result: Result) -> float:
  """Decoding FLOPs of the whole run."""
  return spent(result, max(curve(result)), "decode")


def score_at(result: Result, flops: float) -> float:
  """Held-out score when so many decoding FLOPs are spent, linear between evaluations; the last one
  where the run ended before.
  """
  scores = curve(result)
  steps = sorted(scores)
  return float(np.interp(flops, [spent(result, s, "decode") for s in steps],
                         [scores[s] for s in steps]))  # fmt: skip


def ratio(one: Result, other: Result, what: str) -> float:
  """Cost (`decode`, `total`, or `steps`) at which `other` has its peak, over that at which `one`
  reaches the same score: above 1 `one` is cheaper. 0 where it never does.
  """
  step, score = peak(other)
  found = reached(one, score)
  if not found:
    return 0.0
  if what == "steps":
    return step / found
  return spent(other, step, what) / spent(one, found, what)


def mean_at_equal_cost(one: Result, other: Result) -> tuple[float, float]:
  """Both scores, as means over quarters of the smaller of the two whole decoding budgets."""
  least = min(whole_budget(one), whole_budget(other))
  return tuple(  # pyright: ignore
    float(np.mean([score_at(x, share * least) for share in SHARES])) for x in (one, other)
  )


def late(result: Result, name: str) -> float | None:
  """Mean of a training metric over the last 10 steps; None where it was never measured."""
  values = [x for x in result["steps"].get(name, [])[-LAST_STEPS:] if x is not None]
  return float(np.mean(values)) if values else None


def missing(results: Results) -> list[str]:
  return [f"{arm}_{seed}" for seed in SEEDS for arm in ARMS if (arm, seed) not in results]


def verdict(results: Results) -> Verdict:
  """By the specification: refuted where the paired ratio of decoding FLOPs is not above 1 with its
  90 % interval, or removing local readiness is not worse at equal decoding FLOPs; else supported,
  as a decode-only gain where total FLOPs reverse the order. Inconclusive while runs are missing.
  """
  lost = missing(results)
  if lost:
    effect = f"{len(lost)} of {len(SEEDS) * len(ARMS)} runs missing"
    return Verdict("ac2", CLAIM, "inconclusive", effect, None, **report.provenance(results))
  decode, total = (ratios(results, "ac2", what) for what in ("decode", "total"))
  found = report.paired(decode, dict.fromkeys(decode, 0.0))
  readiness = readiness_gain(results)
  assert readiness is not None
  cheaper, needed = found.low > 1, readiness.estimate > 0
  effect = "ratio of decoding FLOPs to GRPO's peak, GRPO over AC2"
  if cheaper and float(np.mean(list(total.values()))) <= 1:
    effect = f"decode-only gain: {effect}"
  if not (cheaper and needed):
    because = "the ratio is not above 1" if not cheaper else "local readiness is not needed"
    effect = f"not reproduced at this scale ({because}): {effect}"
  word = "supported" if cheaper and needed else "refuted"
  return Verdict("ac2", CLAIM, word, effect, found, **report.provenance(results))


def ratios(results: Results, arm: str, what: str) -> dict[int, float]:
  """By the seeds that both the arm and GRPO have."""
  both = [s for s in SEEDS if (arm, s) in results and ("grpo", s) in results]
  return {s: ratio(results[arm, s]["result"], results["grpo", s]["result"], what) for s in both}


def readiness_gain(results: Results) -> report.Interval | None:
  """Score of AC2 minus that without local readiness, at equal cost; None with fewer than two
  seeds.
  """
  both = [s for s in SEEDS if ("ac2", s) in results and ("no_readiness", s) in results]
  if len(both) < 2:
    return None
  pairs = {
    s: mean_at_equal_cost(results["ac2", s]["result"], results["no_readiness", s]["result"])
    for s in both
  }
  return report.paired({s: p[0] for s, p in pairs.items()}, {s: p[1] for s, p in pairs.items()})


# --- tables ---------------------------------------------------------------------------------------


def table(results: Results) -> str:
  """Markdown: the base, the arms, what they share, the probe, and which runs are missing."""
  parts = [_base(results), _arms(results), _differences(results)]
  parts += [_critic(results), _probe(results)]
  lost = missing(results)
  if lost:
    parts.append(f"Not run: {', '.join(lost)} ({len(lost)} of {len(SEEDS) * len(ARMS)}).\n")
  return "\n".join(part for part in parts if part)


def _of(results: Results, arm: str) -> list[Result]:
  return [one["result"] for (name, _), one in sorted(results.items()) if name == arm]


def _base(results: Results) -> str:
  found = _of(results, BASE)
  if not found:
    return ""
  rows = [
    [f"temperature {t}"]
    + [report.plus_minus([one["success_at_temperature"][t][n] for one in found])
       for n in ("success", "finished")]
    for t in found[0]["success_at_temperature"]
  ]  # fmt: skip
  return report.markdown([f"base ({len(found)} seeds)", "score", "finished"], rows)


def _arms(results: Results) -> str:
  """Scores at shares of the decoding FLOPs that AC2 spends in all, in the same seed."""
  head = ["arm", "seeds", *(f"at {share:.0%}" for share in SHARES), "peak", "step of peak"]
  head += ["decode, total FLOPs", "decode ratio", "total ratio", "steps ratio"]
  head += ["critic MAE", "ready", "published"]
  rows = []
  for arm in ARMS:
    seeds = [s for s in SEEDS if (arm, s) in results]
    if not seeds:
      continue
    found = {s: results[arm, s]["result"] for s in seeds}
    row = [NAMES[arm], str(len(seeds))]
    for share in SHARES:
      budget = {s: share * whole_budget(results["ac2", s]["result"]) for s in seeds
                if ("ac2", s) in results}  # fmt: skip
      row.append(report.plus_minus([score_at(found[s], b) for s, b in budget.items()]))
    row.append(report.plus_minus([peak(one)[1] for one in found.values()]))
    row.append(report.plus_minus([float(peak(one)[0]) for one in found.values()], digits=0))
    last = {s: max(curve(one)) for s, one in found.items()}
    row.append(
      ", ".join(
        f"{np.mean([spent(found[s], last[s], what) for s in seeds]):.2e}"
        for what in ("decode", "total")
      )
    )
    for what in ("decode", "total", "steps"):
      row.append(report.plus_minus(list(ratios(results, arm, what).values()), digits=2))
    for name in ("error_whole", "ready"):
      row.append(
        report.plus_minus([x for one in found.values() if (x := late(one, name)) is not None])
      )
    rows.append([*row, str(PUBLISHED[arm])])
  return report.markdown(head, rows) if rows else ""


def _differences(results: Results) -> str:
  lines = []
  for arm in ("prefix_grpo", "no_readiness", "short_chunks"):
    both = [s for s in SEEDS if ("ac2", s) in results and (arm, s) in results]
    pairs = {
      s: mean_at_equal_cost(results["ac2", s]["result"], results[arm, s]["result"]) for s in both
    }
    if len(both) > 1:
      one, two = ({s: p[i] for s, p in pairs.items()} for i in (0, 1))
      lines.append(f"AC2 minus {NAMES[arm]} at equal decoding FLOPs: {report.paired(one, two)}.")
  ours = [one for arm in ("ac2", "no_readiness", "short_chunks") for one in _of(results, arm)]
  errors = [(late(one, "error_aided"), late(one, "error_unaided")) for one in ours]
  known = [(a, b) for a, b in errors if a is not None and b is not None]
  if len(known) > 1:
    one, two = ({i: pair[k] for i, pair in enumerate(known)} for k in (1, 0))
    gain = report.paired(one, two)
    lines.append(
      f"Critic MAE of solved problems: {report.plus_minus([a for a, _ in known])} with the "
      f"reference, {report.plus_minus([b for _, b in known])} without; less by {gain} "
      f"({len(known)} runs)."
    )
  return "\n".join(lines) + "\n" if lines else ""


def _critic(results: Results) -> str:
  """What it says of states at the end, with the reference: it is to tell right from wrong."""
  found = _of(results, CRITIC)
  if not found:
    return ""
  names = list(found[0]["aided"])
  rows = []
  for name in names:
    row = [name, str(sum(one["aided"].get(name, {"count": 0})["count"] for one in found))]
    for said in ("aided", "unaided"):
      for what in ("mean", "zero"):
        row.append(report.plus_minus([one[said][name][what] for one in found if name in one[said]]))
    rows.append(row)
  head = [f"AC2's critic at the end ({len(found)} seeds), states", "count", "mean, reference"]
  head += ["says 0", "mean, no reference", "says 0"]
  return report.markdown(head, rows)


def _probe(results: Results) -> str:
  found = _of(results, PROBE)
  if not found:
    return ""
  text = f"Without training ({len(found)} draws): correlation with exact advantages is "
  text += f"{report.plus_minus([one['whole'] for one in found])} from outcomes of whole responses "
  crossings = [one["crossing"] for one in found if one["crossing"] is not None]
  text += "and falls below that of a noisy critic's values when the noise is "
  text += f"{report.plus_minus(crossings, digits=2)} of the spread of the values; outcomes are as "
  return (
    text + f"noisy as {report.plus_minus([one['outcome_noise'] for one in found], digits=2)}.\n"
  )


if __name__ == "__main__":
  report.main("ac2", table, verdict)
