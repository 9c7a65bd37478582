"""How a command of this project starts and ends: a fault is one clear line, its story a file."""

import asyncio
import contextlib
import errno
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

# Libraries speak only of what went wrong; what the run does is said by its own lines.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


# How Fiddle says which call of a configuration failed, and with which arguments.
_IN_CONFIGURATION = re.compile(r" at <root>\.(\S+) with .*keyword arguments: \((.*)\)", re.DOTALL)
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def run(main: Callable[[Sequence[str]], int | None], *, positional: int = 0) -> None:
  """`app.run` for mains whose expected faults are exceptions with a message of one line.

  Up to `positional` arguments may follow the program's name without being flags.
  """

  def guarded(arguments: Sequence[str]) -> int:
    gc.freeze()  # what was imported stays: walking it again and again is a tenth of tracing
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.ERROR)
    if len(arguments) > 1 + positional:
      unexpected = arguments[1 + positional]
      print(f"unexpected argument {unexpected!r}: flags are written --name=value", file=sys.stderr)
      return 2
    try:
      return main(arguments) or 0
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      return INTERRUPTED
    except Exception as error:  # the program's edge: everything becomes one line and an exit code
      print(f"error: {one_line(error)}", file=sys.stderr)
      _keep_traceback()
      return 1

  app.run(guarded)


def one_line(error: BaseException) -> str:
  """The message, with what caused it where the message does not say so already."""
  if isinstance(error, OSError) and error.errno == errno.ENOSPC:
    return f"no space left on the device of {error.filename or 'a file of this run'}"
  text, _, context = str(error).partition("\n\nFiddle context")
  text = text.strip() or type(error).__name__
  if isinstance(error, TypeError) and (found := _IN_CONFIGURATION.search(context)):
    path, given = found.groups()
    text = f"{path}: {text}, given {given or 'nothing'}: --config=set:{path}.NAME=VALUE"
  cause = error.__cause__
  if isinstance(error, ValueError) and cause is not None and str(cause) not in text:
    text = f"{text} ({str(cause).strip().splitlines()[0]})" if str(cause).strip() else text
  return text


def run_async(main: Coroutine[Any, Any, Any]) -> Any:
  """`asyncio.run` in which SIGTERM ends the program as Ctrl-C does: tasks cancelled, servers
  stopped.
  """

  async def with_signal() -> Any:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):
      asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
      return await main
    except asyncio.CancelledError:
      raise KeyboardInterrupt from None

  return asyncio.run(with_signal())


traceback_directory: Path | None = None  # where a fault's traceback goes; a command sets its own


def _keep_traceback() -> None:
  if traceback_directory is None:
    return
  path = traceback_directory / "error.log"
  with contextlib.suppress(OSError):
    with path.open("a") as file:
      traceback.print_exc(file=file)
    print(f"traceback: {path}", file=sys.stderr)
