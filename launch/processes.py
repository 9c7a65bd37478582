"""The flags by which one run covers several processes, one on each host of a pod or cluster, or
several devices of a CPU.

Every process runs the same command. `--coordinator=auto` reads what TPU pods, SLURM, Open MPI and
GKE say of themselves; elsewhere `--coordinator=HOST:PORT --processes=N --process=I` says it.
"""

import atexit
import contextlib
import os
import re
from collections.abc import Iterator

import jax
from absl import flags

from launch import command

COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of the first process, or auto. Default: one process."
)
PROCESSES = flags.DEFINE_integer("processes", None, "How many processes the run has.")
PROCESS = flags.DEFINE_integer("process", None, "Which of them this is, from 0.")

CPU_DEVICES = flags.DEFINE_integer(
  "cpu_devices", None, "Devices that JAX makes of this machine's CPU, for a mesh.", lower_bound=1
)


@contextlib.contextmanager
def joined() -> Iterator[None]:
  """Joins the other processes before JAX touches a device; after a fault it leaves without them.

  Raises ValueError where the flags do not say enough, RuntimeError if the others do not come within
  five minutes.
  """
  if CPU_DEVICES.value is not None:
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES.value)
  if COORDINATOR.value is None:
    if PROCESSES.value is not None or PROCESS.value is not None:
      raise ValueError("--processes and --process need --coordinator=HOST:PORT")
    yield
    return
  if COORDINATOR.value == "auto":
    try:
      jax.distributed.initialize()
    except ValueError as error:
      raise ValueError(
        "--coordinator=auto finds no TPU pod, SLURM, Open MPI or GKE here: "
        "--coordinator=HOST:PORT --processes=N --process=I"
      ) from error
  elif PROCESSES.value is None or PROCESS.value is None:
    raise ValueError("--coordinator=HOST:PORT needs --processes=N and --process=I")
  elif not re.fullmatch(r".+:\d+", COORDINATOR.value):
    raise ValueError(f"--coordinator is {COORDINATOR.value!r}, expected HOST:PORT or auto")
  elif not 0 <= PROCESS.value < PROCESSES.value:
    raise ValueError(f"--process is {PROCESS.value}, expected 0 to {PROCESSES.value - 1}")
  else:
    jax.distributed.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)
  try:
    yield
  except BaseException as error:
    # JAX would wait at exit for the others, which wait for this one; they end when it is gone.
    atexit.register(os._exit, command.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
    if isinstance(error, jax.errors.JaxRuntimeError):
      raise RuntimeError(
        f"process {jax.process_index()} of {jax.process_count()} lost the others "
        f"({str(error).splitlines()[0][:200]}); the same command in each goes on from the last "
        "checkpoint"
      ) from error
    raise
