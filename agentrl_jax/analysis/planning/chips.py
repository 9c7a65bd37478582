"""Accelerators by their public numbers, and slices of them that XLA can compile for without one.

Peaks are of dense products. A device is what JAX calls one: on TPU7x it is half a chip.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device's share of a chip.

  Attributes:
    name: what a person calls it.
    flops: products a second in bfloat16, accumulated in float32; 2 a multiply-add. None: unknown.
    memory: bytes.
    bandwidth: bytes a second between memory and chip.
    interconnect: bytes a second that it can send to others, all links together, one direction.
    source: where the numbers are published.
  """

  name: str
  flops: float | None
  memory: float | None
  bandwidth: float | None
  interconnect: float | None
  source: str


_TPU = "https://docs.cloud.google.com/tpu/docs/"
_TPU7X = f"{_TPU}tpu7x"  # its table has v5p and v6e beside it

# Interconnect is published as the sum of both directions; half of it is one direction.
CHIPS = {
  "v5e": Chip("TPU v5e", 197e12, 16 * GIB, 819e9, 400e9 / 2, f"{_TPU}v5e"),
  "v5": Chip("TPU v5p", 459e12, 95 * GIB, 2765e9, 1200e9 / 2, _TPU7X),
  "v6e": Chip("TPU v6e", 918e12, 32 * GIB, 1638e9, 800e9 / 2, _TPU7X),
  "tpu7x": Chip(
    "TPU7x, half a chip", 2307e12 / 2, 192 * GIB / 2, 7380e9 / 2, 1200e9 / 4, _TPU7X
  ),
  # 1,979 TFLOP/s is with sparsity, half of it dense.
  "h200": Chip(
    "NVIDIA H200 SXM", 1979e12 / 2, 141e9, 4.8e12, 900e9 / 2,
    "https://www.nvidia.com/en-us/data-center/h200/",
  ),
  "h100": Chip(
    "NVIDIA H100 SXM", 1979e12 / 2, 80e9, 3.35e12, 900e9 / 2,
    "https://www.nvidia.com/en-us/data-center/h100/",
  ),
  "cpu": Chip("CPU", None, None, None, None, "this machine; no peak is claimed"),
}  # fmt: skip
_PER_CHIP = {"tpu7x": 2}  # devices
_SHAPE = {"v5e": 2, "v6e": 2, "v5": 3, "tpu7x": 3}  # dimensions of a slice
_NEEDS = {"v5e": "tpu", "v5": "tpu", "v6e": "tpu", "tpu7x": "tpu", "h200": "gpu", "h100": "gpu"}
_MODULE = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
ACCEPTED = (
  "cpu:N, h100:N, h200:N (1 to 8, or a multiple of 8), v5e:AxB, v6e:AxB (1x1, 2x2, 2x4, 4x4, "
  "4x8, ... 16x16), v5:AxBxC (2x2x1, 2x2x2, 2x2x4, ...), tpu7x:AxBxC (2x2x1, ...)"
)


class MissingExtra(RuntimeError):
  """The compiler of this topology is not installed; the message says which extra has it."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """`count` devices of one kind, as `kind:shape` names them."""

  name: str
  kind: str
  shape: tuple[int, ...]

  @property
  def chip(self) -> Chip:
    return CHIPS[self.kind]

  @property
  def count(self) -> int:
    return math.prod(self.shape) * _PER_CHIP.get(self.kind, 1)

  @property
  def platform(self) -> str:
    return _NEEDS.get(self.kind, "cpu")


def parse(name: str) -> Topology:
  """The topology of a name such as `v5e:4x4`. Raises ValueError, with those accepted."""
  found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
  refused = ValueError(f"--topology is {name!r}, accepted are {ACCEPTED}")
  if found is None or found[1] not in CHIPS:
    raise refused
  shape = tuple(int(size) for size in found[2].split("x"))
  whole_hosts = _NEEDS.get(found[1]) != "gpu" or shape[0] <= 8 or shape[0] % 8 == 0
  if len(shape) != _SHAPE.get(found[1], 1) or min(shape) < 1 or not whole_hosts:
    raise refused
  return Topology(name, found[1], shape)


def prepare_process(topology: Topology) -> None:
  """Sets what jax reads when it starts: call before anything touches a device.

  Raises MissingExtra where the topology's compiler is not installed.
  """
  if topology.platform != "cpu" and importlib.util.find_spec(_module(topology)) is None:
    raise MissingExtra(
      f"{topology.name} needs the compiler for {topology.platform.upper()}: "
      f"bash launch/environment.sh --extra=plan-{topology.platform}"
    )
  import jax

  jax.config.update("jax_platforms", "cpu")  # the environment was read when jax was imported
  os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no CUDA library is needed here
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no cloud machine is asked what it is
  # What that would have said; without it libtpu complains, and compiles the same.
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is taken: others may plan, too
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  if topology.platform == "cpu":
    forced = f"--xla_force_host_platform_device_count={topology.count}"
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
      os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {forced}".strip()


def _module(topology: Topology) -> str:
  module = _MODULE[topology.platform]
  parent = module.split(".")[0]
  return module if importlib.util.find_spec(parent) is not None else parent


def devices(topology: Topology) -> Sequence[Any]:
  """Devices that can be compiled for; only those of `cpu` exist.

  Raises ValueError where the compiler does not know the slice, or this process has too few CPU
  devices.
  """
  import jax
  from jax.experimental import topologies

  if topology.platform == "cpu":
    found = jax.devices("cpu")
    if len(found) < topology.count:
      raise ValueError(f"{topology.name} needs {topology.count} CPU devices, have {len(found)}")
    return found[: topology.count]
  try:
    if topology.platform == "gpu":
      hosts = max(1, topology.count // 8)
      return topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology.kind,
        target_config=gpu_target(topology.kind),
        topology=f"1x{hosts}x{topology.count // hosts}",
      ).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices
  except Exception as error:  # whatever the plug-in makes of a slice that it does not know
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
      f"the compiler refuses {topology.name} ({first}); accepted are {ACCEPTED}"
    ) from error


def gpu_target(kind: str) -> str:
  """A GpuTargetConfigProto, as text, of a GH100 chip with this memory.

  Limits of compute capability 9.0 are those of NVIDIA's CUDA programming guide and of XLA's own
  specs (openxla/xla, xla/backends/gpu/target_config/specs).
  """
  memory = {"h200": 151397597184, "h100": 85520809984}[kind]
  fields = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "threads_per_core_limit": 2048,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": int(CHIPS[kind].bandwidth or 0),
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": memory,
  }
  lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
  capability = "  cuda_compute_capability { major: 9 }"
  name = CHIPS[kind].name
  return (
    f"gpu_device_info {{\n{lines}\n{capability}\n}}\n"
    f'platform_name: "CUDA"\ndevice_description_str: "{name}"\n'
  )
