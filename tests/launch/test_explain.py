"""What `launch.explain` prints and draws is what the functions are."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from agentrl_jax.losses import recipes
from agentrl_jax.losses.advantages import whiten
from agentrl_jax.losses.corrections import truncated_is
from agentrl_jax.losses.describe import describe
from agentrl_jax.losses.values import categorical_value_loss
from agentrl_jax.losses.weights import mean_over
from agentrl_jax.ops.scales import TOKEN, scored
from agentrl_jax.types import Credit
from launch.explain import algorithms, credit, explanation, picture, small_batch

ALL = algorithms(["all"])


def parts(algorithm):
  return {part.role: str(part).strip() for part in describe(algorithm)}


def test_slots_and_numbers_are_read_off():
  found = parts(recipes.grpo(low=0.1, high=0.3, kl=0.01))
  assert found["surrogate"] == "surrogate: clip(dual=None, high=0.3, low=0.1)"
  assert found["ratio"] == "ratio: per_token()"
  assert found["scale"] == "scale: by_std(eps=1e-06)"
  assert found["weight"] == "weight: mean_over(scale=TOKEN)"
  assert found["penalties"] == "penalties: kl_to_ref(coef=0.01)"


def test_a_controlled_clip_shows_the_loss_at_its_start():
  lines = [str(part).strip() for part in describe(recipes.ac2(low=0.1, start=0.3))]
  assert "at_start: policy_loss(penalties=())" in lines
  assert "surrogate: clip(dual=3, high=0.3, low=0.1)" in lines


def test_wrapped_weights_nest():
  wrapped = recipes.grpo()._replace(weight=truncated_is(mean_over(TOKEN), cap=1.5))
  lines = [str(part) for part in describe(wrapped)]
  start = lines.index("weight: truncated_is(cap=1.5, low=0)")
  assert "  base: mean_over(scale=TOKEN)" in lines[start:]


@pytest.mark.parametrize("name", list(ALL))
def test_every_recipe_explains_itself(name):
  described = describe(ALL[name])
  assert {part.role for part in described if part.depth == 0} == {"advantage", "weight", "loss"}
  assert all(part.formula for part in described if "lambda" not in part.name)
  text = explanation(name, ALL[name]).plain
  assert name in text and all(need in text for need in ALL[name].needs)


def test_the_picture_of_the_docs_shows_every_recipe():
  """`python docs/draw_losses.py` draws it anew and writes its rows beside the pixels."""
  drawn = pathlib.Path(__file__).parents[2] / "docs" / "images" / "credit.png"
  with Image.open(drawn) as image:
    assert set(ALL) - set(image.info["Description"].splitlines()) == set()


def doubled(batch, aux, *, factor=2.0):
  """Twice the mask."""
  return Credit(factor * scored(batch).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Steady:
  """The mask itself."""

  factor: float = 1.0

  def __call__(self, batch, aux):
    return doubled(batch, aux, factor=self.factor)


def looked_up(table):
  """A number out of a table."""
  return lambda batch, aux: doubled(batch, aux, factor=table[0])


@pytest.mark.parametrize(
  ("advantage", "line", "formula"),
  [
    (doubled, "doubled()", "Twice the mask."),
    (jax.jit(doubled), "doubled()", "Twice the mask."),
    (functools.partial(doubled, factor=3.0), "doubled(factor=3)", "Twice the mask."),
    (Steady(0.5), "Steady(factor=0.5)", "The mask itself."),
    (looked_up(jnp.ones(100)), "looked_up(table=float32[100])", "A number out of a table."),
  ],
  ids=["plain", "jitted", "partial", "object", "array"],
)
def test_functions_of_any_make_explain_themselves(advantage, line, formula):
  own = recipes.grpo()._replace(advantage=advantage)
  first = describe(own)[0]
  assert (str(first), first.formula) == (f"advantage: {line}", formula)
  inside = describe(own._replace(advantage=whiten(advantage, TOKEN)))[1]
  assert str(inside) == f"  base: {line}"


def test_a_categorical_critic_is_drawn_and_a_forgotten_need_is_told():
  bins = categorical_value_loss(-1.0, 1.0)
  scalar, categorical = recipes.ppo(), recipes.ppo(critic=bins)
  for ours, theirs in zip(credit(categorical), credit(scalar), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  with pytest.raises(ValueError, match="this advantage needs value: name it in"):
    credit(scalar._replace(needs=frozenset()))


def test_unknown_recipes_are_named():
  with pytest.raises(ValueError, match="no recipe is called grppo; there are grpo, "):
    algorithms(["grppo"])


def test_the_picture_shows_each_scale():
  """On the small batch: one number an episode, one a turn, or one a token."""
  batch, _, _ = small_batch()
  turn, traj = np.asarray(batch.turn), np.asarray(batch.traj)

  def distinct(name, label):
    a = credit(ALL[name])[0]
    return max(len(np.unique(a[label == k].round(5))) for k in np.unique(label[turn >= 0]))

  acted = np.where(turn >= 0, traj, -1)
  assert distinct("grpo", acted) == 1
  assert distinct("turn_ppo", turn) == 1 < distinct("turn_ppo", acted)
  assert distinct("ppo", turn) > 1
  figure = picture({name: ALL[name] for name in ("grpo", "turn_ppo")})
  assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["grpo", "turn_ppo"]
