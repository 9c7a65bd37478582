"""The real GGUF file against transformers' own GGUF loader, and what a file may not hold."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

from agentrl_jax.models import gguf, hf

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
