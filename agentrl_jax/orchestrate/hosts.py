"""One run over several processes: the first plays episodes and writes files, all of them learn.

Every process makes the same calls in the same order, as JAX asks of programs over several hosts.
What only the first process knows, the batch, reaches the others by `share`; what lies on several,
weights and per-token results, comes to one by `gathered` and `whole`. With one process all of them
return what they were given. A process that dies takes the others with it within the heartbeat of
`jax.distributed`, and the same command goes on from the last checkpoint.
"""

import json
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

T = TypeVar("T")
WAIT_SECONDS = 6 * 3600  # longer than any rollout, whose own waits have shorter deadlines
HEADER_BYTES = 4096
PART_BYTES = 256 << 20  # of an array, brought to every device at a time when weights are gathered


def leads() -> bool:
  """Whether this process plays and writes."""
  return jax.process_index() == 0


def check_mesh(devices: int) -> None:
  """Raises ValueError unless a mesh of so many devices has a part on every process."""
  if jax.process_count() > 1 and devices != jax.device_count():
    raise ValueError(
      f"mesh covers {devices} devices, expected all {jax.device_count()} of the "
      f"{jax.process_count()} processes: give its axes sizes with that product"
    )


def share(tree: T | None, like: type[T], *, name: str, seconds: float = WAIT_SECONDS) -> T:
  """The first process's dataclass of numpy arrays (or None fields), on every process.

  Args:
    tree: what is shared; read on the first process only.
    like: its class.
    name: of what is waited for, different in every call.
    seconds: how long the others wait for the first.
  """
  if jax.process_count() == 1:
    assert tree is not None
    return tree
  ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(1000 * seconds))
  fields = {k: np.asarray(v) for k, v in vars(tree).items() if v is not None} if leads() else {}
  text = json.dumps({k: (str(v.dtype), v.shape) for k, v in fields.items()}).encode()
  header = np.frombuffer(text.ljust(HEADER_BYTES), np.uint8)
  header = multihost_utils.broadcast_one_to_all(header if leads() else np.zeros_like(header))
  shapes = json.loads(np.asarray(header).tobytes())
  empty = {k: np.zeros(shape, dtype) for k, (dtype, shape) in shapes.items()}
  arrays = multihost_utils.broadcast_one_to_all(fields if leads() else empty)
  return like(**{k: np.asarray(v) for k, v in arrays.items()})


def whole(array: Any) -> np.ndarray:
  """The array on this host; where its parts lie on several, all of them must call this."""
  if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def gathered(weights: Any) -> Any:
  """The weights where the first process can read all of them; None on the others.

  With one process they stay as they are. Otherwise they come to its host memory a part at a time,
  so that no device holds more than a part beside its own shard.
  """
  if jax.process_count() == 1:
    return weights
  host = jax.local_devices(backend="cpu")[0]

  def local(array: jax.Array) -> Any:
    if not array.ndim:
      return jax.device_put(whole(array), host) if leads() else None
    rows = max(1, PART_BYTES * array.shape[0] // max(1, array.nbytes))
    starts = range(0, array.shape[0], rows)
    parts = [whole(array[start : start + rows]) for start in starts]
    return jax.device_put(np.concatenate(parts), host) if leads() else None

  found = jax.tree.map(local, weights)
  return found if leads() else None
