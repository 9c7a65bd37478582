"""The split of pass@1: exactness, signs, edge rules, nulls and planted worlds."""

import dataclasses
import importlib.util
import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.analysis import finishing
from agentrl_jax.analysis.samples import Samples, cut, table

_path = pathlib.Path(__file__).parents[1] / "reference" / "finishing.py"
_spec = importlib.util.spec_from_file_location("reference_finishing", _path)
assert _spec and _spec.loader
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def make(world: dict[str, list[tuple[bool, bool]]], model: str = "m") -> Samples:
  """A table from problem -> [(finished, correct)]."""
  return table(
    {
      "problem": name, "sample": i, "finished": done, "correct": right, "tokens": 5, "model": model
    }
    for name, samples in world.items()
    for i, (done, right) in enumerate(samples)
  )  # fmt: skip


def repeat(samples: int, finished: int, success: int) -> list[tuple[bool, bool]]:
  """`success` right and finished samples, then finished wrong ones, then unfinished ones."""
  return [(i < finished, i < success) for i in range(samples)]


def simulate(f, c, samples: int, rng: np.random.Generator) -> Samples:
  """Independent samples with finishing rate f[i] and accuracy c[i] on problem i."""
  shape = (len(f), samples)
  finished = rng.random(shape) < np.asarray(f)[:, None]
  return Samples(
    problems=tuple(f"{i:05d}" for i in range(len(f))),
    problem=np.repeat(np.arange(len(f)), samples),
    finished=finished.ravel(),
    correct=(finished & (rng.random(shape) < np.asarray(c)[:, None])).ravel(),
    tokens=np.full(len(f) * samples, 5),
  )


pairs = st.tuples(st.booleans(), st.booleans())
worlds = st.integers(1, 5).flatmap(
  lambda p: st.tuples(
    *[st.lists(st.lists(pairs, min_size=2, max_size=6), min_size=p, max_size=p) for _ in range(3)]
  )
)


def tables(lists) -> Samples:
  return make({f"p{i}": samples for i, samples in enumerate(lists)})


@settings(deadline=None)
@given(worlds)
def test_parts_equal_the_looping_reference_and_sum_to_the_change(world):
  base, rl, extended = world
  split = finishing.decompose(tables(base), tables(rl), tables(extended), halvings=2)
  expected = [reference.split_problem(*problem) for problem in zip(base, rl, extended, strict=True)]
  np.testing.assert_allclose(np.stack(split.parts, axis=1), expected, atol=1e-12)
  total = sum(split.parts)
  np.testing.assert_allclose(total, split.change, atol=1e-12)
  for one_sided in (split.finishing_first, split.accuracy_first):
    np.testing.assert_allclose(sum(one_sided), split.change, atol=1e-12)


@settings(deadline=None)
@given(worlds)
def test_one_sided_orders_bracket_the_symmetric_split(world):
  base, rl, _ = world
  split = finishing.decompose(tables(base), tables(rl), halvings=2)
  for name in finishing.Parts._fields:
    one, two = getattr(split.finishing_first, name), getattr(split.accuracy_first, name)
    middle = getattr(split.parts, name)
    assert np.all(np.minimum(one, two) - 1e-12 <= middle)
    assert np.all(middle <= np.maximum(one, two) + 1e-12)


@settings(deadline=None)
@given(worlds)
def test_swapping_the_models_flips_every_sign(world):
  """With both models' samples in the extended table, "solved" is the same either way round."""
  base, rl, _ = world
  both = tables([b + r for b, r in zip(base, rl, strict=True)])
  there = finishing.decompose(tables(base), tables(rl), both, halvings=2)
  back = finishing.decompose(tables(rl), tables(base), both, halvings=2)
  for name in finishing.Parts._fields:
    np.testing.assert_allclose(getattr(there.parts, name), -getattr(back.parts, name), atol=1e-12)


def test_identical_tables_have_no_parts():
  one = tables([repeat(4, 3, 1), repeat(4, 0, 0)])
  split = finishing.decompose(one, one)
  assert all(not part.any() for part in split.parts)


def test_all_finished_means_no_finishing_part():
  split = finishing.decompose(
    tables([repeat(4, 4, 1), repeat(4, 4, 0)]), tables([repeat(4, 4, 3), repeat(4, 4, 2)])
  )
  assert not split.parts.finishing.any()
  np.testing.assert_allclose(split.parts.reliability, [0.5, 0])
  np.testing.assert_allclose(split.parts.reach, [0, 0.5])


def test_hand_worked_problem():
  # f: 2/4 -> 4/4, c: 1/2 -> 3/4. Finishing (1/2)(5/4)/2 = 5/16, accuracy (1/4)(3/2)/2 = 3/16,
  # sum 1/2 = 3/4 - 1/4. Finishing first: (1/2)(1/2) = 1/4; accuracy first: (1/2)(3/4) = 3/8.
  split = finishing.decompose(tables([repeat(4, 2, 1)]), tables([repeat(4, 4, 3)]))
  assert split.parts.finishing.item() == 5 / 16
  assert split.parts.reliability.item() == 3 / 16
  assert split.finishing_first.finishing.item() == 1 / 4
  assert split.accuracy_first.finishing.item() == 3 / 8


def test_appending_truncated_samples_changes_f_only():
  base, rl = [repeat(4, 2, 1)], [repeat(4, 4, 3)]
  longer = [rl[0] + [(False, False)] * 4]
  split = finishing.decompose(tables(base), tables(longer))
  # c stays 1/2 and 3/4, f is now 4/8 as the base's: nothing is left of finishing.
  assert split.parts.finishing.item() == 0
  assert split.parts.reliability.item() == pytest.approx((3 / 4 - 1 / 2) * 1 / 2)


@pytest.mark.parametrize(
  ("base", "rl", "parts", "undefined_as_zero"),
  [
    ((4, 0, 0), (4, 4, 2), (0.5, 0, 0), 0.25),  # base finished nothing: takes c = 1/2
    ((4, 4, 2), (4, 0, 0), (-0.5, 0, 0), -0.25),  # RL finished nothing
    ((4, 0, 0), (4, 0, 0), (0, 0, 0), 0),  # neither finished
    ((4, 2, 2), (4, 2, 1), (0, -0.25, 0), 0),  # both did
  ],
)
def test_undefined_accuracy(base, rl, parts, undefined_as_zero):
  split = finishing.decompose(tables([repeat(*base)]), tables([repeat(*rl)]))
  assert tuple(part.item() for part in split.parts) == parts
  assert split.undefined_as_zero.finishing.item() == undefined_as_zero


def test_an_extended_budget_moves_reach_into_reliability():
  base, rl = tables([repeat(4, 4, 0)]), tables([repeat(4, 4, 4)])
  assert finishing.decompose(base, rl).parts.reach.item() == 1
  extended = finishing.decompose(base, rl, tables([repeat(4, 4, 1)]))
  assert (extended.parts.reach.item(), extended.parts.reliability.item()) == (0, 1)
  assert extended.null_posterior.item() == 0


def test_right_but_unfinished_is_counted_apart_and_never_a_success():
  base = tables([[(False, True), (False, True), (True, True)]])
  split = finishing.decompose(base, base)
  assert split.unfinished_correct == (2, 2)
  assert split.base.success.item() == 1


def test_a_larger_budget_for_both_sends_finishing_to_zero():
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 60, size=4000)
  base = dataclasses.replace(simulate([1] * 100, [0.5] * 100, 40, rng), tokens=tokens)
  rl = dataclasses.replace(simulate([1] * 100, [0.5] * 100, 40, rng), tokens=tokens // 3)
  tight = finishing.decompose(cut(base, 30), cut(rl, 30))
  loose = finishing.decompose(cut(base, 60), cut(rl, 60))
  assert tight.parts.finishing.mean() > 0.2
  assert not loose.parts.finishing.any()


def test_a_sweep_cuts_the_same_samples():
  """One problem: the base is right after 50 tokens only, the RL model after 10."""
  base = dataclasses.replace(tables([repeat(4, 4, 4)]), tokens=np.full(4, 50))
  rl = dataclasses.replace(base, tokens=np.full(4, 10))
  found = finishing.sweep(base, rl, (20, 60))
  # At 20 tokens the base finishes nothing, so all the change is finishing; at 60 there is none.
  assert [part.item() for part in found[20].parts] == [1, 0, 0]
  assert [part.item() for part in found[60].parts] == [0, 0, 0]
  # One wrong answer in 4 comes within 20 tokens: f 1/4 -> 1, c 0 -> 1, finishing (3/4)(1/2),
  # accuracy 1 (5/8): reach, unless the base has solved it at an extended budget.
  wrong = dataclasses.replace(
    tables([[(True, False), *[(True, True)] * 3]]), tokens=np.array([10, 50, 50, 50])
  )
  parts = finishing.sweep(wrong, rl, (20, 60))[20].parts
  assert [part.item() for part in parts] == [3 / 8, 0, 5 / 8]
  parts = finishing.sweep(wrong, rl, (20, 60), extended_base=base)[20].parts
  assert [part.item() for part in parts] == [3 / 8, 5 / 8, 0]


def test_split_half_null_equals_the_reach_of_a_base_over_itself():
  """Halves of 2N samples against two independent tables of N."""
  rng = np.random.default_rng(1)
  f, c = rng.uniform(0.3, 1, 3000), rng.beta(0.3, 3, 3000)
  reach = finishing.decompose(
    simulate(f, c, 8, rng), simulate(f, c, 8, rng), halvings=1
  ).parts.reach
  null = finishing.decompose(simulate(f, c, 16, rng), simulate(f, c, 8, rng)).null_split_half
  error = math.hypot(reach.std(), null.std()) / math.sqrt(3000)
  assert abs(reach.mean() - null.mean()) < 3 * error
  assert reach.mean() > 5 * error  # a null that is not zero


def test_posterior_null_equals_the_mass_missed_under_its_prior():
  """All samples finish and p ~ Beta(1/2, 1/2): expected reach of the base over itself."""
  rng = np.random.default_rng(2)
  problems = 6000
  p = rng.beta(0.5, 0.5, problems)
  split = finishing.decompose(
    simulate(np.ones(problems), p, 6, rng), simulate(np.ones(problems), p, 6, rng), halvings=1
  )
  error = math.hypot(split.parts.reach.std(), split.null_posterior.std()) / math.sqrt(problems)
  assert abs(split.parts.reach.mean() - split.null_posterior.mean()) < 3 * error


def test_posterior_null_on_hand_values():
  base = tables([repeat(3, 3, 0), repeat(3, 0, 0), repeat(3, 3, 1)])
  assert finishing.decompose(base, base).null_posterior.tolist() == [0.5 / 4, 0, 0]
  extended = tables([repeat(4, 4, 0)] * 3)
  assert finishing.decompose(base, base, extended).null_posterior.tolist() == [0.5 / 8, 0, 0]


def test_planted_reach_of_five_points_is_recovered():
  """Base f = .7, c = .4 or 0; RL f = .9, c = .4, and .5 on a ninth of the hopeless problems."""
  rng = np.random.default_rng(3)
  problems, samples = 1800, 32
  hopeless = np.arange(problems) % 2 == 1
  reached = hopeless & (np.arange(problems) % 9 < 2)  # 1 in 9 of all
  c_base = np.where(hopeless, 0.0, 0.6)
  c_rl = np.where(reached, 0.5625, c_base)
  base = simulate(np.full(problems, 0.7), c_base, samples, rng)
  rl = simulate(np.full(problems, 0.9), c_rl, samples, rng)
  split = finishing.decompose(base, rl, halvings=20)
  # finishing .2 (c_b + c_r)/2, reach (c_r - c_b) .8, by the definition.
  expected_finishing = (0.2 * (c_base + c_rl) / 2).mean()
  expected_reach = ((c_rl - c_base) * 0.8).mean()
  assert expected_reach == pytest.approx(0.05)
  for part, expected in (
    (split.parts.finishing, expected_finishing),
    (split.parts.reliability, 0.0),
    (split.parts.reach, expected_reach),
  ):
    # Problems are a fixed set here, so the spread that counts is within problems: bound it by the
    # binomial error of 32 samples.
    error = math.sqrt(2 * 0.25 / samples / problems)
    assert abs(part.mean() - expected) < 3 * error
  summary = finishing.summarize(split, resamples=300)
  assert summary["reach"].low < 0.05 < summary["reach"].high
  assert summary["net reach, split half"].estimate == pytest.approx(0.05, abs=0.01)


def test_bootstrap_resamples_problems():
  """Two problems without sampling noise: draws of whole problems give means 0, 1/2 or 1 only."""
  split = finishing.decompose(
    tables([repeat(4, 4, 1), repeat(4, 4, 0)]), tables([repeat(4, 4, 1), repeat(4, 4, 4)])
  )
  summary = finishing.summarize(split, resamples=500)
  assert summary["reach"] == (0.5, 0.0, 1.0)
  assert summary["reliability"] == (0, 0, 0)


def test_share_is_quoted_only_where_it_means_something():
  truncated, whole = tables([repeat(4, 2, 2)] * 3), tables([repeat(4, 4, 4)] * 3)
  quoted = finishing.summarize(finishing.decompose(truncated, whole), resamples=50)
  assert quoted.share == (1, 1, 1)
  unchanged = finishing.summarize(finishing.decompose(truncated, truncated), resamples=50)
  assert unchanged.share is None
  assert "changed" in unchanged.share_reason
  all_done = finishing.decompose(tables([repeat(4, 4, 1)] * 3), whole)
  assert finishing.summarize(all_done, resamples=50).share is None
  # Pooled, the share reads the truncating pair alone, whatever the other pair did.
  pooled = finishing.summarize(finishing.decompose(truncated, whole), all_done, resamples=50)
  assert pooled.share is not None and pooled.share.estimate == 1
  assert pooled["change"].estimate == pytest.approx((0.5 + 0.75) / 2)


def test_base_against_base_is_within_noise():
  rng = np.random.default_rng(4)
  f, c = rng.uniform(0.4, 0.9, 200), rng.beta(1, 2, 200)
  split = finishing.decompose(simulate(f, c, 32, rng), simulate(f, c, 32, rng), halvings=50)
  summary = finishing.summarize(split, resamples=500)
  for name in ("change", "finishing", "reliability"):
    assert summary[name].low < 0 < summary[name].high
  assert summary["net reach, split half"].estimate < 0.005
  assert summary.share is None


def test_survival_asks_fresh_samples_and_the_answer_key():
  base = tables([repeat(2, 2, 0)] * 4)
  split = finishing.decompose(base, tables([repeat(2, 2, 1)] * 4))
  assert split.reached == ("p0", "p1", "p2", "p3")
  fresh_base = tables([repeat(8, 8, 0), repeat(8, 8, 1), repeat(8, 8, 0), repeat(8, 8, 0)])
  fresh_rl = tables([repeat(8, 8, 3), repeat(8, 8, 8), repeat(8, 8, 2), repeat(8, 8, 8)])
  found = finishing.survival(split, fresh_base, fresh_rl, least=3, wrong_keys={"p3"})
  assert found.survived == ("p0",)
  assert found.share.estimate == 1 / 4
  none = finishing.survival(finishing.decompose(base, base), fresh_base, fresh_rl)
  assert none.credited == () and math.isnan(none.share.estimate)


def test_different_problems_are_refused_by_name():
  with pytest.raises(ValueError, match="'p1' is not in both"):
    finishing.decompose(tables([repeat(2, 2, 1)]), tables([repeat(2, 2, 1)] * 2))
  with pytest.raises(ValueError, match="'p0' has 1 base sample"):
    finishing.decompose(tables([repeat(1, 1, 1)]), tables([repeat(2, 2, 1)]))


def test_table_has_the_columns_of_the_study():
  split = finishing.decompose(tables([repeat(4, 2, 1)] * 2), tables([repeat(4, 4, 3)] * 2))
  summary = finishing.summarize(split, resamples=50)
  text = finishing.write_table([("small", "maths", "30", summary, None)])
  row = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
  assert row[:6] == ["small", "maths", "30", "25.0", "75.0", "+50.0 [+50.0, +50.0]"]
  assert row[6] == "+31.2 [+31.2, +31.2]"
  assert row[-2:] == ["62% [62%, 62%]", "-"]


def test_summary_is_plain_numbers():
  split = finishing.decompose(tables([repeat(4, 2, 1)]), tables([repeat(4, 4, 3)]))
  assert json.loads(json.dumps(finishing.summarize(split, resamples=10).rows))["change"][0] == 0.5
