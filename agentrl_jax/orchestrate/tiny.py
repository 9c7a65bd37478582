"""A tiny model directory from nothing: a tokenizer of the task's own text or symbols, random
weights.

For experiments on a laptop and for tests: everything else treats it like any Hugging Face model.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl_jax.envs import calculator
from agentrl_jax.models import llama
from agentrl_jax.models.hf import save_weights
from agentrl_jax.models.model import initialize

END = "<|end|>"


def tiny_llama(
  *,
  vocab_size: int = 512,
  embed: int = 128,
  layers: int = 4,
  heads: int = 4,
  kv_heads: int = 2,
  ffw: int = 384,
  max_position: int = 256,
  seed: int = 0,
) -> Callable[[Path], None]:
  """Makes a Llama of about 0.8M parameters (at the defaults) for the calculator task.

  Returns a function that writes the directory: config.json, model.safetensors, tokenizer files.
  """

  def make(directory: Path) -> None:
    tokenizer = train_tokenizer(calculator_text(), vocab_size)
    shape = dict(embed=embed, ffw=ffw, layers=layers, heads=heads, kv_heads=kv_heads)
    _write(directory, tokenizer, seed, vocab_size=vocab_size, max_position=max_position, **shape)

  return make


def symbol_llama(
  symbols: Sequence[str],
  *,
  vocab_size: int = 48,
  embed: int = 128,
  layers: int = 3,
  heads: int = 4,
  kv_heads: int = 2,
  ffw: int = 384,
  max_position: int = 96,
  seed: int = 0,
) -> Callable[[Path], None]:
  """Makes a Llama of about 0.6M parameters (at the defaults) whose tokens are `symbols`.

  Returns a function that writes the directory, as `tiny_llama` does. `END` must be a symbol.
  """

  def make(directory: Path) -> None:
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    shape = dict(embed=embed, ffw=ffw, layers=layers, heads=heads, kv_heads=kv_heads)
    _write(directory, tokenizer, seed, vocab_size=vocab_size, max_position=max_position, **shape)

  return make


def _write(directory: Path, tokenizer: Tokenizer, seed: int, **shape: Any) -> None:
  """The directory of a randomly initialised model with this tokenizer."""
  head_dim = shape["embed"] // shape["heads"]
  end = tokenizer.token_to_id(END)
  model = llama.bind(llama.Config(**shape, head_dim=head_dim, tied=True, eos_token_id=end))
  weights = jax.jit(lambda key: initialize(model, key))(jax.random.key(seed))
  save_weights(model, weights, directory, dtype=jnp.float32)
  tokenizer.save(str(directory / "tokenizer.json"))
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
  (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """A byte-level byte-pair tokenizer; digits stay single, so that numbers can be copied."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [  # pyright: ignore
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
  trainer = trainers.BpeTrainer(  # pyright: ignore
    vocab_size=vocab_size,
    special_tokens=[END],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def calculator_text(count: int = 2000) -> list[str]:
  """Questions and transcript lines of the calculator task, for the tokenizer to learn from."""
  tasks = calculator.make_tasks("train", count, two_step=0.3)
  lines = [f"Question: {t.params['question']}\n" for t in tasks]
  return [*lines, *(f"Tool: calc({t.params['expression']})\n" for t in tasks)] + [
    f"Result: {t.params['answer']}\nAnswer: {t.params['answer']}\n" for t in tasks
  ]
