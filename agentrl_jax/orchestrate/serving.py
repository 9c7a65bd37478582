"""A process that serves the embedded sampler, as SGLang would be served."""

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.sampler.engine import EmbeddedEngine
from agentrl_jax.sampler.server import EngineServer
from agentrl_jax.transfer.engine_layout import checksums_here
from agentrl_jax.transfer.receive import TOKEN, ReceiverProcess, bracketed, listen
from agentrl_jax.transfer.transports.disk import shared_memory

_WATCH_SECONDS = 0.5  # between looks whether the receiver lives
_CONTEXT = 4096  # of a stream, where nobody says how long it may be and the model allows more


@dataclasses.dataclass(frozen=True)
class EmbeddedOptions:
  """What to serve and how. `model` is a Hugging Face directory, `dtype` what is computed in.

  `tensor_parallel` devices of this process hold the model, cut over the mesh axis `tensor`; heads
  whose number it does not divide are whole on each, which is said. `slots`
  sequences of at most `context_length` tokens (None: 4096, or fewer where the model has fewer) are
  decoded at once; their cache is allocated at the start. `port` 0 takes a free one. With
  `receive_port` a receiver of weights listens there, too, 0 again being any, for trainers that know
  $AGENTRL_TRANSFER_TOKEN.
  """

  model: Path
  dtype: str = "float32"
  tensor_parallel: int = 1
  slots: int = 32
  context_length: int | None = None
  seed: int = 0
  host: str = "127.0.0.1"
  port: int = 0
  receive_port: int | None = None


def serve_embedded(options: EmbeddedOptions, say: Callable[[str], None]) -> None:
  """Serves until SIGINT or SIGTERM, which is then delivered. `say` is told where.

  Raises:
    FileNotFoundError, ValueError: there is no such model, or it cannot be served so.
    OSError: a port is taken.
  """
  model = load_model(options.model)
  if uncut := {k: n for k, n in model.units.items() if n % options.tensor_parallel}:
    parts = " and ".join(f"{n} {name}" for name, n in sorted(uncut.items()))
    say(
      f"{parts} are no multiple of tensor_parallel {options.tensor_parallel}: whole on each device"
    )
  context = options.context_length or min(_CONTEXT, model.config.max_position)
  placed = shardings(model, make_mesh(tensor=options.tensor_parallel))
  read = functools.partial(
    load_weights, model, shardings=placed, dtype=jnp.dtype(options.dtype), indexed=False
  )
  with contextlib.ExitStack() as opened:
    listener = listen(options.host, options.port)
    opened.callback(listener.close)
    facts = {
      "engine": "embedded",
      "model_path": str(options.model.resolve()),
      "model_config": model.functions.to_hf(model.config),
      "context_length": context,
      "max_running_requests": options.slots,
      "dtype": options.dtype,
      "device": jax.default_backend(),
      "tp_size": 1,  # as pushes see it: whatever the mesh, tensors come and are proved whole
      "random_seed": options.seed,
      "startup_time": time.time(),
      "enable_deterministic_inference": True,
      "transports": ["disk", "tcp"],
      "checksums": "sha256",
      "vocab_padding": 1,
      "shared_memory": shared_memory(),
    }
    if options.receive_port is not None:
      receiver = _receiver(options.host, options.receive_port)
      opened.callback(receiver.close)
      facts["receiver_port"] = int(receiver.address.rpartition(":")[2])
      say(f"receiving weights at {receiver.address}")
      ending = threading.Event()
      watching = (receiver, ending, say)
      threading.Thread(target=_keep_alive, args=watching, name="watch", daemon=True).start()
      opened.callback(ending.set)
    engine = EmbeddedEngine(
      model,
      load_weights(model, options.model, shardings=placed, dtype=jnp.dtype(options.dtype)),
      slots=options.slots,
      context=context,
      seed=options.seed,
      dtype=jnp.dtype(options.dtype),
    )
    checksums = functools.partial(checksums_here, model, dtype=options.dtype)
    server = EngineServer(engine, read=read, checksums=checksums, facts=facts)
    opened.callback(server.close)
    port = listener.getsockname()[1]
    say(f"serving at http://{bracketed(options.host)}:{port} (Ctrl-C to stop)")
    server.serve(listener)


def _keep_alive(
  receiver: ReceiverProcess, ending: threading.Event, say: Callable[[str], None]
) -> None:
  """Starts a receiver again whenever it dies alone, at its address, until `ending`. What it held is
  sent once more: a push that it broke off has changed nothing.
  """
  while not ending.wait(_WATCH_SECONDS):
    if receiver.alive():
      continue
    died = f"the receiver of weights at {receiver.address} died"
    try:
      receiver.revive()
      say(f"{died} and was started again")
    except OSError as error:
      say(f"{died} and does not start: {error}")


def _receiver(host: str, port: int) -> ReceiverProcess:
  token = os.environ.get(TOKEN)
  if not token:
    raise ValueError(f"${TOKEN} is empty: give the trainer and this server the same secret")
  return ReceiverProcess(host=host, port=port, token=token)
