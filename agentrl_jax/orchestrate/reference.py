"""The policy that a penalty or a distillation compares with, and that never learns."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers
from jax.sharding import Mesh

from agentrl_jax.learner.evaluate import EvaluateFn, make_evaluate
from agentrl_jax.learner.products import Beside
from agentrl_jax.models import lora
from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.model import Model, Weights
from agentrl_jax.models.sharding import shardings
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.types import TrajectoryBatch

# (the weights now, a batch) -> log-probs [B T] of its action tokens; the weights are read where a
# run trains adapters beside them, and so keeps its start.
Reference = Callable[[Weights, TrajectoryBatch], jax.Array]


def open_reference(
  experiment: Experiment,
  policy: EvaluateFn,
  model: Model,
  mesh: Mesh,
  beside: Beside | None = None,
) -> Reference | None:
  """What gives `ref_logp`; None where no loss asks for it.

  It is the run's own start, evaluated by `policy`, or the model of `experiment.reference`, which
  may be of another size and family: it reads the same token ids. `beside` is the train state's.

  Raises:
    ValueError: the ids of the two directories are not the same tokens.
  """
  if "ref_logp" not in experiment.algorithm.needs:
    return None
  how = experiment.lora
  if how is not None and experiment.reference is None:
    start = how.start and lora.load(model, how, how.start)
    if start:
      assert beside is not None
      start = Beside(jax.device_put(start, jax.tree.map(lambda x: x.sharding, beside.adapters)))
    return lambda weights, batch: policy(weights, batch, None, start or None).logp
  directory = Path(experiment.reference or experiment.model)
  if experiment.reference is not None:
    model = load_model(directory)
    require_same_tokens(Path(experiment.model), directory)
    policy = make_evaluate(
      model,
      mesh,
      rows=experiment.batch.micro_rows,
      temperature=experiment.temperature,
      dtype=jnp.dtype(experiment.dtype),
      kernels=experiment.kernels,
    )
  weights = load_weights(model, directory, shardings=shardings(model, mesh), dtype=jnp.float32)
  return lambda _, batch: policy(weights, batch).logp


def require_same_tokens(policy: Path, reference: Path) -> None:
  """Raises ValueError, naming a token, unless each of the policy's tokens has its id in both.

  Directories without `tokenizer.json` are compared by the size of the vocabulary alone.
  """
  files = [directory / "tokenizer.json" for directory in (policy, reference)]
  if all(file.exists() for file in files):
    ours, theirs = (tokenizers.Tokenizer.from_file(str(f)).get_vocab() for f in files)
    for token, number in ours.items():
      if theirs.get(token) != number:
        raise ValueError(
          f"reference {reference} has {theirs.get(token)} for token {token!r}, the policy in "
          f"{policy} has {number}: a reference reads the policy's token ids"
        )
    return
  sizes = [load_model(directory).config.vocab_size for directory in (policy, reference)]
  if sizes[0] != sizes[1]:
    raise ValueError(
      f"reference {reference} has a vocabulary of {sizes[1]}, the policy in {policy} of {sizes[0]}"
    )
