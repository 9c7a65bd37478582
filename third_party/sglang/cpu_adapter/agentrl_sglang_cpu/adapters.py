"""Lets SGLang serve LoRA adapters on a CPU, with `--lora-backend torch_native`.

SGLang keeps adapters and their indices in pinned memory, for copies to a device that are not waited
for. Torch refuses to pin without an accelerator, although there is nothing to copy to then: memory
is what it is.
"""

import functools

FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


def register() -> None:
  """The entry point `sglang.srt.plugins`. Does nothing where torch has an accelerator."""
  import torch

  if torch.accelerator.is_available() or getattr(torch, "_agentrl_unpinned", False):
    return
  torch._agentrl_unpinned = True
  torch.Tensor.pin_memory = lambda self, device=None: self
  for name in FACTORIES:
    setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make):
  @functools.wraps(make)
  def made(*arguments, **options):
    options.pop("pin_memory", None)
    return make(*arguments, **options)

  return made
