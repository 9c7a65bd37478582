"""google-tunix's GRPO step of Qwen3-4B on rows of 4096, compiled for devices that are not here.

    bash benchmarks/install_tunix.sh
    .venv-tunix/bin/pip install "jax[tpu]==0.12.0.1"     # or jax-cuda13-plugin, jax-cuda13-pjrt
    .venv-tunix/bin/python -m benchmarks.planned_step_tunix --topology=v5e:4x4 --tensor=2

Its own model, loss, optimizer and trainer's step (float32 weights and Adam, bfloat16 products,
whole layers rematerialised, splash attention on TPU), on the mesh of this project's plan of
Qwen3-4B and with its rows: one a data shard at a time, 32 of them summed by the trainer. Memory
is the compiler's word, time a roofline counted by `analysis.planning`, both as in `launch.plan`.
"""

import json
import math
from typing import Any

from absl import app, flags

from agentrl_jax.analysis.planning import chips

TOPOLOGY = flags.DEFINE_string("topology", "v5e:4x4", f"What to plan for: {chips.ACCEPTED}.")
TENSOR = flags.DEFINE_integer("tensor", 2, "Devices that heads are cut over.")
ROWS = flags.DEFINE_integer("rows", 256, "Of a training step.")
LENGTH = flags.DEFINE_integer("length", 4096, "Positions of a row.")
LAYERS = flags.DEFINE_integer("layers", 0, "Instead of the model's own number; 0: all of them.")
PROMPT = 128
NO_TOKEN = -1  # as id of padding: nothing is padded here
BLOCK = 1024  # its own default for splash attention


def model_config(on_tpu: bool) -> Any:
  import jax.numpy as jnp
  from tunix.models.qwen3 import model as qwen3

  config = qwen3.ModelConfig.qwen3_4b()
  config.dtype = jnp.bfloat16
  config.remat_config = qwen3.RematConfig.DECODER
  config.use_flash_attention, config.flash_attention_block_size = on_tpu, BLOCK
  config.num_layers = LAYERS.value or config.num_layers
  return config


def place_activations() -> None:
  """Its `shard` does nothing where the process has a CPU, as one that plans does."""
  import jax
  from jax.interpreters import pxla
  from tunix.models.qwen3 import model as qwen3

  def shard(x: Any, spec: tuple[Any, ...]) -> Any:
    mesh = pxla.thread_resources.env.physical_mesh
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec)))

  qwen3.shard = shard


def make_trainer(model: Any, parts: int) -> Any:
  import optax
  from tunix.rl import algo_core, trainer
  from tunix.rl.grpo.grpo_learner import GRPOConfig
  from tunix.sft import peft_trainer

  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0))
  settings = peft_trainer.TrainingConfig(
    eval_every_n_steps=1 << 30, gradient_accumulation_steps=parts
  )
  made = trainer.Trainer(model, optimizer, settings, custom_checkpoint_metadata_fn=dict)
  algorithm = GRPOConfig(beta=0.0, epsilon=0.2, num_generations=8, loss_agg_mode="token-mean")
  algorithm.temperature, algorithm.epsilon_high = 1.0, 0.28

  def loss(model: Any, train_example: Any) -> Any:
    return algo_core.grpo_loss_fn(model, train_example, algorithm, NO_TOKEN, NO_TOKEN)

  made.with_loss_fn(loss, has_aux=True)
  return made.with_gen_model_input_fn(lambda example: {"train_example": example})


def example(rows: int, mesh: Any) -> Any:
  import jax
  import jax.numpy as jnp
  from tunix.rl import common

  def shape(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
    placed = jax.NamedSharding(mesh, jax.P("fsdp"))
    return jax.ShapeDtypeStruct((rows, width) if width else (rows,), dtype, sharding=placed)

  completion = LENGTH.value - PROMPT
  return common.TrainExample(
    prompt_ids=shape(PROMPT, jnp.int32),  # pyright: ignore
    prompt_mask=shape(PROMPT, jnp.bool_),  # pyright: ignore
    completion_ids=shape(completion, jnp.int32),  # pyright: ignore
    completion_mask=shape(completion, jnp.bool_),  # pyright: ignore
    advantages=shape(0, jnp.float32),  # pyright: ignore
    ref_per_token_logps=None,
    old_per_token_logps=shape(completion, jnp.float32),  # pyright: ignore
  )


def planned(topology: chips.Topology) -> dict[str, Any]:
  import jax
  from flax import nnx
  from jax.sharding import AxisType

  from agentrl_jax.analysis.planning import estimate, hlo, hlo_cost, jaxpr_cost

  place_activations()
  from tunix.models.qwen3 import model as qwen3

  sizes = {"fsdp": topology.count // TENSOR.value, "tp": TENSOR.value}
  mesh = jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 2,
    devices=list(chips.devices(topology)),
  )  # fmt: skip
  rows = sizes["fsdp"]
  parts = math.ceil(ROWS.value / rows)
  config, kept = model_config(topology.platform == "tpu"), []

  def made() -> tuple[Any, Any]:
    trainer = make_trainer(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), parts)
    kept.append(trainer)
    return trainer.model, trainer.optimizer

  with mesh:
    model, optimizer = nnx.eval_shape(made)
    split = [nnx.split(part) for part in (model, optimizer)]
    (model_graph, weights), (optimizer_graph, state) = split

    def placed(tree: Any) -> Any:
      specs = nnx.get_partition_spec(tree)
      return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
        ),
        tree,
        specs,
      )

    def step(weights: Any, state: Any, inputs: Any) -> Any:
      model, optimizer = nnx.merge(model_graph, weights), nnx.merge(optimizer_graph, state)
      # Read by `jaxpr_cost`: of the kernel's blocks those above the diagonal are skipped.
      with jax.named_scope(f"triangle_of_{LENGTH.value // BLOCK}_blocks"):
        found = kept[-1].create_train_step_fn()(model, optimizer, inputs)
      return nnx.state(model), nnx.state(optimizer), found

    # It is donated the optimizer, and updates weights in place.
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(
      placed(weights), placed(state), example(rows, mesh)
    )
    counts = jaxpr_cost.count(traced.jaxpr, [None] * len(traced.jaxpr.in_avals))
    compiled = traced.lower().compile()
  cost = hlo_cost.count(
    hlo.parse(compiled.as_text()), sizes, trips=counts.iterations, kernels=counts.kernel,
    on_chip_spaces=topology.platform == "tpu",
  )  # fmt: skip
  found = compiled.memory_analysis()
  outputs = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)
  peak = found.argument_size_in_bytes + outputs + found.temp_size_in_bytes
  roofline = estimate.roofline(cost, topology.chip)
  assert roofline is not None
  return {
    "topology": topology.name,
    "mesh": sizes,
    "rows": rows,
    "parts": parts,
    "arguments_gib": found.argument_size_in_bytes / chips.GIB,
    "temporaries_gib": found.temp_size_in_bytes / chips.GIB,
    "outputs_gib": outputs / chips.GIB,
    "peak_gib": (peak + found.generated_code_size_in_bytes) / chips.GIB,
    "seconds_a_step": parts * roofline.seconds,
    "bound": roofline.bound,
    "products_seconds": parts * roofline.products,
    "memory_seconds": parts * roofline.memory,
    "network_seconds": parts * roofline.network,
    "uncounted": cost.uncounted,
  }


def main(argv: list[str]) -> None:
  del argv
  topology = chips.parse(TOPOLOGY.value)
  chips.prepare_process(topology)
  print(json.dumps(planned(topology), indent=1), flush=True)


if __name__ == "__main__":
  app.run(main)
