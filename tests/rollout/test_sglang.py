"""The client against answers that a real server would not give on demand."""

import asyncio
import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from agentrl_jax.rollout.engine import EngineDead, EngineError, SamplingParams
from agentrl_jax.rollout.sglang import SGLangEngine, read_generation, read_version, sampling_fields

VOCABULARY = 1000
PARAMS = SamplingParams(max_new_tokens=4, stop_token_ids=(9,), temperature=0.7, seed=3)


def good_answer() -> dict:
  return {
    "output_ids": [512, 880, 9],
    "meta_info": {
      "finish_reason": {"type": "stop", "matched": 9},
      "output_token_logprobs": [[-0.1, 512, None], [-2.3, 880, None], [5e-7, 9, None]],
      "weight_version": "run:4",
      "weight_versions": [
        {"version": "run:3", "start": 0, "end": 2},
        {"version": "run:4", "start": 2, "end": 3},
      ],
    },
  }


def read(answer: dict):
  return read_generation(answer, PARAMS, VOCABULARY, "engine e, request r")


def test_reads_a_good_answer():
  generation = read(good_answer())
  np.testing.assert_array_equal(generation.ids, [512, 880, 9])
  np.testing.assert_array_equal(generation.logp, np.float32([-0.1, -2.3, 0.0]))  # rounding clamped
  np.testing.assert_array_equal(generation.version, [3, 3, 4])
  assert generation.ids.dtype == generation.version.dtype == np.int32
  assert generation.logp.dtype == np.float32
  assert generation.finish == "stop"


def test_one_version_for_all_tokens_when_the_server_reports_no_spans():
  answer = good_answer()
  del answer["meta_info"]["weight_versions"]
  np.testing.assert_array_equal(read(answer).version, [4, 4, 4])


def test_an_abort_before_the_first_token_is_an_empty_generation():
  meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_versions": []}
  generation = read({"output_ids": [], "meta_info": meta})
  assert generation.finish == "abort" and len(generation.ids) == len(generation.version) == 0


@pytest.mark.parametrize(
  ("text", "version"), [("default", 0), ("7", 7), ("run:7", 7), ("a:b:12", 12), (5, 5)]
)
def test_versions(text, version):
  assert read_version(text, "e") == version


@pytest.mark.parametrize("text", ["", "run:", "x", "-1", None, "1.5", [3]])
def test_refused_versions(text):
  with pytest.raises(EngineError, match="weight version"):
    read_version(text, "e")


def put(*path_and_value) -> Callable[[dict], None]:
  """Sets a nested entry; used to damage a good answer in one place."""

  def apply(answer):
    *path, last, value = path_and_value
    for key in path:
      answer = answer[key]
    answer[last] = value

  return apply


LOGPROBS = ("meta_info", "output_token_logprobs")
SPANS = ("meta_info", "weight_versions")


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda a: a.pop("output_ids"), "malformed answer, KeyError..output_ids"),
    (lambda a: a.pop("meta_info"), "malformed answer, KeyError..meta_info"),
    (lambda a: a["meta_info"].pop("output_token_logprobs"), "output_token_logprobs"),
    (put("meta_info", "finish_reason", None), "malformed answer"),
    (put("meta_info", "finish_reason", "type", "tired"), "'tired', expected stop, length or abort"),
    (put(*LOGPROBS, None), "3 output ids but 0 log-probs"),
    (lambda a: a["meta_info"]["output_token_logprobs"].pop(), "3 output ids but 2 log-probs"),
    # The sampled id is not the first or the likeliest entry of anything: the id itself must match.
    (put(*LOGPROBS, 1, [-0.1, 512, None]), "position 1: the log-prob is of id 512.* is 880"),
    (put(*LOGPROBS, 1, [float("nan"), 880, None]), "position 1: log-prob of id 880 is nan"),
    (put(*LOGPROBS, 0, [float("-inf"), 512, None]), "position 0: log-prob of id 512 is -inf"),
    (put(*LOGPROBS, 2, [None, 9, None]), "position 2: log-prob of id 9 is None"),
    (put(*LOGPROBS, 2, [0.01, 9, None]), "position 2: log-prob of id 9 is 0.01"),
    (put(*LOGPROBS, 2, -0.3), "position 2: log-prob entry -0.3"),
    (put("output_ids", 0, VOCABULARY), r"output id 1000 at 0 is outside \[0, 1000\)"),
    (put("output_ids", 0, 1.5), "output id 1.5 at 0"),
    (put("output_ids", [1] * 5), "5 output ids"),
    (put("meta_info", "finish_reason", "matched", 8), "stopped by 8, but the last output id is 9"),
    (put(*SPANS, 0, "end", 1), "after 1 of 3 tokens"),
    (put(*SPANS, 1, "end", 9), "of 3 tokens"),
    (lambda a: a["meta_info"]["weight_versions"].pop(), "cover 2 of 3 tokens"),
    (put(*SPANS, 0, {}), "malformed version span"),
    (put(*SPANS, 0, "version", "new"), "weight version 'new'"),
  ],
)
def test_refuses_a_damaged_answer_naming_place_and_value(damage, message):
  answer = good_answer()
  damage(answer)
  with pytest.raises(EngineError, match=message) as caught:
    read(answer)
  assert str(caught.value).startswith("engine e, request r")


def test_more_tokens_than_asked_for():
  answer = good_answer()
  answer["output_ids"] = [5] * 5
  answer["meta_info"]["output_token_logprobs"] = [[-1.0, 5, None]] * 5
  with pytest.raises(EngineError, match="5 output ids, asked for 4"):
    read(answer)


def test_sampling_has_full_support_and_no_penalties_whatever_the_model_prefers():
  assert sampling_fields(PARAMS) == {
    "temperature": 0.7,
    "max_new_tokens": 4,
    "stop_token_ids": [9],
    "sampling_seed": 3,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
  }


class FakeServer:
  """Answers `/generate` with `reply(body)`, a (status, bytes); remembers what else was posted."""

  def __init__(self, reply: Callable[[dict], tuple[int, bytes]]):
    self.posts: list[tuple[str, dict]] = []
    self.healthy = True
    outer = self

    class Handler(BaseHTTPRequestHandler):
      def do_GET(self):
        self.answer(200 if outer.healthy else 503, b"{}")

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        outer.posts.append((self.path, body))
        self.answer(*(reply(body) if self.path == "/generate" else (200, b"{}")))

      def answer(self, status, data):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
          self.send_response(status)
          self.send_header("Content-Length", str(len(data)))
          self.end_headers()
          self.wfile.write(data)

      def log_message(self, format, *args):
        pass

    self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.http.daemon_threads = True
    self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
    threading.Thread(target=self.http.serve_forever, daemon=True).start()

  def stop(self) -> None:
    self.http.shutdown()
    self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
  servers = []

  def start(reply) -> FakeServer:
    servers.append(FakeServer(reply))
    return servers[-1]

  yield start
  for server in servers:
    with contextlib.suppress(OSError):
      server.stop()


def held_until(release: threading.Event) -> Callable[[dict], tuple[int, bytes]]:
  def reply(body):
    release.wait(20)
    return 200, b"{}"

  return reply


def generate(engine: SGLangEngine, prompt=(1, 2)):
  return asyncio.run(engine.generate("r1", prompt, PARAMS))


def test_one_engine_serves_several_event_loops(serve):
  server = serve(lambda body: (200, json.dumps(good_answer()).encode()))
  engine = SGLangEngine(server.url, VOCABULARY)
  for _ in range(3):
    np.testing.assert_array_equal(generate(engine).ids, [512, 880, 9])
  path, body = server.posts[0]
  assert path == "/generate" and body["rid"] == "r1" and body["input_ids"] == [1, 2]
  assert body["return_logprob"] is True and body["sampling_params"]["stop_token_ids"] == [9]


def test_requests_name_the_adapter_that_they_began_with(serve):
  release = threading.Event()

  def reply(body):
    if body["rid"] == "slow":
      release.wait(20)
    return 200, json.dumps(good_answer()).encode()

  server = serve(reply)
  engine = SGLangEngine(server.url, VOCABULARY)

  async def main():
    assert (await engine.generate("plain", (1, 2), PARAMS)).version.tolist() != [1, 1, 1]
    engine.use_adapter("run:1", 1)
    slow = asyncio.create_task(engine.generate("slow", (1, 2), PARAMS))
    while len(server.posts) < 2:
      await asyncio.sleep(0.01)
    engine.use_adapter("run:2", 2)
    ended = asyncio.create_task(engine.adapter_ended("run:1"))
    assert (await engine.generate("next", (1, 2), PARAMS)).version.tolist() == [2, 2, 2]
    assert await engine.version() == 2
    await asyncio.sleep(0.3)
    assert not ended.done()
    release.set()
    assert (await slow).version.tolist() == [1, 1, 1]  # whatever the server says of the model
    await asyncio.wait_for(ended, 5)
    await engine.close()

  asyncio.run(main())
  assert [body.get("lora_path") for _, body in server.posts] == [None, "run:1", "run:2"]


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    ((400, b'{"error": "context length (512 tokens)"}'), r"HTTP 400: .*context length \(512"),
    ((500, b"boom"), "HTTP 500: boom"),
    ((200, b"<html>"), "not JSON: '<html>'"),
    ((200, b"[1]"), r"expected a JSON object, got '\[1\]'"),
  ],
)
def test_names_engine_url_and_call_when_the_server_refuses(serve, reply, message):
  server = serve(lambda body: reply)
  with pytest.raises(EngineError, match=message) as caught:
    generate(SGLangEngine(server.url, VOCABULARY, name="e1"))
  assert f"e1 ({server.url}): /generate r1" in str(caught.value)
  assert not isinstance(caught.value, EngineDead)


@pytest.mark.parametrize("text", ["default", "other:7", "run-1:7"])
def test_an_answer_that_bears_another_stamp_is_a_dead_engine(serve, text):
  answer = good_answer()
  answer["meta_info"]["weight_versions"][-1]["version"] = text
  server = serve(lambda body: (200, json.dumps(answer).encode()))
  assert generate(SGLangEngine(server.url, VOCABULARY)).finish == "stop"
  with pytest.raises(EngineDead, match=f"r1: it serves '{text}', not run 'run'"):
    generate(SGLangEngine(server.url, VOCABULARY, run_id="run"))


@pytest.mark.parametrize(
  ("prompt", "message"),
  [((), "empty"), ((1, 1000), r"prompt id 1000 at 1 is outside"), ((-1,), "prompt id -1 at 0")],
)
def test_refuses_before_sending_what_would_end_the_server(serve, prompt, message):
  server = serve(lambda body: (200, b"{}"))
  with pytest.raises(ValueError, match=message):
    generate(SGLangEngine(server.url, VOCABULARY), prompt)
  assert not server.posts


def test_a_hang_ends_at_the_deadline_and_is_aborted_on_the_server(serve):
  release = threading.Event()
  server = serve(held_until(release))
  engine = SGLangEngine(server.url, VOCABULARY, call_seconds=0.3)
  begin = time.monotonic()
  with pytest.raises(EngineError, match=r"/generate r1: no answer within 0.3 s"):
    generate(engine)
  assert time.monotonic() - begin < 5
  release.set()
  assert ("/abort_request", {"rid": "r1"}) in server.posts


def test_cancelling_a_call_aborts_it_on_the_server(serve):
  release = threading.Event()
  server = serve(held_until(release))
  engine = SGLangEngine(server.url, VOCABULARY)

  async def main():
    task = asyncio.create_task(engine.generate("r1", [1], PARAMS))
    while not server.posts:  # bounded by the test's timeout
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(main())
  release.set()
  assert ("/abort_request", {"rid": "r1"}) in server.posts


def test_missed_heartbeats_end_a_call_long_before_its_deadline(serve):
  release = threading.Event()
  server = serve(held_until(release))
  server.healthy = False
  engine = SGLangEngine(server.url, VOCABULARY, heartbeat_seconds=0.2, misses=2)
  begin = time.monotonic()
  with pytest.raises(EngineDead, match=r"missed 2 heartbeats of 0.2 s"):
    generate(engine)
  assert time.monotonic() - begin < 10
  release.set()


def test_a_slow_answer_with_good_heartbeats_is_waited_for(serve):
  def reply(body):
    time.sleep(2.0)
    return 200, json.dumps(good_answer()).encode()

  engine = SGLangEngine(serve(reply).url, VOCABULARY, heartbeat_seconds=0.5, misses=2)
  assert generate(engine).finish == "stop"


def test_nobody_listening_is_a_dead_engine_for_every_call(serve):
  server = serve(lambda body: (200, b"{}"))
  server.stop()
  engine = SGLangEngine(server.url, VOCABULARY, heartbeat_seconds=0.1, misses=2)
  with pytest.raises(EngineDead, match="heartbeats"):
    generate(engine)
  with pytest.raises(EngineDead, match="/model_info"):
    asyncio.run(engine.version())
  assert asyncio.run(engine.healthy()) is False
  asyncio.run(engine.abort("unknown"))
  asyncio.run(engine.close())


def distribution_server(serve, *, scaled: bool = True, mass: float = 1.0) -> SGLangEngine:
  """Serves a known distribution over 10 tokens and always samples token 3."""
  logits = np.linspace(-2, 1, 10)

  def reply(body):
    temperature = body["sampling_params"]["temperature"] if scaled else 1.0
    logp = logits / temperature - np.log(np.exp(logits / temperature).sum()) + np.log(mass)
    answer = copy.deepcopy(good_answer())
    answer["output_ids"] = [3]
    answer["meta_info"] |= {
      "finish_reason": {"type": "length", "length": 1},
      "output_token_logprobs": [[logp[3], 3, None]],
      "weight_versions": [{"version": "0", "start": 0, "end": 1}],
      "output_top_logprobs": [[[logp[i], i, None] for i in np.argsort(-logp).tolist()]],
    }
    return 200, json.dumps(answer).encode()

  return SGLangEngine(serve(reply).url, 10)


def test_probe_accepts_scaled_full_support(serve):
  engine = distribution_server(serve)
  assert asyncio.run(engine.probe()) < 1e-6
  assert engine.seeded is False


def test_probe_refuses_log_probs_from_before_temperature(serve):
  with pytest.raises(EngineError, match="scaled full distribution gives"):
    asyncio.run(distribution_server(serve, scaled=False).probe())


def test_probe_refuses_truncated_support(serve):
  with pytest.raises(EngineError, match=r"mass at temperature 1 is 0.9"):
    asyncio.run(distribution_server(serve, mass=0.9).probe())
