"""Decoding speed: the embedded sampler beside a SGLang server on the same machine and prompts.

    python -m benchmarks.rollout --model=models/smollm2-135m-instruct [--smoke]

The engines take turns round by round, so that other work on the machine slows both. Every round
has new prompts with one common few-shot prefix, which both engines keep. CPU-seconds are those of
this process for the embedded engine, and of this process and the server's for SGLang.
"""

import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from agentrl_jax.models.hf import load_model, load_weights
from agentrl_jax.rollout.engine import Engine, SamplingParams
from agentrl_jax.rollout.sglang import SGLangEngine
from agentrl_jax.rollout.sglang_server import ServerOptions, SGLangServer
from agentrl_jax.sampler.engine import EmbeddedEngine

MODEL = flags.DEFINE_string("model", "models/smollm2-135m-instruct", "A Hugging Face directory.")
SMOKE = flags.DEFINE_bool("smoke", False, "One short round at batch 1 and 4: does it run?")
BATCHES = flags.DEFINE_list("batches", ["1", "8", "32"], "Prompts at a time.")
OUTPUT = flags.DEFINE_string("output", "", "JSON file (default: benchmarks/results/rollout.json).")

CONTEXT = 256
FEW_SHOT = """Question: A farmer has 12 cows and buys 7 more. How many cows are there now?
Tool: calc(12+7)
Result: 19
Answer: 19

Question: A shop sells 6 boxes of 8 pens. How many pens is that?
Tool: calc(6*8)
Result: 48
Answer: 48

"""
Round = dict[str, float]  # tokens, wall_seconds, cpu_seconds


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
  """Few-shot examples and a question that no other (count, seed) has."""
  numbers = random.Random(seed)
  texts = [
    f"{FEW_SHOT}Question: A child has {numbers.randint(2, 999)} shells and finds "
    f"{numbers.randint(2, 999)} more. How many shells are there now?\nTool:"
    for _ in range(count)
  ]
  return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def group_cpu_seconds(group: int) -> float:
  """User and system time of all living processes of a process group (Linux)."""
  ticks = 0
  for stat in Path("/proc").glob("[0-9]*/stat"):
    try:
      fields = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue  # it ended between listing and reading
    if int(fields[2]) == group:
      ticks += int(fields[11]) + int(fields[12])
  return ticks / os.sysconf("SC_CLK_TCK")


async def measure(
  engine: Engine,
  cpu_seconds: Callable[[], float],
  batch: Sequence[Sequence[int]],
  params: Sequence[SamplingParams],
  label: str,
) -> Round:
  """One turn of every prompt, all submitted at once."""
  cpu, wall = cpu_seconds(), time.perf_counter()
  calls = [
    engine.generate(f"{label}-{i}", prompt, p)
    for i, (prompt, p) in enumerate(zip(batch, params, strict=True))
  ]
  found = await asyncio.gather(*calls)
  return {
    "tokens": sum(len(g.ids) for g in found),
    "wall_seconds": time.perf_counter() - wall,
    "cpu_seconds": cpu_seconds() - cpu,
  }


async def compare(
  engines: dict[str, tuple[Engine, Callable[[], float]]],
  tokenizer: Tokenizer,
  stop: tuple[int, ...],
  *,
  batches: Sequence[int],
  rounds: int,
  new_tokens: int,
) -> list[dict[str, Any]]:
  """Medians over `rounds` of every engine at every batch, after one round that is not counted."""
  results, seeds = [], itertools.count()
  for batch in batches:
    measured: dict[str, list[Round]] = {name: [] for name in engines}
    for repetition in range(rounds + 1):
      seed = next(seeds)
      ids = prompts(tokenizer, batch, seed)
      params = [SamplingParams(new_tokens, stop, 1.0, 1000 * seed + i) for i in range(batch)]
      for name, (engine, cpu_seconds) in engines.items():
        one = await measure(engine, cpu_seconds, ids, params, f"{batch}-{repetition}")
        if repetition:
          measured[name].append(one)
    results += [summary(name, batch, found) for name, found in measured.items()]
  return results


def summary(engine: str, batch: int, rounds: Sequence[Round]) -> dict[str, Any]:
  """Medians of the rates and times of one engine at one batch."""
  return {
    "engine": engine,
    "batch": batch,
    "rounds": len(rounds),
    "tokens_per_second": statistics.median(r["tokens"] / r["wall_seconds"] for r in rounds),
    "tokens_per_cpu_second": statistics.median(r["tokens"] / r["cpu_seconds"] for r in rounds),
    "wall_seconds": statistics.median(r["wall_seconds"] for r in rounds),
    "cpu_seconds": statistics.median(r["cpu_seconds"] for r in rounds),
  }


def show(results: Sequence[dict[str, Any]]) -> None:
  table = Table("engine", "batch", "tokens/s", "tokens/CPU-s", "wall s", "CPU s")
  for r in results:
    numbers = (r["tokens_per_second"], r["tokens_per_cpu_second"])
    seconds = (r["wall_seconds"], r["cpu_seconds"])
    table.add_row(
      r["engine"], str(r["batch"]), *(f"{x:.0f}" for x in numbers), *(f"{x:.2f}" for x in seconds)
    )
  Console().print(table)


def main(arguments: Sequence[str]) -> None:
  del arguments
  directory = Path(MODEL.value)
  batches, rounds, new_tokens = (
    ((1, 4), 1, 4) if SMOKE.value else (tuple(map(int, BATCHES.value)), 5, 24)
  )
  model = load_model(directory)
  embedded = EmbeddedEngine(
    model, load_weights(model, directory), slots=max(batches), context=CONTEXT, seed=0
  )
  end = model.config.eos_token_id
  stop = end if isinstance(end, tuple) else () if end is None else (end,)
  tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
  with SGLangServer(ServerOptions(directory, context_length=CONTEXT)) as server:
    sglang = SGLangEngine(server.url, model.config.vocab_size, server=server)
    engines = {
      "embedded": (embedded, time.process_time),
      "sglang": (sglang, lambda: time.process_time() + group_cpu_seconds(server.pid)),
    }

    async def run():
      try:
        return await compare(
          engines, tokenizer, stop, batches=batches, rounds=rounds, new_tokens=new_tokens
        )
      finally:
        await sglang.close()
        await embedded.close()

    results = asyncio.run(run())
  show(results)
  record = {
    "model": directory.name,
    "dtype": "float32",
    "new_tokens": new_tokens,
    "prompt_tokens": len(prompts(tokenizer, 1, 0)[0]),
    "cores": os.cpu_count(),
    "load_average": os.getloadavg()[0],
    "python": platform.python_version(),
    "jax": jax.__version__,
    "results": results,
  }
  default = Path(__file__).parent / "results" / "rollout.json"
  output = Path(OUTPUT.value) if OUTPUT.value else default
  if OUTPUT.value or not SMOKE.value:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
