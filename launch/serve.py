"""Serves a checkpoint until Ctrl-C: with SGLang, with the flags this machine needs, or with the
embedded JAX sampler behind the same routes.

  python -m launch.serve --model=DIR --port=30000 --dtype=bfloat16 --tensor_parallel=2
  python -m launch.serve --model=DIR -- --mem-fraction-static 0.8     # the rest goes to SGLang
  python -m launch.serve --engine=embedded --model=DIR --port=30000 --receive_port=31000

The embedded engine answers token ids alone and runs wherever JAX does, TPUs included. A trainer on
another machine sends it weights at `--receive_port`, both having $AGENTRL_TRANSFER_TOKEN, and HOST
must then be an interface that it reaches. See docs/transfer.md.

Exit code: 0 after Ctrl-C or SIGTERM, 1 when the server cannot start or ends by itself.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from agentrl_jax.rollout.engine import EngineError
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer

_ENGINE = flags.DEFINE_enum("engine", "sglang", ["sglang", "embedded"], "What samples.")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory to serve.", required=True)
_HOST = flags.DEFINE_string(
  "host", "127.0.0.1", "Interface to listen on. 0.0.0.0: all of IPv4; trainers elsewhere then name "
  "an address of this machine."
)  # fmt: skip
_PORT = flags.DEFINE_integer(
  "port", 0, "Port to listen on; 0 takes a free one.", lower_bound=0, upper_bound=65535
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Arithmetic.")
_TENSOR_PARALLEL = flags.DEFINE_integer(
  "tensor_parallel", 1, "Devices the model is cut over.", lower_bound=1
)
_CONTEXT_LENGTH = flags.DEFINE_integer(
  "context_length", None, "Longest sequence, prompt and answer together; default: the model's, of "
  "the embedded engine at most 4096.", lower_bound=1
)  # fmt: skip
_TOKENIZER = flags.DEFINE_bool("tokenizer", True, "SGLang: load the tokenizer, to serve text too.")
_START_SECONDS = flags.DEFINE_float("start_seconds", 300.0, "SGLang: deadline until it answers.")
_LOG = flags.DEFINE_string("log", None, "SGLang's log file; default: a temporary one.")
_SLOTS = flags.DEFINE_integer("slots", 32, "Embedded: sequences decoded at once.")
_SEED = flags.DEFINE_integer("seed", 0, "Embedded: of all random draws.")
_RECEIVE_PORT = flags.DEFINE_integer(
  "receive_port", None, "Embedded: port at which weights are received; 0 takes a free one.",
  lower_bound=0, upper_bound=65535,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
  # A stop by SIGTERM (docker, SLURM, kill) takes the same way out as Ctrl-C.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    return _embedded(argv[1:]) if _ENGINE.value == "embedded" else _sglang(argv[1:])
  except KeyboardInterrupt:
    print("stopped", flush=True)
    return 0
  except (EngineError, ImportError, OSError, ValueError) as error:
    print(f"cannot serve: {error}", file=sys.stderr)
    return 1


def _sglang(extra: Sequence[str]) -> int:
  server = SGLangServer(
    ServerOptions(
      model=Path(_MODEL.value),
      dtype=_DTYPE.value,
      tensor_parallel=_TENSOR_PARALLEL.value,
      host=_HOST.value,
      port=_PORT.value,
      tokenizer=_TOKENIZER.value,
      context_length=_CONTEXT_LENGTH.value,
      start_seconds=_START_SECONDS.value,
      log=Path(_LOG.value) if _LOG.value else None,
      extra=tuple(extra),
    )
  )
  print(f"starting SGLang for {_MODEL.value}, log {server.log}", flush=True)
  with server:
    print(f"serving at {server.url} (Ctrl-C to stop)", flush=True)
    while server.alive():
      time.sleep(0.5)
    print(
      f"the server ended by itself; its log {server.log} ends with:\n{server.log_tail()}",
      file=sys.stderr,
    )
    return 1


def _embedded(extra: Sequence[str]) -> int:
  if extra:
    raise ValueError(f"unexpected argument {extra[0]!r}: what follows -- goes to SGLang")
  # JAX takes the devices of a process that imports it and computes, which SGLang's needs itself.
  from agentrl_jax.orchestrate.serving import EmbeddedOptions, serve_embedded

  print(f"starting the embedded engine for {_MODEL.value}", flush=True)
  options = EmbeddedOptions(
    model=Path(_MODEL.value),
    dtype=_DTYPE.value,
    tensor_parallel=_TENSOR_PARALLEL.value,
    slots=_SLOTS.value,
    context_length=_CONTEXT_LENGTH.value,
    seed=_SEED.value,
    host=_HOST.value,
    port=_PORT.value,
    receive_port=_RECEIVE_PORT.value,
  )
  serve_embedded(options, lambda line: print(line, flush=True))
  return 0


if __name__ == "__main__":
  app.run(main)
