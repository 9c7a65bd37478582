"""The reference policy of a run: its own start, or a teacher of another size that reads the same
ids.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.learner.evaluate import make_evaluate
from agentrl_jax.losses import recipes
from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.sharding import make_mesh
from agentrl_jax.orchestrate import tiny
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.reference import open_reference
from agentrl_jax.rollout.episode import Limits
from tests.learner.toy import random_batch

SYMBOLS = [f"<{i}>" for i in range(30)]
SMALL = {"embed": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffw": 12, "max_position": 64}


def experiment(**change) -> Experiment:
  nothing = dict(
    tasks=None, optimizer=None, engine=None, steps=4, algorithm=recipes.opd(),
    limits=Limits(turn_tokens=8, context_tokens=64),
  )  # fmt: skip
  return Experiment(**(nothing | change))


def log_probs(directory, batch, mesh):
  model = load_model(directory)
  weights = load_weights(model, directory, dtype=jnp.float32)
  return make_evaluate(model, mesh, rows=1)(weights, batch).logp


def test_a_teacher_of_another_size_says_its_own_log_probs(tmp_path):
  student, teacher = tmp_path / "student", tmp_path / "teacher"
  tiny.symbol_llama(SYMBOLS, **SMALL)(student)
  tiny.symbol_llama(SYMBOLS, **SMALL | {"layers": 2, "embed": 12}, seed=1)(teacher)
  mesh, model = make_mesh(data=1), load_model(student)
  batch = random_batch(0, rows=2, vocabulary=30)
  policy = make_evaluate(model, mesh, rows=1)
  own = open_reference(experiment(model=str(student)), policy, model, mesh)
  taught = open_reference(
    experiment(model=str(student), reference=str(teacher)), policy, model, mesh
  )
  assert own is not None and taught is not None
  assert np.abs(own(None, batch) - taught(None, batch))[batch.action].max() > 1e-3
  np.testing.assert_allclose(own(None, batch), log_probs(student, batch, mesh), rtol=1e-5)
  np.testing.assert_allclose(taught(None, batch), log_probs(teacher, batch, mesh), rtol=1e-5)


def test_only_losses_that_ask_for_it_have_one(tmp_path):
  plain = dataclasses.replace(experiment(model="absent"), algorithm=recipes.grpo())
  assert open_reference(plain, None, None, None) is None  # pyright: ignore


def test_a_teacher_that_reads_other_ids_is_refused_by_a_token(tmp_path):
  student, teacher = tmp_path / "student", tmp_path / "teacher"
  tiny.symbol_llama(SYMBOLS, **SMALL)(student)
  tiny.symbol_llama(SYMBOLS[::-1], **SMALL)(teacher)
  asked = experiment(model=str(student), reference=str(teacher))
  with pytest.raises(
    ValueError, match=r"reference .*teacher has \d+ for token '<\d+>', the policy"
  ):
    open_reference(asked, None, load_model(student), make_mesh(data=1))  # pyright: ignore
  tiny.symbol_llama(SYMBOLS, **SMALL, vocab_size=64)(tmp_path / "other")
  (tmp_path / "other" / "tokenizer.json").unlink()
  asked = experiment(model=str(student), reference=str(tmp_path / "other"))
  with pytest.raises(ValueError, match=r"has a vocabulary of 64, the policy in .* of 48"):
    open_reference(asked, None, load_model(student), make_mesh(data=1))  # pyright: ignore
