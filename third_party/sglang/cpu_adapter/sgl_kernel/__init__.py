"""Stands where SGLang imports its compiled kernels: every name imports, none computes.

On a machine without CUDA, SGLang takes its own `forward_native` paths, so a call that does arrive
here is a mistake in the flags, and says so.
"""


def __getattr__(name: str):
  # Dunder names are questions that Python itself asks (__path__, __version__, ...): answer truly.
  if name.startswith("__"):
    raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

  def missing(*_args, **_kwargs):
    raise NotImplementedError(
      f"sgl_kernel.{name} is a compiled kernel; this is the placeholder of agentrl-sglang-cpu"
    )

  missing.__name__ = missing.__qualname__ = name
  return missing
