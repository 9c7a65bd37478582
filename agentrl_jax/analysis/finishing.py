"""What RL changed: the model finishes more, is right more often, or reaches further.

A problem's pass@1 is f * c: f the chance to finish within the token budget, c the chance to be
right once finished. The change splits exactly into a part through f (finishing) and a part
through c; the latter is *reliability* on problems that the base has solved at least once and
*reach* on the others. Reach needs a null, since a base that is sampled again also "solves"
problems it missed the first time.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from agentrl_jax.analysis.intervals import Interval, bootstrap_means, percentile, wilson
from agentrl_jax.analysis.samples import Samples, cut

TRUNCATION_THAT_COUNTS = 0.05  # a share of finishing is asked only where the base hits its budget
CHANGE_THAT_COUNTS = 0.01  # and only where pass@1 changed by more than a point


class Counts(NamedTuple):
  """Samples, finished and successful samples of each problem; leading axes are free."""

  samples: Int[np.ndarray, "*N P"]
  finished: Int[np.ndarray, "*N P"]
  success: Int[np.ndarray, "*N P"]


class Parts(NamedTuple):
  """The split of each problem's change in pass@1: change = finishing + reliability + reach."""

  finishing: Float[np.ndarray, "*N P"]
  reliability: Float[np.ndarray, "*N P"]
  reach: Float[np.ndarray, "*N P"]


@dataclasses.dataclass(frozen=True)
class Split:
  """One base and RL model on one set of P problems; all arrays are per problem."""

  problems: tuple[str, ...]
  base: Counts
  rl: Counts
  solved: Bool[np.ndarray, " P"]  # by the base at least once, at the budget or at an extended one
  parts: Parts  # symmetric in the order of the two changes
  finishing_first: Parts  # one-sided: finishing valued at the base's accuracy
  accuracy_first: Parts  # one-sided: finishing valued at the RL model's accuracy
  undefined_as_zero: (
    Parts  # sensitivity: c = 0 where nothing finished, in place of the other model's c
  )
  null_split_half: Float[np.ndarray, " P"]  # reach of one half of the base's samples over the other
  null_posterior: Float[np.ndarray, " P"]  # expected missed mass under a Beta(1/2, 1/2) prior
  unfinished_correct: tuple[int, int]  # base and RL samples that were right without finishing

  @property
  def change(self) -> Float[np.ndarray, " P"]:
    """Change in pass@1."""
    return _rate(self.rl.success, self.rl.samples) - _rate(self.base.success, self.base.samples)

  @property
  def base_truncation(self) -> float:
    """Mean over problems of the base's unfinished share."""
    return float(1 - _rate(self.base.finished, self.base.samples).mean())

  @property
  def reached(self) -> tuple[str, ...]:
    """The problems credited to reach."""
    return tuple(
      name for name, part in zip(self.problems, self.parts.reach, strict=True) if part > 0
    )


def decompose(
  samples_base: Samples,
  samples_rl: Samples,
  extended_base: Samples | None = None,
  *,
  halvings: int = 200,
  seed: int = 0,
) -> Split:
  """Splits the change in pass@1 into finishing, reliability and reach, problem by problem.

  Args:
    samples_base, samples_rl: samples of both models at the same budget, on the same problems.
    extended_base: samples of the base at a larger budget. A problem solved there counts as
    solved, so that
      a token limit does not pass for reach. Its other rates are not read.
    halvings: random halvings of the base's samples behind the split-half null.
    seed: of those halvings.

  Raises:
    ValueError: naming the problem, when the sets of problems differ or the base has fewer than 2
    samples.
  """
  for other in (samples_rl, extended_base):
    if other is not None and other.problems != samples_base.problems:
      odd = sorted(set(other.problems) ^ set(samples_base.problems))[0]
      raise ValueError(f"problem {odd!r} is not in both tables; split the same problems")
  base, rl = Counts(*samples_base.counts()), Counts(*samples_rl.counts())
  if base.samples.min() < 2:
    odd = samples_base.problems[int(base.samples.argmin())]
    raise ValueError(f"problem {odd!r} has 1 base sample, expected at least 2")
  extended = Counts(*extended_base.counts()) if extended_base is not None else None
  solved = base.success > 0
  if extended is not None:
    solved |= extended.success > 0
  symmetric, finishing_first, accuracy_first = _orders(base, rl, solved)
  return Split(
    problems=samples_base.problems,
    base=base,
    rl=rl,
    solved=solved,
    parts=symmetric,
    finishing_first=finishing_first,
    accuracy_first=accuracy_first,
    undefined_as_zero=_orders(base, rl, solved, undefined_as_zero=True)[0],
    null_split_half=_split_half(base, extended, halvings, np.random.default_rng(seed)),
    null_posterior=_missed_mass(base, extended, solved),
    unfinished_correct=(_unfinished_correct(samples_base), _unfinished_correct(samples_rl)),
  )


def sweep(
  samples_base: Samples,
  samples_rl: Samples,
  budgets: Sequence[int],
  extended_base: Samples | None = None,
) -> dict[int, Split]:
  """The split at each token budget, from samples drawn at the largest one.

  A shorter budget is what the same samples would have shown had they been stopped there.
  `extended_base` are other samples, as the null counts them as further tries.
  """
  return {
    budget: decompose(cut(samples_base, budget), cut(samples_rl, budget), extended_base)
    for budget in budgets
  }


def _unfinished_correct(samples: Samples) -> int:
  return int((samples.correct & ~samples.finished).sum())


def _rate(part: Int[np.ndarray, "*N"], whole: Int[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
  """part / whole, zero where whole is zero."""
  return np.divide(part, whole, out=np.zeros(np.shape(part)), where=whole > 0)


def _orders(
  base: Counts, rl: Counts, solved: Bool[np.ndarray, "*N P"], *, undefined_as_zero: bool = False
) -> tuple[Parts, Parts, Parts]:
  """The symmetric split and its two one-sided orders (finishing first, accuracy first).

  Where a model finished nothing its accuracy is unknown: it takes the other model's, so that all
  change goes to finishing; with none finished on either side every part is 0.
  """
  f_base, f_rl = _rate(base.finished, base.samples), _rate(rl.finished, rl.samples)
  c_base, c_rl = _rate(base.success, base.finished), _rate(rl.success, rl.finished)
  if not undefined_as_zero:
    c_base, c_rl = (
      np.where(base.finished > 0, c_base, c_rl),
      np.where(rl.finished > 0, c_rl, c_base),
    )

  def split(c: Float[np.ndarray, "*N P"], f: Float[np.ndarray, "*N P"]) -> Parts:
    finishing, accuracy = (f_rl - f_base) * c, (c_rl - c_base) * f
    return Parts(finishing, np.where(solved, accuracy, 0.0), np.where(solved, 0.0, accuracy))

  return split((c_base + c_rl) / 2, (f_base + f_rl) / 2), split(c_base, f_rl), split(c_rl, f_base)


def _split_half(
  base: Counts, extended: Counts | None, halvings: int, rng: np.random.Generator
) -> Float[np.ndarray, " P"]:
  """Mean reach when half of the base's samples play the base and the others play the RL model.

  Conservative: half as many samples define "solved" as in the real split. A random half has
  hypergeometric counts, drawn directly.
  """
  shape = (halvings, len(base.samples))
  half = base.samples // 2
  success = rng.hypergeometric(base.success, base.samples - base.success, half, size=shape)
  wrong = rng.hypergeometric(
    np.broadcast_to(base.finished - base.success, shape),
    np.broadcast_to(base.samples - base.finished, shape),
    half - success,
  )
  one = Counts(np.broadcast_to(half, shape), success + wrong, success)
  two = Counts(
    *(np.broadcast_to(whole, shape) - part for whole, part in zip(base, one, strict=True))
  )
  solved = success > 0
  if extended is not None:
    solved |= extended.success > 0
  return _orders(one, two, solved)[0].reach.mean(axis=0)


def _missed_mass(
  base: Counts, extended: Counts | None, solved: Bool[np.ndarray, " P"]
) -> Float[np.ndarray, " P"]:
  """Posterior mean success rate, (1/2) / (N + 1), of problems the base missed in all N samples.

  Samples at the extended budget count as tries. Problems on which the base finished nothing have no
  reach by the rule for undefined accuracy, so they have no null either.
  """
  tries = base.samples + (extended.samples if extended is not None else 0)
  return np.where(solved | (base.finished == 0), 0.0, 0.5 / (tries + 1))


@dataclasses.dataclass(frozen=True)
class Summary:
  """Means over problems (and model pairs) in units of pass@1, with 95% intervals."""

  rows: dict[str, Interval]
  share: Interval | None  # of finishing; None where it is not to be quoted
  share_reason: str  # why it is None, else empty
  problems: int

  def __getitem__(self, name: str) -> Interval:
    return self.rows[name]


def summarize(*splits: Split, resamples: int = 2000, seed: int = 0) -> Summary:
  """Means and bootstrap intervals of one split, or of several model pairs pooled with equal weight.

  The share of finishing is the sum of finishing over the sum of changes, on the splits whose base
  leaves more than 5% unfinished; it is withheld where that change is within a point of zero, as a
  ratio with a denominator near zero says nothing.
  """
  if not splits:
    raise ValueError("no splits to summarize")
  quoted = [split.base_truncation > TRUNCATION_THAT_COUNTS for split in splits]
  tables = [_columns(split, counts) for split, counts in zip(splits, quoted, strict=True)]
  names = list(tables[0])
  values = [np.stack([table[name] for name in names], axis=1) for table in tables]
  estimates = dict(zip(names, np.mean([v.mean(axis=0) for v in values], axis=0), strict=True))
  drawn = bootstrap_means(values, resamples=resamples, seed=seed)
  resampled = dict(zip(names, drawn.T, strict=True))
  rows = {name: percentile(estimates[name], resampled[name]) for name in names if name[0] != "_"}
  share, reason = None, ""
  if not any(quoted):
    reason = f"the base leaves at most {TRUNCATION_THAT_COUNTS:.0%} unfinished"
  elif abs(estimates["_change"]) * len(splits) <= CHANGE_THAT_COUNTS * sum(quoted):
    reason = f"pass@1 changed by at most {CHANGE_THAT_COUNTS:.0%}"
  else:
    denominator = resampled["_change"]
    ratio = resampled["_finishing"] / np.where(denominator == 0, np.nan, denominator)
    share = percentile(estimates["_finishing"] / estimates["_change"], ratio[np.isfinite(ratio)])
  return Summary(rows, share, reason, sum(len(split.problems) for split in splits))


def _columns(split: Split, quoted: bool) -> dict[str, Float[np.ndarray, " P"]]:
  """Everything whose mean is reported; names with an underscore are the share's two sums."""
  parts, one, two = split.parts, split.finishing_first, split.accuracy_first
  return {
    "pass@1 base": _rate(split.base.success, split.base.samples),
    "pass@1 rl": _rate(split.rl.success, split.rl.samples),
    "change": split.change,
    "finishing": parts.finishing,
    "reliability": parts.reliability,
    "reach": parts.reach,
    "null reach, split half": split.null_split_half,
    "null reach, posterior": split.null_posterior,
    "net reach, split half": parts.reach - split.null_split_half,
    "net reach, posterior": parts.reach - split.null_posterior,
    "finished base": _rate(split.base.finished, split.base.samples),
    "finished rl": _rate(split.rl.finished, split.rl.samples),
    "finishing, finishing first": one.finishing,
    "finishing, accuracy first": two.finishing,
    "finishing, undefined as zero": split.undefined_as_zero.finishing,
    "_change": split.change * quoted,
    "_finishing": parts.finishing * quoted,
  }


@dataclasses.dataclass(frozen=True)
class Survival:
  """Which of the problems credited to reach stand up to fresh samples of both models."""

  credited: tuple[str, ...]
  survived: tuple[str, ...]
  share: Interval  # Wilson


def survival(
  split: Split,
  fresh_base: Samples,
  fresh_rl: Samples,
  *,
  least: int = 8,
  wrong_keys: Collection[str] = (),
) -> Survival:
  """Resamples the credit for reach: the RL model must succeed `least` times and the base never.

  Args:
    fresh_base, fresh_rl: new samples that hold at least the problems of `split.reached`.
    wrong_keys: problems whose answer key did not stand up to review; they do not survive.
  """
  credited = split.reached
  survived = []
  if credited:
    base, rl = fresh_base.only(credited).counts()[2], fresh_rl.only(credited).counts()[2]
    for name, base_success, rl_success in zip(credited, base, rl, strict=True):
      if base_success == 0 and rl_success >= least and name not in wrong_keys:
        survived.append(name)
  return Survival(credited, tuple(survived), wilson(len(survived), len(credited)))


def write_table(rows: Sequence[tuple[str, str, str, Summary, Survival | None]]) -> str:
  """A Markdown table of (pair, set, budget, summary, survival); points of pass@1, but shares."""
  head = (
    "pair", "set", "budget", "pass@1 base", "pass@1 RL", "change", "finishing", "reliability",
    "reach", "null reach", "net reach", "share of finishing", "survival",
  )  # fmt: skip
  lines = [head, ("---",) * len(head)]
  for pair, problem_set, budget, summary, survived in rows:
    parts = ("change", "finishing", "reliability", "reach", "null reach, split half")
    lines.append((
      pair, problem_set, budget,
      f"{100 * summary['pass@1 base'].estimate:.1f}", f"{100 * summary['pass@1 rl'].estimate:.1f}",
      *(_points(summary[name]) for name in parts),
      _points(summary["net reach, split half"]),
      _percent(summary.share) if summary.share else f"not quoted: {summary.share_reason}",
      _percent(survived.share) if survived and survived.credited else "-",
    ))  # fmt: skip
  return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _points(value: Interval) -> str:
  return f"{100 * value.estimate:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


def _percent(value: Interval) -> str:
  return f"{value.estimate:.0%} [{value.low:.0%}, {value.high:.0%}]"
