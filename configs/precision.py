"""Fiddlers for numbers of 8 bits and for adapters: `--config=fiddler:use_fp8_products`,
`--config='fiddler:use_lora(rank=8)'`. See docs/precision.md.
"""

from collections.abc import Sequence

import fiddle as fdl

from agentrl_jax.models.lora import PROJECTIONS, Lora
from agentrl_jax.models.precision import Fp8
from agentrl_jax.orchestrate import engines
from agentrl_jax.orchestrate.experiment import Experiment
from agentrl_jax.orchestrate.supervised import Supervised
from agentrl_jax.sampler.placement import SamplerFp8

SCALINGS = {
  "blocks": {},
  "tensor": {"blocks": False},
  "delayed": {"blocks": False, "history": 16},
}
FP8_MISMATCH = 4.0  # nats, of a single token: 2.2 in 1,020 of SmolLM2 (docs/precision.md)


def use_fp8_products(
  config: fdl.Config[Experiment | Supervised],
  scaling: str = "blocks",
  gradient: str = "float8_e5m2",
) -> None:
  """The learner's products in FP8, scaled as one of `SCALINGS` says; engine and learner may then
  differ by `FP8_MISMATCH`, and a run that says less is refused where they do.

  Raises ValueError for another scaling, or for what is no `Experiment` and not `Supervised`.
  """
  if scaling not in SCALINGS:
    raise ValueError(f"no scaling {scaling!r}; there are {', '.join(SCALINGS)}")
  require(config, "FP8", Experiment, Supervised)
  config.fp8 = fdl.Config(Fp8, gradient=gradient, **SCALINGS[scaling])
  if fdl.get_callable(config) is Experiment:  # the other has no engine
    config.max_mismatch = max(config.max_mismatch, FP8_MISMATCH)


def use_fp8_sampler(
  config: fdl.Config[Experiment], weights: bool = True, cache: bool = True, products: bool = False
) -> None:
  """The embedded sampler holds weights and its cache of keys and values as FP8; with `products` it
  multiplies as the learner of `use_fp8_products` does, which must come before.

  Raises ValueError for another engine, where nothing would be FP8, or where the learner's products
  are not in FP8 or scaled by a history, which the sampler does not keep.
  """
  require(config, "FP8 of a sampler", Experiment)
  if not (weights or cache or products):
    raise ValueError("weights, cache and products are False, expected one to be in FP8 at least")
  engine = config.engine
  if not isinstance(engine, fdl.Config) or fdl.get_callable(engine) is not engines.embedded:
    raise ValueError(f"this FP8 is of the embedded sampler, the engine is {engine}: use_fp8 for a "
                     "SGLang server, use_embedded before it for this one")  # fmt: skip
  if products and (config.fp8 is None or config.fp8.history):
    raise ValueError(
      f"the sampler multiplies as the learner does, whose fp8 is {config.fp8}: expected that of "
      "use_fp8_products with scaling 'blocks' or 'tensor' before it"
    )
  engine.fp8 = fdl.Config(
    SamplerFp8, weights=weights, cache=cache, products=config.fp8 if products else None
  )
  config.max_mismatch = max(config.max_mismatch, FP8_MISMATCH)


def use_lora(
  config: fdl.Config[Experiment | Supervised],
  rank: int = 16,
  alpha: float = 32.0,
  targets: Sequence[str] = PROJECTIONS,
  base_dtype: str = "float32",
  start: str | None = None,
) -> None:
  """Trains adapters alone, see `models.lora.Lora`; engines get the merged weights, or with
  `use_adapter_pushes` the adapters, and the run leaves `adapter/`, a PEFT directory, beside
  `model/`.

  Raises ValueError for what is no `Experiment` and not `Supervised`.
  """
  require(config, "LoRA", Experiment, Supervised)
  config.lora = fdl.Config(
    Lora, rank=rank, alpha=float(alpha), targets=tuple(targets), base_dtype=base_dtype, start=start
  )


def use_adapter_pushes(config: fdl.Config[Experiment]) -> None:
  """Adapters alone go to the SGLang server, each version beside the one before it, and requests
  name theirs; the server keeps the frozen weights (docs/transfer.md).

  Raises ValueError without `use_lora` before it, or where the engine is no SGLang server.
  """
  require(config, "LoRA pushes", Experiment)
  if config.lora is None:
    raise ValueError("there are no adapters to push: use_lora before it")
  engine = config.engine
  if not isinstance(engine, fdl.Config) or fdl.get_callable(engine) is not engines.sglang:
    raise ValueError(
      f"adapters are pushed to a SGLang server, the engine is {engine}: use_sglang before it"
    )
  config.push_adapters = True


def require(config: fdl.Config, what: str, *kinds: type) -> None:
  """Raises ValueError unless the configuration builds one of the kinds."""
  made = fdl.get_callable(config)
  if made not in kinds:
    names = " or ".join(kind.__name__ for kind in kinds)
    raise ValueError(f"{what} is for {names}, this configuration builds {made.__name__}")
