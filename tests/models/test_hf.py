"""Hugging Face directories: bitwise round trips, sharded reading, atomic writing, refusals."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_jax.models import checkpoint_files, gemma3, hf, hf_config, layers, llama, qwen2, qwen3
from agentrl_jax.models.checkpoint_files import TensorEntry, TensorFiles, write_tensors
from agentrl_jax.models.model import initialize
from agentrl_jax.models.sharding import make_mesh, shardings
from tests.models.kill_during_write import write

CONFIG = llama.Config(
  vocab_size=24, embed=8, ffw=12, layers=2, heads=2, kv_heads=1, head_dim=4, max_position=32
)
MODEL = llama.bind(CONFIG)


@pytest.fixture
def saved(tmp_path):
  weights = initialize(MODEL, jax.random.key(0))
  hf.save_weights(MODEL, weights, tmp_path / "model")
  return weights, tmp_path / "model"


def edit_config(directory, **changes):
  path = directory / "config.json"
  fields = json.loads(path.read_text()) | changes
  fields = {name: value for name, value in fields.items() if value != "REMOVED"}
  path.write_text(json.dumps(fields))


def rewrite(directory, change):
  """The checkpoint with its dict of tensors changed."""
  files = TensorFiles(directory)
  arrays = change({name: files.read(name) for name in sorted(files.names())})
  entries = [TensorEntry(k, v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()]
  write_tensors(directory, entries)


def assert_same(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_round_trip_and_configuration(saved):
  weights, directory = saved
  model = hf.load_model(directory)
  assert model == MODEL and hash(model) == hash(MODEL)
  assert_same(hf.load_weights(model, directory), weights)


@pytest.mark.parametrize(
  "scaling",
  [
    None,
    layers.Linear(4.0),
    layers.Llama3(8.0, 1.0, 4.0, 16),
    layers.Yarn(4.0, 16, 1.2, beta_fast=20.0, beta_slow=2.0, truncate=False),
  ],
  ids=str,
)
def test_configuration_survives_config_json(scaling):
  config = llama.Config(
    **{**vars(CONFIG), "rope_scaling": scaling, "rope_theta": 123.0, "eos_token_id": (2, 5)}
  )
  fields = json.loads(json.dumps(llama.to_hf(config)))
  assert llama.from_hf(fields).config == config


def test_weights_are_made_under_their_shardings(saved):
  weights, directory = saved
  mesh = make_mesh(fsdp=2, tensor=2)
  placed = shardings(MODEL, mesh)
  loaded = hf.load_weights(MODEL, directory, shardings=placed)
  assert_same(loaded, weights)
  jax.tree.map(
    lambda x, s: (x.sharding == s) or pytest.fail(f"{x.sharding} != {s}"), loaded, placed
  )
  up = loaded.layers.mlp.up
  assert up.addressable_shards[0].data.shape == (2, 4, 6)


def test_saving_a_sharded_model_writes_the_same_bytes(saved, tmp_path):
  weights, directory = saved
  placed = jax.device_put(weights, shardings(MODEL, make_mesh(fsdp=2, tensor=2)))
  hf.save_weights(MODEL, placed, tmp_path / "sharded")
  one, other = (d / checkpoint_files.SINGLE_NAME for d in (directory, tmp_path / "sharded"))
  assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_files_of_every_dtype_split_and_read_in_boxes(tmp_path, dtype):
  arrays = {f"t{i}": np.arange(12 * i, 12 * i + 12).reshape(3, 4).astype(dtype) for i in range(5)}
  entries = [TensorEntry(k, v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()]
  write_tensors(tmp_path, entries, max_file_bytes=2 * arrays["t0"].nbytes)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == [
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
  ]
  files = TensorFiles(tmp_path)
  assert files.names() == set(arrays)
  for name, array in arrays.items():
    np.testing.assert_array_equal(files.read(name), array)
    box = (slice(1, 3), slice(0, 2))
    np.testing.assert_array_equal(files.read(name, box), array[box])


def test_copied_settings_keep_the_tokenizer_and_say_the_dtype(saved, tmp_path):
  weights, directory = saved
  (directory / "tokenizer.json").write_text("{}")
  edit_config(directory, dtype="float64", transformers_version="5")
  hf.save_weights(MODEL, weights, tmp_path / "copy", dtype=jnp.bfloat16, copy_from=directory)
  assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"
  fields = json.loads((tmp_path / "copy" / "config.json").read_text())
  assert fields["torch_dtype"] == "bfloat16" and "dtype" not in fields
  assert fields["transformers_version"] == "5"


def test_a_failed_write_leaves_the_old_directory(saved, tmp_path):
  weights, directory = saved
  before = {path.name: path.read_bytes() for path in directory.iterdir()}
  with pytest.raises(FileNotFoundError, match="nowhere"):
    hf.save_weights(MODEL, weights, directory, copy_from=tmp_path / "nowhere")
  assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
  assert [path.name for path in tmp_path.iterdir()] == ["model"]
  hf.save_weights(MODEL, jax.tree.map(lambda w: w + 1, weights), directory)
  assert_same(hf.load_weights(MODEL, directory), jax.tree.map(lambda w: w + 1, weights))
  assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_killed_at_any_moment_one_whole_model_is_left_and_the_next_write_works(tmp_path):
  script = pathlib.Path(__file__).parent / "kill_during_write.py"
  environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
  out = subprocess.run(
    [sys.executable, script, tmp_path], env=environment, check=True, capture_output=True, text=True
  ).stdout
  killed, code = map(int, out.split())
  assert killed >= 10 and code == 0
  found = []
  for index in range(killed + 1):
    directory = tmp_path / str(index) / "model"
    whole = directory if directory.exists() else directory.with_name(".model.old")
    files = TensorFiles(whole)
    values = {float(x) for name in ("a", "b") for x in files.read(name)}
    assert len(values) == 1 and (whole / "config.json").read_text() == "{}"
    found += values
    with pytest.raises(KeyboardInterrupt), checkpoint_files.new_directory(directory):
      raise KeyboardInterrupt  # the next write fails, too, and what was whole is where it belongs
    assert {float(x) for x in TensorFiles(directory).read("a")} == values
    write(directory, 3)
    assert [path.name for path in directory.parent.iterdir()] == ["model"]
    assert set(TensorFiles(directory).read("b").tolist()) == {3.0}
  assert found == sorted(found) and {found[0], found[-1]} == {1.0, 2.0}


@pytest.mark.parametrize("beside", [0, 1 << 18])
def test_a_full_disk_is_named_and_leaves_the_old_model(small_disk, beside, tmp_path):
  """Full while the weights are written, and while the settings are copied beside them."""
  weights = initialize(MODEL, jax.random.key(0))
  hf.save_weights(MODEL, weights, tmp_path / "source")
  (tmp_path / "source" / "tokenizer.json").write_bytes(bytes(beside))
  directory = small_disk / "model"
  hf.save_weights(MODEL, weights, directory)
  room = 1 << 17 if beside else 0
  used = sum(path.stat().st_size for path in directory.iterdir())
  (small_disk / "ballast").write_bytes(bytes((1 << 20) - used - room - (1 << 13)))
  with pytest.raises(OSError, match="No space left on device") as raised:
    more = jax.tree.map(lambda w: w + 1, weights)
    hf.save_weights(MODEL, more, directory, copy_from=tmp_path / "source")
  assert raised.value.filename == str(directory) and raised.value.filename2 is None
  assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "model"]
  assert_same(hf.load_weights(MODEL, directory), weights)


def test_what_is_no_model_is_not_replaced(saved, tmp_path):
  weights, directory = saved
  other = tmp_path / "notes"
  other.mkdir()
  hf.save_weights(MODEL, weights, other)  # empty
  for content in (tmp_path / "file", tmp_path / "run" / "config.json"):
    content.parent.mkdir(exist_ok=True)
    content.write_text("precious")
    target = content if content.parent == tmp_path else content.parent
    for _ in range(2):
      with pytest.raises(FileExistsError, match=f"{target}: not replaced, it is no directory of"):
        hf.save_weights(MODEL, weights, target)
    assert content.read_text() == "precious"
  (tmp_path / "link").symlink_to(directory)
  for change in (1, 2):
    more = jax.tree.map(lambda w, change=change: w + change, weights)
    hf.save_weights(MODEL, more, tmp_path / "link")
    assert_same(hf.load_weights(MODEL, directory), more)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert (tmp_path / "link").is_symlink() and names == ["file", "link", "model", "notes", "run"]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"architectures": ["GPT2LMHeadModel"]}, r"architectures \['GPT2LMHeadModel'\] are not supp"),
    ({"architectures": "REMOVED"}, r"architectures \[\] are not supported"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, expected 'silu'"),
    ({"attention_bias": True}, "attention_bias=True is not supported"),
    ({"sliding_window": 128}, "sliding_window=128 is not known"),
    ({"quantization_config": {}}, "quantization_config={} is not known"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type='dynamic' is not supported"),
    (
      {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
      r"\['original_max_.*'\] of .*'yarn' are",
    ),
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}},
      r"\['x'\] are not known to .*'lin",
    ),
    ({"hidden_size": "REMOVED"}, r"\['hidden_size'\] are missing"),
    *(
      ({name: value}, f"{name}={value}, expected a whole number > 0")
      for name in ("num_key_value_heads", "max_position_embeddings", "vocab_size")
      for value in (0, None, -1, 2.0, True)
    ),
    *(
      ({name: value}, f"{name}={value}, expected a number > 0")
      for name in ("rms_norm_eps", "rope_theta")
      for value in (0, None, -1.0, float("inf"), float("nan"))
    ),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0, expected a number > 0"),
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
      "rope_scaling=.*'linear', .* but rope_parameters=.* expected one of them",
    ),
    ({"head_dim": 2.5}, "head_dim=2.5, expected a whole number > 0"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_theta=None, expected a number > 0"),
    ({"eos_token_id": 24}, "eos_token_id=24, expected ids from 0 to 23"),
    ({"eos_token_id": [2, -1]}, r"eos_token_id=\[2, -1\], expected ids from 0 to 23"),
    ({"num_key_value_heads": 3}, "num_attention_heads=2 is no multiple of num_key_value_heads=3"),
  ],
)
def test_configurations_refused_by_name(saved, changes, message):
  _, directory = saved
  edit_config(directory, **changes)
  with pytest.raises(ValueError, match=message) as raised:
    hf.load_model(directory)
  assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


GEMMA3_CONFIG = gemma3.Config(
  **{name: value for name, value in vars(CONFIG).items() if name not in ("rope_theta", "tied")},
  local=(True, False), window=7, query_scalar=9, rope_theta=1e5, local_rope_theta=1e3, tied=False,
)  # fmt: skip


@pytest.mark.parametrize(
  ("family", "config", "changes", "message"),
  [
    (qwen2, CONFIG, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    (qwen2, CONFIG, {"layer_types": ["sliding_attention"] * 2}, r"\['sliding_attention'\] are not"),
    (qwen2, CONFIG, {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    (qwen3, CONFIG, {"attention_bias": True}, "attention_bias=True is not supported"),
    (qwen3, CONFIG, {"surprise": 1}, "surprise=1 is not known to the Qwen3 family"),
    (gemma3, GEMMA3_CONFIG, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is"),
    (gemma3, GEMMA3_CONFIG, {"layer_types": ["full_attention"]}, "expected 2 of"),
    (gemma3, GEMMA3_CONFIG, {"sliding_window": None}, "sliding_window=None, expected a whole"),
    (gemma3, GEMMA3_CONFIG, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0, expected a n"),
    (gemma3, GEMMA3_CONFIG, {"rope_parameters": {"odd": {}}}, r"rope_parameters \['odd'\] are not"),
    (
      gemma3,
      GEMMA3_CONFIG,
      {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
      "of sliding_attention is not supported",
    ),
  ],
)
def test_other_families_write_what_they_read_and_refuse_the_rest(family, config, changes, message):
  fields = json.loads(json.dumps(family.to_hf(config)))
  assert family.from_hf(fields).config == config
  with pytest.raises(ValueError, match=message):
    family.from_hf(fields | changes)


def test_gemma3_configurations_of_both_spellings():
  """As released in 2025, and as transformers 5 writes them."""
  older = gemma3.to_hf(GEMMA3_CONFIG)
  sizes = {k: v for k, v in older.items() if "rope" not in k and k != "layer_types"}
  older = sizes | {
    "num_hidden_layers": 4, "sliding_window_pattern": 2, "rope_theta": 5e5,
    "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
  }  # fmt: skip
  newer = sizes | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
      "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
      "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
    },
  }
  config = gemma3.from_hf(newer).config
  assert gemma3.from_hf(older).config == config
  assert config.rope_scaling == layers.Linear(8.0)
  assert (config.rope_theta, config.local_rope_theta) == (5e5, 2e3)
  assert config.local == (True, False, True, False)


def test_yarn_attention_factors_by_hand():
  rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}

  def factor(**changes):
    return hf_config.read_scaling(rope | changes, 64).attention_factor

  assert factor() == pytest.approx(0.1 * np.log(4) + 1)
  assert factor(factor=None) == pytest.approx(0.1 * np.log(64 / 8) + 1)
  assert factor(attention_factor=0.5) == 0.5
  expected = (0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1)
  assert factor(mscale=2.0, mscale_all_dim=0.5) == pytest.approx(expected)
  assert factor(factor=0.5) == 1.0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}, "1 missing .*lm_head.weight"),
    (lambda t: t | {"surprise": t["lm_head.weight"]}, "1 unknown tensors: surprise"),
    (
      lambda t: t | {"model.norm.weight": np.zeros((9,), np.float32)},
      r"model.norm.weight has shape \(9,\), expected \(8,\)",
    ),
    (
      lambda t: t | {(name := "model.layers.1.mlp.down_proj.weight"): t[name] * np.inf},
      "model: model.layers.1.mlp.down_proj.weight: numbers that are not finite",
    ),
  ],
)
def test_tensors_refused_by_name(saved, change, message):
  _, directory = saved
  rewrite(directory, change)
  with pytest.raises(ValueError, match=message):
    hf.load_weights(MODEL, directory)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("config.json", b"", "config.json: not JSON: Expecting value"),
    ("config.json", b"\xff", "config.json: not JSON: 'utf-8' codec"),
    ("config.json", b"[]", "config.json: list, expected a JSON object"),
    (checkpoint_files.SINGLE_NAME, b"", "model.safetensors: not a whole safetensors file: "),
    (checkpoint_files.SINGLE_NAME, None, "model.safetensors: not a whole safetensors file: "),
    (checkpoint_files.INDEX_NAME, b"{}", "index.json: weight_map is None, expected the file of"),
    (checkpoint_files.INDEX_NAME, b"{", "index.json: not JSON: "),
    (checkpoint_files.INDEX_NAME, b'{"weight_map": {"x": 3}}', "weight_map of x is 3, expected a"),
  ],
)
def test_broken_files_are_named(saved, name, content, message):
  _, directory = saved
  path = directory / name
  path.write_bytes(path.read_bytes()[:-1] if content is None else content)
  with pytest.raises(ValueError) as raised:
    hf.load_weights(hf.load_model(directory), directory)
  assert str(path) in str(raised.value) and message in str(raised.value)


def test_broken_shards_are_named_with_their_tensors(saved):
  _, directory = saved
  files = TensorFiles(directory)
  arrays = {name: files.read(name) for name in sorted(files.names())}
  entries = [TensorEntry(k, v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()]
  write_tensors(directory, entries, max_file_bytes=1200)
  *_, before, last = sorted(directory.glob("model-*"))
  whole, own = last.read_bytes(), load_file(last)
  name = max(own)
  twice = next(iter(load_file(before)))
  for change, message in (
    ({twice: arrays[twice] + 1}, f"{twice} is in another file, too, {before.name}"),
    ({name: arrays[name].astype(np.int8)}, f"{name} is stored as I8, expected "),
  ):
    save_file(own | change, last)
    with pytest.raises(ValueError, match=f"{last.name}: {message}"):
      hf.load_weights(MODEL, directory)
  last.write_bytes(whole[:-1])
  with pytest.raises(ValueError, match=f"{last.name}: not a whole safetensors file: "):
    hf.load_weights(MODEL, directory)


def test_old_buffers_and_copies_of_a_tied_head_are_passed_over(tmp_path):
  model = llama.bind(llama.Config(**{**vars(CONFIG), "tied": True}))
  weights = initialize(model, jax.random.key(1))
  hf.save_weights(model, weights, tmp_path / "tied")
  rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
  head, embedding = "lm_head.weight", "model.embed_tokens.weight"
  rewrite(tmp_path / "tied", lambda t: t | {rotary: np.ones(2, np.float32), head: t[embedding]})
  assert_same(hf.load_weights(model, tmp_path / "tied"), weights)
  for change in (lambda x: x * 2, lambda x: x[:5]):
    rewrite(tmp_path / "tied", lambda t, change=change: t | {head: change(t[embedding])})
    with pytest.raises(ValueError, match=r"lm_head.weight is not model\.embed_tokens"):
      hf.load_weights(model, tmp_path / "tied")


def test_missing_directories_and_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="absent: expected a Hugging Face model directory"):
    hf.load_model(tmp_path / "absent")
  with pytest.raises(FileNotFoundError, match="absent: expected a Hugging Face model directory"):
    checkpoint_files.fingerprint(tmp_path / "absent")
  (tmp_path / "other").mkdir()
  with pytest.raises(FileNotFoundError, match="found neither"):
    hf.load_weights(MODEL, tmp_path / "other")
  index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
  (tmp_path / "other" / checkpoint_files.INDEX_NAME).write_text(json.dumps(index))
  with pytest.raises(FileNotFoundError, match=r"model-00001-of-00001\.safetensors: named by"):
    hf.load_weights(MODEL, tmp_path / "other")
