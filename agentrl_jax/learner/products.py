"""How a learner's products with weights are computed, and which part of them learns.

Whatever that needs beside the model's weights is one tree of the train state, `Beside`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct

from agentrl_jax.models import layers, lora, matmul_fp8, precision
from agentrl_jax.models.lora import Adapters, Lora
from agentrl_jax.models.model import Model, Weights
from agentrl_jax.models.precision import Fp8, History


@dataclasses.dataclass(frozen=True)
class Products:
  """`fp8` None computes in the learner's dtype; `lora` None trains the weights themselves."""

  fp8: Fp8 | None = None
  lora: Lora | None = None

  @property
  def options(self) -> Mapping[str, Any]:
    """Of `Model.forward`; none where the model does as it does by itself."""
    if self == AS_MODEL:
      return {}
    matmul = layers.matmul if self.fp8 is None else matmul_fp8.matmul
    return {"matmul": matmul if self.lora is None else lora.with_adapters(matmul)}


AS_MODEL = Products()


@flax.struct.dataclass
class Beside:
  """Of a train state, beside the weights; None where there is no such thing."""

  adapters: Adapters | None = None
  history: History | None = None  # of delayed scaling


def specs_of(model: Model, products: Products) -> tuple[Weights, Adapters | None]:
  """`ParamSpec`s of the weights and of the adapters.

  Raises ValueError for places that the model does not have.
  """
  if products.fp8 is not None:
    precision.require_places(model, products.fp8)
  if products.lora is None:
    return model.abstract(), None
  return lora.base_specs(model, products.lora), lora.abstract(model, products.lora)


def ready(products: Products, weights: Weights, beside: Beside | None) -> Weights:
  """Weights, in the dtype of computation, as `Products.options` multiply them; without `beside`
  those of the model alone, by scales of what there is now.
  """
  beside = beside or Beside()
  if products.fp8 is not None:
    weights = precision.marked(weights, products.fp8, beside.history)
  if products.lora is not None and beside.adapters is not None:
    weights = lora.attached(weights, beside.adapters, products.lora)
  return weights


def whole_policy(products: Products, weights: Weights, beside: Beside | None) -> Weights:
  """The policy as weights alone, for engines and files."""
  if products.lora is None:
    return weights
  assert beside is not None and beside.adapters is not None
  return lora.merged(weights, beside.adapters, products.lora)
