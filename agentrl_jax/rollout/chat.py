"""Messages to token ids and sampled ids to actions; sampled ids are decoded to be read, never
encoded again.

A renderer adds only what is new: the opening once, then each observation with the template text
around it (delta rendering). Message contents are encoded as plain text, so no tool output can place
a live special token; only the template's own text may.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from agentrl_jax.rollout.engine import Finish
from agentrl_jax.rollout.environment import Action, Malformed, Message, Tool, ToolCall
from agentrl_jax.rollout.records import Kind

Ids = Int[np.ndarray, "n"]
Delta = list[tuple[Kind, Ids]]

MAX_ACTION_CHARS = 16_384
MAX_JSON_DEPTH = 16


class Renderer(Protocol):
  """How one model family reads messages and writes actions."""

  vocab_size: int
  stop_token_ids: tuple[int, ...]

  def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
    """The first prompt, ready for the policy to write."""
    ...

  def observation(self, messages: Sequence[Message], finish: Finish) -> Delta:
    """What follows a sampled turn, up to the next one: GLUE (the template's) and OBSERVATION
    segments.

    The turn's end marker is glue if the turn did not end by a sampled stop token, and absent if it
    did.
    """
    ...

  def parse(self, ids: Ids) -> Action:
    """The action of a finished turn. Never raises: what cannot be read is `Malformed`."""
    ...

  def text(self, ids: Ids) -> str:
    """Decoded text for reading and viewing; may be lossy."""
    ...

  def write(self, action: Action) -> Ids:
    """A scripted action as a finished turn, end marker included: how demonstrations are made."""
    ...


@dataclasses.dataclass(frozen=True)
class Codec:
  """One tokenizer, read twice: `template` text may hold special tokens, `plain` text may not."""

  template: Tokenizer
  plain: Tokenizer
  prefix: Ids  # what the tokenizer puts before every text (a beginning-of-sequence id, or nothing)
  end_ids: tuple[int, ...]
  vocab_size: int

  def encode(self, text: str) -> Ids:
    """Template text: special-token text becomes special ids."""
    return np.asarray(self.template.encode(text, add_special_tokens=False).ids, np.int32)

  def encode_plain(self, text: str) -> Ids:
    """Anybody's text: special-token text stays text."""
    return np.asarray(self.plain.encode(text, add_special_tokens=False).ids, np.int32)

  def decode(self, ids: Ids) -> str:
    return self.template.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one is enough


def load_tokenizer(directory: str) -> Any:
  """The fast tokenizer of a Hugging Face model directory, with its chat template. Reads local files
  only.

  Raises:
    FileNotFoundError: the directory holds no tokenizer.
    ValueError: one that is not fast.
  """
  if not any((Path(directory) / name).is_file() for name in _TOKENIZERS):
    raise FileNotFoundError(f"{directory}: no tokenizer, expected tokenizer.json")
  from transformers import AutoTokenizer  # slow to import, and scripted runs do without

  tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
  if not hasattr(tokenizer, "backend_tokenizer"):
    raise ValueError(f"{directory}: {type(tokenizer).__name__} is not a fast tokenizer")
  return tokenizer


def make_codec(tokenizer: Any, vocab_size: int | None = None) -> Codec:
  """Both readings of a transformers fast tokenizer.

  Args:
    tokenizer: a `PreTrainedTokenizerFast`.
    vocab_size: rows of the model's unembedding, if more than the tokenizer's ids (padded
      vocabularies).

  Raises:
    ValueError: the tokenizer has ids outside `vocab_size`, or reads an added token's text as that
      token even with its added tokens removed.
  """
  backend: Tokenizer = tokenizer.backend_tokenizer
  size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
  if vocab_size is not None and vocab_size < size:
    raise ValueError(f"the model has {vocab_size} vocabulary rows, its tokenizer needs {size}")
  added = backend.get_added_tokens_decoder()
  plain = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"added_tokens": []}))
  for index, token in added.items():
    if token.special and index in plain.encode(token.content, add_special_tokens=False).ids:
      raise ValueError(f"the tokenizer cannot write {token.content!r} as plain text")
  ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
  return Codec(
    template=backend,
    plain=plain,
    prefix=np.asarray(backend.encode("", add_special_tokens=True).ids, np.int32),
    end_ids=tuple(ends),
    vocab_size=vocab_size or size,
  )


class TranscriptRenderer:
  """A dialogue as labelled lines, one a turn: what a base model can continue from a few examples.

  ```
  Question: Ann has 12 pens and buys 7 more. How many now?
  Tool: calc(12+7)
  Result: 19
  Answer: 19
  ```
  A turn ends at the first token that holds a newline, or at the end-of-text token.
  """

  def __init__(
    self,
    codec: Codec,
    *,
    question: str = "Question:",
    tool: str = "Tool:",
    result: str = "Result:",
    answer: str = "Answer:",
    argument: str = "expression",
  ):
    """`argument` names the one string argument that `name(text)` stands for; others are JSON."""
    self.question, self.tool, self.result, self.answer = question, tool, result, answer
    self.argument = argument
    self.vocab_size = codec.vocab_size
    self._codec = codec
    ids = range(codec.template.get_vocab_size(with_added_tokens=True))
    newline = [i for i in ids if "\n" in codec.decode(np.asarray([i], np.int32))]
    self.stop_token_ids = tuple(sorted({*newline, *codec.end_ids}))

  def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
    del tools  # shown by example
    text = "".join(map(self._lines, messages))
    return np.concatenate([self._codec.prefix, self._codec.encode_plain(text)])

  def observation(self, messages: Sequence[Message], finish: Finish) -> Delta:
    delta = [] if finish == "stop" else [(Kind.GLUE, self._codec.encode_plain("\n"))]
    text = "".join(map(self._lines, messages))
    if text:
      delta.append((Kind.OBSERVATION, self._codec.encode_plain(text)))
    return delta

  def parse(self, ids: Ids) -> Action:
    line = self.text(ids)
    if line.startswith(self.answer):
      return Message("assistant", line)
    if not line.startswith(self.tool):
      return Malformed(line, f"a line starts with {self.tool!r} or {self.answer!r}")
    call = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*\((.*)\)", line[len(self.tool) :])
    if call is None:
      return Malformed(line, f"a call is written {self.tool} name(argument)")
    name, inner = call.group(1), call.group(2).strip()
    if not inner.startswith("{"):
      return (ToolCall(name, {self.argument: inner}),)
    arguments = _json_object(inner)
    return (
      Malformed(line, arguments) if isinstance(arguments, str) else (ToolCall(name, arguments),)
    )

  def text(self, ids: Ids) -> str:
    kept = ids[:-1] if len(ids) and int(ids[-1]) in self._codec.end_ids else ids
    return self._codec.decode(kept).split("\n", 1)[0].strip()

  def write(self, action: Action) -> Ids:
    line = f"{action.text}\n" if isinstance(action, Malformed) else self._lines(_as_message(action))
    return self._codec.encode_plain(line)

  def _lines(self, message: Message) -> str:
    content = " ".join(message.content.split())
    match message.role:
      case "user":
        return f"{self.question} {content}\n"
      case "tool":
        return f"{self.result} {content}\n"
      case "assistant":
        lines = [f"{self.tool} {call.name}({self._inner(call)})\n" for call in message.tool_calls]
        if content:
          labelled = content.startswith((self.answer, self.tool)) or lines
          lines.append(f"{content}\n" if labelled else f"{self.answer} {content}\n")
        return "".join(lines)
      case "system":
        return f"{content}\n"

  def _inner(self, call: ToolCall) -> str:
    plain = call.arguments.keys() == {self.argument} and isinstance(
      call.arguments[self.argument], str
    )
    return call.arguments[self.argument] if plain else json.dumps(call.arguments)


_PROBE_CALL = ToolCall("probe_tool", {"probe_argument": "probe value"})
_PROBE_TOOL = Tool("probe_tool", "A probe.", {"type": "object", "properties": {}})
_SLOT = re.compile(
  "\ue000(\\d+)\ue001"
)  # private-use characters: where a content goes in a template
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ChatRenderer:
  """A model's own chat template, with tool calls written `<tool_call>{"name",
  "arguments"}</tool_call>`.

  Tools are rendered by the template where it knows tools in that form; else their JSON schemas are
  added to the system message as text. A template without a tool role gets results in user messages.
  """

  def __init__(self, tokenizer: Any, codec: Codec, *, stop_token_ids: Sequence[int] = ()):
    """
    Args:
      tokenizer: a `PreTrainedTokenizerFast` with a chat template.
      codec: `make_codec(tokenizer, vocab_size)`.
      stop_token_ids: further stops, from the model's generation configuration.

    Raises:
      ValueError: no chat template, or its assistant turns do not end with one special token.
    """
    if not tokenizer.chat_template:
      raise ValueError("the tokenizer has no chat template; use TranscriptRenderer")
    self.vocab_size = codec.vocab_size
    self._tokenizer, self._codec = tokenizer, codec
    self._native_tools = self._knows_tools()
    self._native_results = self._shows_results()
    self._tail = self._after_turn([], False)
    tail = codec.encode(self._tail)
    if not len(tail) or int(tail[0]) not in codec.template.get_added_tokens_decoder():
      raise ValueError(
        f"an assistant turn ends with {self._tail!r}, expected a special token first"
      )
    self._end_id = int(tail[0])
    self._end = codec.template.get_added_tokens_decoder()[self._end_id].content
    self.stop_token_ids = tuple(sorted({self._end_id, *codec.end_ids, *stop_token_ids}))

  def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
    messages = list(messages)
    if tools and not self._native_tools:
      head = messages.pop(0).content if messages and messages[0].role == "system" else ""
      messages.insert(0, Message("system", f"{head}\n\n{_describe(tools)}".strip()))
    native = tools if self._native_tools else ()
    pieces = self._pieces(messages, lambda m: self._render(m, native, prompt=True))
    parts = [self._codec.encode_plain(s) if plain else self._codec.encode(s) for plain, s in pieces]
    return np.concatenate(parts)

  def observation(self, messages: Sequence[Message], finish: Finish) -> Delta:
    pieces = self._pieces(messages, lambda m: self._after_turn(m, True))
    (_, first), *rest = pieces
    if not first.startswith(self._tail):
      raise ValueError(
        f"the template rewrites an ended turn: {first!r} after it, not {self._tail!r}"
      )
    if finish == "stop":
      first = first.removeprefix(self._end)
    delta = []
    for plain, text in [(False, first), *rest]:
      if text:
        kind, encode = (
          (Kind.OBSERVATION, self._codec.encode_plain) if plain else (Kind.GLUE, self._codec.encode)
        )
        delta.append((kind, encode(text)))
    return delta

  def parse(self, ids: Ids) -> Action:
    text = self.text(ids)
    if len(text) > MAX_ACTION_CHARS:
      return Malformed(text, f"{len(text)} characters, at most {MAX_ACTION_CHARS} are read")
    if "<think>" in text and "</think>" not in text:
      return Malformed(text, "the reasoning was not closed with </think>")
    return parse_calls(text.rpartition("</think>")[2])

  def text(self, ids: Ids) -> str:
    kept = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_token_ids else ids
    return self._codec.decode(kept)

  def write(self, action: Action) -> Ids:
    message = _as_message(action)
    ids = self._codec.encode_plain(message.content or _write_calls(message.tool_calls))
    return np.append(ids, self._end_id).astype(np.int32)

  def _render(
    self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool
  ) -> str:
    schemas = [
      {
        "type": "function",
        "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
      }
      for t in tools
    ]
    return self._tokenizer.apply_chat_template(
      [_as_dict(m) for m in messages],
      tools=schemas or None,
      tokenize=False,
      add_generation_prompt=prompt,
    )

  def _after_turn(self, messages: Sequence[Message], prompt: bool) -> str:
    """What the template writes after an assistant's content when `messages` follow it."""
    turn = Message("assistant", "\ue002")
    text = self._render([Message("user", "question"), turn, *messages], prompt=prompt)
    head, found, after = text.rpartition("\ue002")
    if not found or "\ue002" in head:
      raise ValueError("the template does not write an assistant's content exactly once")
    return after

  def _pieces(
    self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
  ) -> list[tuple[bool, str]]:
    """`render(messages)` as (is content, text) pieces that join to it; the first piece is the
    template's.

    Contents never pass through the template as ids: it is rendered with slots in their place, and
    the result is compared, as text, with the rendering of the contents themselves.
    """
    known = self._adapt(messages)
    for contents in ([m.content for m in known], [m.content.strip() for m in known]):
      slots = [dataclasses.replace(m, content=f"\ue000{i}\ue001") for i, m in enumerate(known)]
      texts = _SLOT.split(
        render([s if c else m for s, m, c in zip(slots, known, contents, strict=True)])
      )
      pieces = [(i % 2 == 1, contents[int(t)] if i % 2 else t) for i, t in enumerate(texts)]
      if "".join(text for _, text in pieces) == render(known):
        return pieces
    raise ValueError(
      "the template rewrites the contents of messages, so they cannot be kept as text"
    )

  def _adapt(self, messages: Sequence[Message]) -> list[Message]:
    """The same messages with only the roles and fields that the template knows."""
    adapted: list[Message] = []
    for message in messages:
      if message.tool_calls and not self._native_tools:
        content = f"{message.content}\n{_write_calls(message.tool_calls)}".strip()
        message = Message("assistant", content)
      if message.role == "tool" and not self._native_results:
        content = f"<tool_response>\n{message.content}\n</tool_response>"
        if (
          adapted
          and adapted[-1].role == "user"
          and adapted[-1].content.startswith("<tool_response>")
        ):
          content = f"{adapted.pop().content}\n{content}"
        message = Message("user", content)
      adapted.append(message)
    return adapted

  def _knows_tools(self) -> bool:
    asked = Message("user", "question")
    try:
      call = self._render([asked, Message("assistant", "", (_PROBE_CALL,))], prompt=False)
      tools = self._render([asked], [_PROBE_TOOL], prompt=True)
    except Exception:  # a template refuses what it does not know in its own way
      return False
    found = _CALL.findall(call)
    return (
      _PROBE_TOOL.name in tools
      and bool(found)
      and parse_calls(f"<tool_call>{found[-1]}</tool_call>") == (_PROBE_CALL,)
    )

  def _shows_results(self) -> bool:
    try:
      return "probe result" in self._after_turn([Message("tool", "probe result", name="t")], True)
    except Exception:  # as above
      return False


def parse_calls(text: str) -> Action:
  """Every `<tool_call>` block of a turn's text in order; without one, the text as a message.

  One unreadable block makes the whole turn `Malformed`: nothing of it is executed.
  """
  blocks = _CALL.findall(text)
  if text.count("<tool_call>") != len(blocks) or text.count("</tool_call>") != len(blocks):
    return Malformed(text, "a <tool_call> is not closed")
  if not blocks:
    return Message("assistant", text.strip())
  calls = []
  for block in blocks:
    data = _json_object(block.strip())
    if isinstance(data, str):
      return Malformed(text, data)
    name, arguments = data.get("name"), data.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
      return Malformed(text, 'a tool call is {"name": text, "arguments": object}')
    calls.append(ToolCall(name, arguments))
  return tuple(calls)


def _json_object(text: str) -> dict[str, Any] | str:
  """The object, or the reason why it is none. Size and depth are bounded before parsing."""
  depth = deepest = 0
  for character in text:
    depth += (character in "[{") - (character in "]}")
    deepest = max(deepest, depth)
  if len(text) > MAX_ACTION_CHARS or deepest > MAX_JSON_DEPTH:
    return f"JSON of {len(text)} characters and depth {deepest} is too large"
  try:
    data = json.loads(text, parse_constant=_refuse)
  except ValueError as error:
    return f"not JSON: {str(error)[:80]}"
  return data if isinstance(data, dict) else "not a JSON object"


def _refuse(constant: str) -> None:
  raise ValueError(f"{constant} is no JSON number")


def _as_message(action: Action) -> Message:
  match action:
    case Message():
      return action
    case Malformed():
      return Message("assistant", action.text)
    case calls:
      return Message("assistant", "", tuple(calls))


def _as_dict(message: Message) -> dict[str, Any]:
  data: dict[str, Any] = {"role": message.role, "content": message.content}
  if message.name is not None:
    data["name"] = message.name
  if message.tool_calls:
    data["tool_calls"] = [
      {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
      for c in message.tool_calls
    ]
  return data


def _write_calls(calls: Sequence[ToolCall]) -> str:
  return "\n".join(
    f"<tool_call>\n{_json({'name': c.name, 'arguments': dict(c.arguments)})}\n</tool_call>"
    for c in calls
  )


def _describe(tools: Sequence[Tool]) -> str:
  schemas = "\n".join(_json(dataclasses.asdict(t)) for t in tools)
  example = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
  return f"Tools you can call, as JSON schemas:\n{schemas}\nTo call one, write:\n{example}"


def _json(value: Mapping[str, Any]) -> str:
  return json.dumps(value, ensure_ascii=False)
