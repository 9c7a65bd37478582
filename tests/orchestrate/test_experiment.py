"""What a configuration may not be, each refused before anything starts, by name and value."""

import dataclasses
import json

import fiddle as fdl
import numpy as np
import pytest

import configs
from agentrl_jax.losses import recipes
from agentrl_jax.losses.readiness import ClipController
from agentrl_jax.losses.routers import Routers
from agentrl_jax.orchestrate.experiment import Batch, Evaluation, Experiment
from agentrl_jax.orchestrate.run import require_layout
from agentrl_jax.orchestrate.supervised import Supervised, trainable
from agentrl_jax.orchestrate.sync_loop import due, moved_clip
from agentrl_jax.rollout.episode import Limits
from agentrl_jax.rollout.records import Outcome
from tests.models.test_deepseek_v4 import V4
from tests.orchestrate.test_shared_prompts import MODEL as LLAMA
from tests.reference.episodes import VOCAB, episode

NOTHING = dict(
  model="m", tasks=None, optimizer=None, engine=None, steps=4, algorithm=recipes.grpo(),
  limits=Limits(turn_tokens=8, context_tokens=64),
)  # fmt: skip


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"steps": 2.5}, "steps is 2.5, expected a whole number of at least 1"),
    ({"steps": 0}, "steps is 0, expected a whole number of at least 1"),
    ({"concurrency": 0}, "concurrency is 0"),
    ({"checkpoint_every": 0}, "checkpoint_every is 0"),
    ({"keep_checkpoints": 0}, "keep_checkpoints is 0"),
    ({"temperature": -1.0}, "temperature is -1.0, expected at least 0"),
    ({"algorithm": "gspo"}, "algorithm is 'gspo', expected an Algorithm"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": None}, "temperature is None, expected a number"),
    ({"max_mismatch": "1e-4"}, "max_mismatch is '1e-4', expected a number"),
    ({"seed": None}, "seed is None, expected a whole number of at least 0"),
    ({"evaluation": None}, "evaluation is None, expected Evaluation: evaluation.tasks=0 leaves"),
    ({"batch": None}, "batch is None, expected Batch"),
    ({"limits": 128}, "limits is 128, expected Limits"),
    ({"max_mismatch": 0.0}, "max_mismatch is 0.0"),
    ({"mesh": {"fsdp": 0}}, "mesh.fsdp is 0, expected a whole number of at least 1"),
    ({"dtype": "float16"}, "dtype is 'float16', expected float32 or bfloat16"),
    ({"batch": Batch(members=1)}, "batch.members is 1, expected at least 2"),
    ({"batch": Batch(row_length=64)}, "batch.row_length is 64, expected more than"),
  ],
)
def test_an_experiment(change, message):
  with pytest.raises(ValueError, match=message):
    Experiment(**(NOTHING | change))


def test_rows_that_a_family_cannot_read_are_refused_before_anything_is_sampled():
  """By the two families' own flags, as `open_run` asks."""
  shared = Experiment(**NOTHING)
  require_layout(shared, LLAMA)
  with pytest.raises(ValueError, match="share_prompts is True, and samples of deepseek_v4 cannot"):
    require_layout(shared, V4)
  require_layout(dataclasses.replace(shared, batch=Batch(share_prompts=False)), V4)


@pytest.mark.parametrize("made", [configs.tiny_rl, configs.tiny_sft])
def test_routers_are_set_by_a_fiddler(made):
  config = made()
  configs.use_routers(config, load_balance=0.01)
  assert fdl.build(config.routers) == Routers(0.01)
  configs.use_routers(config, correction_rate=0.1)
  config.routers.z = 0.2  # as --config=set:routers.z=0.2 after it
  assert fdl.build(config.routers) == Routers(None, 0.2, 0.1)
  with pytest.raises(ValueError, match="routing is for Experiment or Supervised"):
    configs.use_routers(fdl.Config(Limits, turn_tokens=1, context_tokens=8))


def test_gsm8k_is_a_configuration_that_builds(tmp_path):
  for split in ("train", "test"):
    rows = [{"question": f"{split} {i}?", "answer": f"#### {i}"} for i in range(3)]
    (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
  config = configs.gsm8k()
  config.tasks.path, config.tasks.data_dir = str(tmp_path), str(tmp_path / "tasks")
  built = fdl.build(config)
  assert len(built.tasks.held_out) == 3
  configs.use_algorithm(config, "gspo")
  config.algorithm.high = 0.5
  assert fdl.build(config).algorithm.weight is not built.algorithm.weight
  with pytest.raises(ValueError, match="no algorithm 'gspoo'; there are ac2, canopy"):
    configs.use_algorithm(config, "gspoo")
  configs.use_algorithm(config, "dapo", limit=96, buffer=32)
  assert fdl.ordered_arguments(config.algorithm) == {"limit": 96, "buffer": 32}
  with pytest.raises(ValueError, match="dapo has no bufer, limits; there are limit, buffer, coef"):
    configs.use_algorithm(config, "dapo", limits=96, bufer=32)


def test_one_member_is_enough_without_a_group_baseline():
  assert Experiment(**(NOTHING | {"batch": Batch(members=1), "algorithm": recipes.ppo()}))


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Batch(groups=0), "batch.groups is 0"),
    (lambda: Batch(micro_rows=0), "batch.micro_rows is 0"),
    (lambda: Batch(row_length=True), "batch.row_length is True"),
    (lambda: Limits(turn_tokens=0, context_tokens=8), "limits.turn_tokens is 0"),
    (lambda: Limits(turn_tokens=8, context_tokens=8, seconds=0), "limits.seconds is 0"),
    (lambda: Evaluation(tasks=-3), "evaluation.tasks is -3, expected a whole number of at least 0"),
    (lambda: Evaluation(samples=0), "evaluation.samples is 0"),
    (lambda: Supervised("m", None, None, None, 0), "steps is 0"),  # pyright: ignore
    (lambda: Supervised("m", None, None, None, 1, checkpoint_every=0), "checkpoint_every is 0"),  # pyright: ignore
  ],
)
def test_its_parts(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_when_evaluations_are_due():
  plan = Experiment(**(NOTHING | {"steps": 5, "evaluation": Evaluation(every=2)}))
  names = [due(plan, step) for step in range(6)]
  assert names == ["before", None, "step_000002", None, "step_000004", "after"]
  plan = dataclasses.replace(plan, evaluation=Evaluation())
  assert [due(plan, step) for step in range(6)] == ["before", *[None] * 4, "after"]


def test_what_supervised_training_takes():
  rng = np.random.default_rng(0)
  good, faulted = episode(rng, "0/0", [1]), episode(rng, "0/1", [1], fault=True)
  assert faulted.outcome is Outcome.FAULT
  assert trainable([good, faulted], VOCAB) == [good]
  with pytest.raises(ValueError, match="no episodes to train on, of 1 read"):
    trainable([faulted], VOCAB)
  with pytest.raises(ValueError, match=f"episode 0/0 is of a vocabulary of {VOCAB}, .* has 7"):
    trainable([good], 7)


def test_a_controlled_clip_needs_a_loss_that_reads_it():
  clip = ClipController(offset=0.0, target=1.0)
  assert moved_clip(None, 0.5, {}) is None
  with pytest.raises(ValueError, match="clip is set, but the algorithm has no clip that it could"):
    moved_clip(clip, 0.5, {})
  moved = moved_clip(clip, 0.5, {"clip_high": None})  # pyright: ignore
  assert moved is not None and moved.offset == clip.step
