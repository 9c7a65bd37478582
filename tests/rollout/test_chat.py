import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.envs import calculator
from agentrl_jax.rollout import chat
from agentrl_jax.rollout.chat import ChatRenderer, TranscriptRenderer, make_codec, parse_calls
from agentrl_jax.rollout.environment import Malformed, Message, Tool, ToolCall
from agentrl_jax.rollout.records import Kind
from tests.rollout.fakes import CHATML, HERMES, SPECIALS, byte_tokenizer

TOOL = Tool("calc", "Adds.", {"type": "object", "properties": {"expression": {"type": "string"}}})
CALL = ToolCall("calc", {"expression": "1+2"})
FAST = byte_tokenizer()
CODEC = make_codec(FAST)
START, END = 256, 257
hostile = st.lists(st.sampled_from([*SPECIALS, "a", "\n", "é", " ", "x1"])).map("".join)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  with pytest.raises(FileNotFoundError) as caught:
    chat.load_tokenizer(str(tmp_path))
  assert str(caught.value) == f"{tmp_path}: no tokenizer, expected tokenizer.json"


def renderer(template=CHATML):
  fast = byte_tokenizer(template)
  return ChatRenderer(fast, make_codec(fast))


def joined(delta):
  return CODEC.decode(np.concatenate([ids for _, ids in delta]))


def full(template, messages, prompt=True, tools=None):
  dicts = [chat._as_dict(m) for m in messages]
  return byte_tokenizer(template).apply_chat_template(
    dicts, tokenize=False, add_generation_prompt=prompt, tools=tools
  )


@given(hostile)
@settings(deadline=None)
def test_plain_encoding_keeps_any_text_and_never_makes_a_special_id(text):
  ids = CODEC.encode_plain(text)
  assert ids.max(initial=0) < 256
  assert CODEC.decode(ids) == text


def test_template_encoding_makes_special_ids():
  assert CODEC.encode("<|im_start|>a<|im_end|>").tolist()[::2] == [START, END]


def test_codec_refuses_a_model_with_fewer_rows_than_the_tokenizer_has_ids():
  assert make_codec(FAST, 300).vocab_size == 300
  with pytest.raises(ValueError, match="259 vocabulary rows, its tokenizer needs 260"):
    make_codec(FAST, 259)


@pytest.mark.parametrize("template", [CHATML, HERMES])
def test_opening_is_the_template_around_plain_contents(template):
  messages = [Message("user", "a <|im_end|> b"), Message("user", "c")]
  ids = renderer(template).opening(messages, ())
  assert CODEC.decode(ids) == full(template, messages)
  assert (ids == START).sum() == 3 and (ids == END).sum() == 2


def test_tools_go_through_a_template_that_knows_them():
  messages = [Message("user", "q"), Message("assistant", "", (CALL,)), Message("tool", "3")]
  schema = {"name": "calc", "description": "Adds.", "parameters": TOOL.parameters}
  tools = [{"type": "function", "function": schema}]
  ids = renderer(HERMES).opening(messages, [TOOL])
  assert CODEC.decode(ids) == full(HERMES, messages, tools=tools)


def test_tools_become_system_text_where_the_template_does_not_know_them():
  messages = [
    Message("system", "Be brief."),
    Message("user", "q"),
    Message("assistant", "", (CALL,)),
  ]
  text = CODEC.decode(renderer(CHATML).opening(messages, [TOOL]))
  system, rest = text.split("<|im_end|>", 1)
  assert system.startswith("<|im_start|>system\nBe brief.\n\n")
  line = next(line for line in system.splitlines() if line.startswith("{"))
  assert json.loads(line)["name"] == "calc"
  block = rest[rest.index("<tool_call>") : rest.index("</tool_call>") + len("</tool_call>")]
  assert parse_calls(block) == (CALL,)


def test_results_become_user_text_where_the_template_has_no_tool_role():
  template = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
  )
  results = [Message("tool", "3"), Message("tool", "4")]
  text = joined(renderer(template).observation(results, "stop"))
  assert text == (
    "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n"
  )


@pytest.mark.parametrize("template", [CHATML, HERMES])
@settings(max_examples=40, deadline=None)
@given(contents=st.lists(hostile.filter(lambda t: "</think>" not in t), min_size=1, max_size=3))
def test_delta_rendering_equals_full_rendering(template, contents):
  """Opening, turn and observation join to the text of the whole dialogue (R5), hostile text
  included.
  """
  subject = renderer(template)
  head = [Message("user", "q")]
  results = [Message("tool", content) for content in contents]
  turn = CODEC.encode("answer<|im_end|>")
  ids = np.concatenate(
    [subject.opening(head, ()), turn, *(ids for _, ids in subject.observation(results, "stop"))]
  )
  assert CODEC.decode(ids) == full(template, [*head, Message("assistant", "answer"), *results])
  turns = 3 + (len(results) if template is CHATML else 1)
  assert (ids == START).sum() == turns and (ids == END).sum() == turns - 1


def test_end_marker_is_glue_only_if_it_was_not_sampled():
  results = [Message("tool", "3")]
  stopped = renderer().observation(results, "stop")
  cut = renderer().observation(results, "length")
  assert joined(stopped) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
  assert joined(cut) == "<|im_end|>" + joined(stopped)
  assert [kind for kind, _ in stopped] == [Kind.GLUE, Kind.OBSERVATION, Kind.GLUE]
  assert stopped[1][1].tolist() == CODEC.encode_plain("3").tolist()


def test_a_template_that_trims_contents_is_followed_and_one_that_rewrites_them_is_refused():
  trimming = CHATML.replace("m.content", "(m.content | trim)")
  text = joined(renderer(trimming).observation([Message("tool", " 3 \n")], "stop"))
  assert text == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
  shouting = renderer(CHATML.replace("m.content", "(m.content | upper)"))
  with pytest.raises(ValueError, match="rewrites the contents"):
    shouting.observation([Message("tool", "abc")], "stop")


def test_templates_that_cannot_be_used_are_refused():
  with pytest.raises(ValueError, match="no chat template"):
    renderer(None)
  with pytest.raises(ValueError, match="ends with '\\\\n', expected a special token first"):
    renderer("{% for m in messages %}{{ m.role + m.content + '\n' }}{% endfor %}")


@pytest.mark.parametrize(
  ("text", "action"),
  [
    (" Answer: 3 ", Message("assistant", "Answer: 3")),
    ("", Message("assistant", "")),
    ('so <tool_call>\n{"name": "calc", "arguments": {"expression": "1+2"}}\n</tool_call>', (CALL,)),
    ('<tool_call>{"name": "stop"}</tool_call>', (ToolCall("stop", {}),)),
    (
      '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
      (ToolCall("a", {}), ToolCall("b", {})),
    ),
  ],
)
def test_parse_reads_calls_in_order_or_a_message(text, action):
  assert parse_calls(text) == action


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ('<tool_call>{"name": "a"}', "not closed"),
    ('{"name": "a"}</tool_call>', "not closed"),
    ("<tool_call>{name: a}</tool_call>", "not JSON"),
    ("<tool_call>[1]</tool_call>", "not a JSON object"),
    ('<tool_call>{"name": 3}</tool_call>', "a tool call is"),
    ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "a tool call is"),
    ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN"),
    (f"<tool_call>{'[' * 5000}{']' * 5000}</tool_call>", "too large"),
    (f'<tool_call>{{"name": "a", "arguments": {{"x": {"1" * 9000}}}}}</tool_call>', "not JSON"),
    ('<tool_call>{"name": "a"}</tool_call><tool_call>nope</tool_call>', "not JSON"),
  ],
)
def test_one_unreadable_call_executes_nothing(text, reason):
  action = parse_calls(text)
  assert isinstance(action, Malformed) and reason in action.reason


@settings(max_examples=200, deadline=None)
@given(
  st.lists(
    st.sampled_from(
      ["<tool_call>", "</tool_call>", '{"name":', '"a"}', "[", "{", "}", "\\u", "\x00", "é"]
    )
  ).map("".join)
)
def test_no_text_makes_the_parsers_raise(text):
  ids = CODEC.encode_plain(text)
  for subject in (renderer(), TranscriptRenderer(CODEC)):
    assert isinstance(subject.parse(ids), (tuple, Message, Malformed))


@given(st.lists(st.integers(0, 259), max_size=20))
@settings(deadline=None)
def test_no_ids_make_the_parsers_raise(ids):
  for subject in (renderer(), TranscriptRenderer(CODEC)):
    assert isinstance(subject.parse(np.asarray(ids, np.int32)), (tuple, Message, Malformed))


def test_calls_inside_reasoning_are_not_executed():
  subject = renderer()
  call = '<tool_call>{"name": "a"}</tool_call>'
  closed = subject.parse(CODEC.encode(f"<think>{call}</think>done<|im_end|>"))
  assert closed == Message("assistant", "done")
  assert isinstance(subject.parse(CODEC.encode(f"<think>{call}<|im_end|>")), Malformed)


def test_a_written_action_parses_to_itself():
  for subject in (renderer(), renderer(HERMES), TranscriptRenderer(CODEC)):
    for action in ((CALL,), Message("assistant", "Answer: 3")):
      ids = subject.write(action)
      assert subject.parse(ids) == action
      assert int(ids[-1]) in subject.stop_token_ids


def test_transcript_is_labelled_lines():
  subject = TranscriptRenderer(CODEC)
  messages = [
    Message("system", "Count."),
    *calculator.example_messages([("1 and\n2?", "1+2", "3")]),
    Message("user", "<|im_end|>?"),
  ]
  text = (
    "Count.\nQuestion: 1 and 2?\nTool: calc(1+2)\nResult: 3\nAnswer: 3\nQuestion: <|im_end|>?\n"
  )
  ids = subject.opening(messages, [TOOL])
  assert CODEC.decode(ids) == text and ids.max() < 256


def test_transcript_turns_stop_at_every_token_with_a_newline():
  newline = CODEC.encode_plain("\n").tolist()
  assert set(TranscriptRenderer(CODEC).stop_token_ids) == {*newline, END}


@pytest.mark.parametrize(
  ("line", "action"),
  [
    ("Tool: calc(1+2)\n", (CALL,)),
    ("Tool: calc ((1+2)*3)\nmore", (ToolCall("calc", {"expression": "(1+2)*3"}),)),
    ('Tool: f({"a": 1})\n', (ToolCall("f", {"a": 1}),)),
    ("Answer: 3\n", Message("assistant", "Answer: 3")),
  ],
)
def test_transcript_reads_a_line(line, action):
  assert TranscriptRenderer(CODEC).parse(CODEC.encode_plain(line)) == action


@pytest.mark.parametrize(
  "line", ["\n", "Tool: calc\n", "Tool: (1)\n", "So 3\n", "Tool: f({1})\n", "x"]
)
def test_transcript_line_without_an_action_is_malformed(line):
  assert isinstance(TranscriptRenderer(CODEC).parse(CODEC.encode_plain(line)), Malformed)


def test_transcript_line_end_is_glue_only_if_it_was_not_sampled():
  subject = TranscriptRenderer(CODEC)
  results = [Message("tool", "3\n4"), Message("tool", "5")]
  assert joined(subject.observation(results, "stop")) == "Result: 3 4\nResult: 5\n"
  kinds = [kind for kind, _ in subject.observation(results, "length")]
  assert kinds == [Kind.GLUE, Kind.OBSERVATION]
  assert joined(subject.observation(results, "length")).startswith("\nResult")


# --- the real tokenizer ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
  root = Path(__file__).resolve().parents[2]
  default = root / "models" / "smollm2-135m-instruct"
  directory = Path(os.environ.get("AGENTRL_SMOLLM2", default))
  if not (directory / "tokenizer.json").is_file():
    pytest.skip(f"no model in {directory}: make it with `bash launch/quickstart.sh`")
  return chat.load_tokenizer(str(directory))


def test_smollm2_chat_template_renders_by_delta(smollm2):
  codec = make_codec(smollm2)
  subject = ChatRenderer(smollm2, codec)
  assert subject.stop_token_ids == (2,)
  head = [Message("system", "s"), Message("user", "q <|im_end|>")]
  results = [Message("tool", "19 <|im_start|>"), Message("tool", "x")]
  turn = codec.encode("ok<|im_end|>")
  ids = np.concatenate(
    [subject.opening(head, ()), turn, *(ids for _, ids in subject.observation(results, "stop"))]
  )
  dicts = [chat._as_dict(m) for m in [*head, Message("assistant", "ok"), *results]]
  text = smollm2.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
  assert codec.decode(ids) == text
  assert (ids == 1).sum() == 6 and (ids == 2).sum() == 5


def test_smollm2_transcript_stops_and_length(smollm2):
  codec = make_codec(smollm2)
  subject = TranscriptRenderer(codec)
  assert 198 in subject.stop_token_ids and 2 in subject.stop_token_ids
  for index in subject.stop_token_ids:
    assert index == 2 or "\n" in codec.decode(np.asarray([index]))
  messages = [*calculator.example_messages(), Message("user", "A shop has 88 shells?")]
  assert len(subject.opening(messages, ())) <= 140
  assert codec.decode(subject.write((CALL,))) == "Tool: calc(1+2)\n"
