"""FP8 pushes into the real server: bytes, scales and answers are those of an offline conversion.

On CPU the server runs a test plug-in in place of its FP8 product; everything else is SGLang's own.
"""

import asyncio
import json
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from agentrl_jax.models import qwen3
from agentrl_jax.models.decoder import Config
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.sharding import make_mesh, shardings
from agentrl_jax.ops.quantize import OCP
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer
from agentrl_jax.transfer.layout import apply, assemblies
from agentrl_jax.transfer.push import sglang_publisher
from agentrl_jax.transfer.report import State
from agentrl_jax.transfer.stage import leaves, source_layout
from agentrl_jax.transfer.transports.disk import DiskTransport
from agentrl_jax.transfer.transports.tensor import DirectTransport, TensorTransport
from tests.reference import quantize as reference
from tests.reference.plugins import write_plugin
from tests.reference.transfer import random_weights
from tests.sglang_fixture import REFERENCE, transformers_logp

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = [3, 17, 101, 9, 56, 200, 77, 31, 8, 90, 14, 250]
# SGLang's Llama renames block scales and drops them with a warning; its Qwen3 loads them.
MODEL = qwen3.bind(
  Config(
    vocab_size=256, embed=128, ffw=256, layers=2, heads=4, kv_heads=4, head_dim=32,
    max_position=512, bos_token_id=0, eos_token_id=1,
  )
)  # fmt: skip
FP8_CONFIG = {
  "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip


def weights(seed):
  """Float32 weights; norms near one, matrices small enough for log-probs that are not extreme."""

  def scaled(path, w):
    return jnp.float32("norm" in jax.tree_util.keystr(path)) + jnp.float32(0.1) * w

  return jax.tree_util.tree_map_with_path(scaled, random_weights(MODEL, seed))


def offline(tree):
  """The FP8 checkpoint by the numpy reference: name -> array."""
  arrays = {name: np.asarray(leaf) for name, leaf in leaves(tree).items()}
  made = assemblies(MODEL.rules, {t.name: t.shape for t in source_layout(tree)})
  out = {}
  for rule in made:
    value = apply(rule, arrays).astype(ml_dtypes.bfloat16)
    if "_proj" not in rule.dst:
      out[rule.dst] = value
      continue
    coded, scales = reference.quantize(value.astype(np.float32), *OCP)
    out[rule.dst] = coded.view(ml_dtypes.float8_e4m3fn)
    out[f"{rule.dst}_scale_inv"] = scales
  return out


def write_checkpoint(tensors, directory):
  """config.json and a safetensors file, written by hand."""
  save_weights(MODEL, weights(0), directory)
  config = json.loads((directory / "config.json").read_text())
  config |= {"quantization_config": FP8_CONFIG, "torch_dtype": "bfloat16"}
  (directory / "config.json").write_text(json.dumps(config))
  names = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
  header, data = {}, b""
  for name, array in tensors.items():
    start = len(data)
    data += np.ascontiguousarray(array).tobytes()
    header[name] = {
      "dtype": names[str(array.dtype)], "shape": array.shape, "data_offsets": [start, len(data)],
    }  # fmt: skip
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
  return directory


@pytest.fixture(scope="module")
def fp8_server(sglang_python, tmp_path_factory):
  """A server of the quantised weights of seed 0, with the plug-in on its path."""
  plugins = write_plugin(
    tmp_path_factory.mktemp("plugins"), REFERENCE / "sglang_fp8_cpu.py", "sglang_fp8_cpu:register"
  )
  directory = write_checkpoint(offline(weights(0)), tmp_path_factory.mktemp("fp8"))
  log = tmp_path_factory.mktemp("log") / "server.log"
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTHONPATH", str(plugins))
    options = ServerOptions(
      directory, dtype="bfloat16", python=sglang_python, log=log, start_seconds=600
    )
    with SGLangServer(options) as server:
      yield server


def post(server, route, body):
  answer = httpx.post(f"{server.url}{route}", json=body, timeout=120)
  answer.raise_for_status()
  return answer.json()


def score(server):
  body = {
    "input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0,
    "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
  }  # fmt: skip
  meta = post(server, "/generate", body)["meta_info"]
  return np.array([entry[0] for entry in meta["input_token_logprobs"][1:]])


def checksums(server):
  (rank,) = post(server, "/weights_checker", {"action": "checksum"})["ranks"]
  return rank["checksums"]


def load_from_disk(server, directory):
  post(
    server, "/update_weights_from_disk", {"model_path": str(directory), "weight_version": "default"}
  )


def publish(server, tree, version, transport):
  async def main():
    publisher = sglang_publisher(
      MODEL, [server.url], transport=transport, run_id="fp8", deadline=120, quantization=OCP
    )
    try:
      return await publisher.publish(tree, version)
    finally:
      await publisher.close()

  report = asyncio.run(main())
  assert report.state is State.COMMITTED, str(report)
  return report


def dequantised_logp(python, tensors, directory):
  """Log-probs by transformers of the weights that the FP8 checkpoint stands for."""
  arrays = {}
  for name, array in tensors.items():
    if array.dtype == ml_dtypes.float8_e4m3fn:
      scales = tensors[f"{name}_scale_inv"]
      spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)
      arrays[name] = array.astype(np.float32) * spread
    elif not name.endswith("_scale_inv"):
      arrays[name] = array.astype(np.float32)
  write_checkpoint(arrays, directory)
  config = json.loads((directory / "config.json").read_text())
  del config["quantization_config"]
  (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
  (want,) = transformers_logp(python, Path(directory), [(PROMPT[:1], PROMPT[1:], 1.0)])
  return np.array(want)


@pytest.mark.parametrize("kind", ["disk", "tensor", "direct"])
def test_the_server_holds_an_offline_conversion(fp8_server, sglang_python, tmp_path, kind):  # W23
  transport = {
    "disk": lambda: DiskTransport(tmp_path / "staging"),
    "tensor": lambda: TensorTransport(bucket_bytes=1 << 16),
    "direct": lambda: DirectTransport(bucket_bytes=1 << 17),
  }[kind]()
  old = write_checkpoint(offline(weights(0)), tmp_path / "old")
  load_from_disk(fp8_server, old)
  before = score(fp8_server)
  tree = weights(1)
  spread = jax.device_put(tree, shardings(MODEL, make_mesh(fsdp=2, tensor=2)))
  report = publish(fp8_server, spread, 1, transport)
  got, held = score(fp8_server), checksums(fp8_server)
  want = offline(tree)
  total = sum(array.nbytes for array in want.values())
  assert report.phases["send"].nbytes == total
  load_from_disk(fp8_server, write_checkpoint(want, tmp_path / "new"))
  assert held == checksums(fp8_server)
  np.testing.assert_array_equal(got, score(fp8_server))
  name = "model.layers.1.mlp.down_proj.weight"
  spread = np.repeat(np.repeat(want[f"{name}_scale_inv"], 128, 0), 128, 1)
  product = want[name].astype(np.float32) * spread
  assert held[name] == reference.sha(product.astype(ml_dtypes.bfloat16))
  exact = dequantised_logp(sglang_python, want, tmp_path / "dequantised")
  # Activations are quantised and computed in bfloat16: bounds from what was measured, doubled.
  assert np.abs(got - exact).mean() < 0.2
  assert np.abs(before - exact).mean() > 0.5
