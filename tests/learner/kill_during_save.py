"""Run by test_checkpoint: forks children that are killed at the file events of a save.

A child saves step 1, then step 2 (which removes step 1), and dies by SIGKILL at the n-th of
Python's audit events on files below its directory; n = 0, STRIDE, 2 STRIDE, ... until a save
outlives it.
Prints how many were killed, and the exit code of the last. Usage: DIRECTORY STRIDE
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from agentrl_jax.learner.checkpoint import HostState, save
from agentrl_jax.learner.state import TrainState


def state(step: int) -> TrainState:
  return TrainState(
    step=jnp.asarray(step, jnp.int32),
    skipped=jnp.asarray(0, jnp.int32),
    weights={"w": jnp.full((64, 8), step, jnp.float32)},
    opt_state=(jnp.full((64, 8), -step, jnp.float32),),
  )


def host(step: int) -> HostState:
  return HostState(seed=7, weight_version=step, cursor={"next": 10 * step}, carry={"left": [step]})


def child(directory: Path, countdown: int) -> None:
  save(directory, state(1), host(1), keep=1)
  left = countdown

  def hook(event: str, arguments: tuple) -> None:
    nonlocal left
    if not (arguments and event.startswith(("open", "os.", "shutil."))):
      return
    if str(arguments[0]).startswith(str(directory)):
      left -= 1
      if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

  sys.addaudithook(hook)
  save(directory, state(2), host(2), keep=1)


def main() -> None:
  root = Path(sys.argv[1])
  stride = int(sys.argv[2])
  countdown, killed = 0, 0
  while True:
    pid = os.fork()  # jax has started no backend here yet
    if pid == 0:
      child(root / str(countdown), countdown)
      os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
      break
    killed += 1
    countdown += stride
  print(killed, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  main()
