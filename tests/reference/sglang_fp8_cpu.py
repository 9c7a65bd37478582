"""A SGLang plug-in that serves block-quantised FP8 checkpoints on any CPU, for tests.

Stock SGLang needs AMX for that. Weights and scales stay as the checkpoint has them, so names,
formats, fusing, loading and updates are SGLang's own; the product is dequantised here (activations
to FP8 in groups of 128, as its kernels do), so SGLang's FP8 kernels are not exercised.
"""

import torch

BLOCK = 128


def register() -> None:
  """The entry point `sglang.srt.plugins`."""
  from sglang.srt.plugins.hook_registry import HookRegistry, HookType

  method = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod"
  HookRegistry.register(
    f"{method}.process_weights_after_loading_block_quant", keep_layout, HookType.REPLACE
  )
  HookRegistry.register(f"{method}.apply", apply, HookType.REPLACE)


def keep_layout(self, layer) -> None:
  layer.weight.requires_grad_(False)
  layer.weight_scale_inv.requires_grad_(False)


def apply(self, layer, x, bias=None):
  n, k = layer.weight.shape
  scales = layer.weight_scale_inv.repeat_interleave(BLOCK, 0)[:n]
  weight = layer.weight.float() * scales.repeat_interleave(BLOCK, 1)[:, :k]
  groups = x.float().reshape(*x.shape[:-1], k // BLOCK, BLOCK)
  scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
  coded = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
  out = coded.reshape(x.shape).to(torch.float32) @ weight.T
  return (out if bias is None else out + bias).to(x.dtype)
