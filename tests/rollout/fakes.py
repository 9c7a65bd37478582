"""A byte-level tokenizer with chat templates, a scripted engine and a small environment."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl_jax.rollout.engine import Generation, SamplingParams
from agentrl_jax.rollout.environment import Action, EnvFault, Message, Opening, Step
from agentrl_jax.rollout.records import Task

CHATML = (
  "{% for m in messages %}"
  "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Tools and calls in the template's own words, results merged into one user turn, and the reasoning
# of every assistant turn but the last removed: what current thinking models do.
HERMES = (
  "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}"
  "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
  "{% for m in messages %}"
  "{% if m.role == 'tool' %}"
  "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
  "{{ '<|im_start|>user' }}{% endif %}"
  "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
  "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
  "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
  "{% if m.role == 'assistant' %}"
  "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
  "{{ m.content.split('</think>')[-1] }}"
  '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", '
  "\"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
  "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
  """One token a byte, then <|im_start|> 256, <|im_end|> 257 and the two tool-call tags."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS[:2]])
  tokenizer.add_tokens([AddedToken(s, special=False) for s in SPECIALS[2:]])
  fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
  fast.chat_template = template
  return fast


def generation(ids: Sequence[int], finish: str = "stop", version: int = 0) -> Generation:
  n = len(ids)
  return Generation(
    np.asarray(ids, np.int32),
    -0.01 * np.arange(1, n + 1, dtype=np.float32),
    np.full(n, version, np.int32),
    finish,
  )


@dataclasses.dataclass
class FakeEngine:
  """Answers with `turn(request_id, prompt, params)`; a raised exception is the engine's."""

  turn: Callable[[str, Sequence[int], SamplingParams], Any]
  name: str = "fake"
  alive: bool = True
  calls: list[tuple[str, tuple[int, ...], SamplingParams]] = dataclasses.field(default_factory=list)
  aborted: list[str] = dataclasses.field(default_factory=list)
  running: int = 0
  most: int = 0

  async def generate(
    self, request_id: str, prompt: Sequence[int], params: SamplingParams
  ) -> Generation:
    self.calls.append((request_id, tuple(prompt), params))
    self.running += 1
    self.most = max(self.most, self.running)
    try:
      await asyncio.sleep(0)
      answer = self.turn(request_id, prompt, params)
      return await answer if asyncio.iscoroutine(answer) else answer
    finally:
      self.running -= 1

  async def version(self) -> int:
    return 0

  async def healthy(self) -> bool:
    return self.alive

  async def abort(self, request_id: str) -> None:
    self.aborted.append(request_id)

  async def close(self) -> None:
    return None


@dataclasses.dataclass
class EchoEnv:
  """Answers each action with `observations[k]`, ends at a message; `fail` raises at that step."""

  observations: Sequence[Sequence[Message]]
  fail: dict[int, Exception] = dataclasses.field(default_factory=dict)
  slow: float = 0.0
  actions: list[Action] = dataclasses.field(default_factory=list)
  closed: int = 0
  cuts: list[str] = dataclasses.field(default_factory=list)

  async def step(self, action: Action) -> Step:
    k = len(self.actions)
    self.actions.append(action)
    if self.slow:
      await asyncio.sleep(self.slow)
    if k in self.fail:
      raise self.fail[k]
    if isinstance(action, Message):
      return Step((), {"correct": float(action.content == "yes")}, terminated=True)
    messages = tuple(self.observations[k % len(self.observations)])
    return Step(messages, {"step": 0.25}, terminated=False, info={"steps": 1.0})

  async def cut(self, reason: str) -> Step:
    self.cuts.append(reason)
    return Step((), {"cut": 0.5}, terminated=False, truncated=True)

  async def close(self) -> None:
    self.closed += 1


def opening(env: EchoEnv, turn_limit: int = 8, state_hash: str = "s0") -> Opening:
  return Opening(env, (Message("user", "go"),), (), turn_limit, state_hash)


TASK = Task("echo", "train", 0, {})
FAULT = EnvFault("sandbox", "lost")
