"""Log-probs of given tokens by transformers in float32; run as a script by a Python that has it.

Reads a line of JSON for each job, {number, model, samples: [[prompt ids, sampled ids, temperature],
...]}; answers each with one: [number, a list of log-probs a sample].
"""

import json
import sys

import torch
import transformers


def log_probs(job: dict) -> list[list[float]]:
  model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
  result = []
  for prompt, sampled, temperature in job["samples"]:
    with torch.no_grad():
      logits = model(torch.tensor([prompt + sampled])).logits[0]
    row = []
    for k, token in enumerate(sampled):
      scaled = logits[len(prompt) + k - 1] / temperature
      row.append((scaled[token] - torch.logsumexp(scaled, 0)).item())
    result.append(row)
  return result


if __name__ == "__main__":
  for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps([job["number"], log_probs(job)]), flush=True)
