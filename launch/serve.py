"""Serves a checkpoint with SGLang until Ctrl-C, with the flags this machine needs.

  python -m launch.serve --model=DIR --port=30000 --dtype=bfloat16 --tensor_parallel=2
  python -m launch.serve --model=DIR -- --mem-fraction-static 0.8     # the rest goes to SGLang

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

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory to serve.", required=True)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Interface to listen on.")
_PORT = flags.DEFINE_integer("port", 0, "Port to listen on; 0 takes a free one.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Arithmetic.")
_TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "Ranks the model is split over.")
_CONTEXT_LENGTH = flags.DEFINE_integer(
  "context_length", None, "Longest sequence, prompt and answer together; default: the model's."
)
_TOKENIZER = flags.DEFINE_bool("tokenizer", True, "Load the tokenizer, to serve text too.")
_START_SECONDS = flags.DEFINE_float("start_seconds", 300.0, "Deadline until the server answers.")
_LOG = flags.DEFINE_string("log", None, "SGLang's log file; default: a temporary one.")


def main(argv: Sequence[str]) -> int:
  # A stop by SIGTERM (docker, SLURM, kill) takes the same way out as Ctrl-C.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
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
        extra=tuple(argv[1:]),
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
  except KeyboardInterrupt:
    print("stopped", flush=True)
    return 0
  except (EngineError, OSError, ValueError) as error:
    print(f"cannot serve: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  app.run(main)
