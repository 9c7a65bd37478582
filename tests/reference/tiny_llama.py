"""Saves a random Llama of 0.1M parameters; run as a script by a Python that has transformers.

Usage: python tiny_llama.py DIRECTORY
"""

import sys

import torch
import transformers


def main() -> None:
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    initializer_range=0.15,  # log-probs visibly apart from uniform, logits still small
  )
  transformers.LlamaForCausalLM(config).float().save_pretrained(sys.argv[1])


if __name__ == "__main__":
  main()
