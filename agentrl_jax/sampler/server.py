"""The embedded engine as a server: SGLang's routes and JSON, as far as our client and our publisher
use them.

The engine has a thread and an event loop of its own, because device programs run inline there;
this side answers meanwhile. A weight update is one assignment between two device programs, and it
is taken only while generation is paused; what was loaded samples nothing before it has a version.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from agentrl_jax.models.model import Weights
from agentrl_jax.rollout.engine import EngineError
from agentrl_jax.sampler.engine import EmbeddedEngine, Refused
from agentrl_jax.sampler.sglang_json import answer, read_request

try:
  import uvicorn
  from starlette.applications import Starlette
  from starlette.exceptions import HTTPException
  from starlette.requests import Request
  from starlette.responses import Response
  from starlette.routing import Route
except ImportError as error:
  raise ImportError(
    f"the embedded engine's server needs starlette and uvicorn ({error}): "
    "pip install -e '.[serve]', or bash launch/environment.sh"
  ) from error

_Made = TypeVar("_Made")
_LEFT = 499  # nobody reads this answer
_CLOSE_SECONDS = 2.0  # for answers under way when the server ends
_JOIN_SECONDS = 30.0  # for the device program that runs then
_WAITING_SECONDS = 600.0  # a call to the weights, for those before it


class EngineThread:
  """An event loop in a thread of its own, where all of an engine's coroutines run."""

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
    self._thread.start()

  async def call(self, coroutine: Coroutine[Any, Any, _Made]) -> _Made:
    """Runs it there; cancelled here, it is cancelled there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

  def close(self, last: Coroutine[Any, Any, None]) -> None:
    """Ends the thread after a last call, once its device program has ended, within a deadline."""
    with contextlib.suppress(TimeoutError):
      asyncio.run_coroutine_threadsafe(last, self._loop).result(_JOIN_SECONDS)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_JOIN_SECONDS)
    if not self._thread.is_alive():
      self._loop.close()


class EngineServer:
  """The routes of one engine. Calls that pause it or touch its weights are served one at a time, in
  the order in which they came, so that the answer to one proves that those before it have ended.

  Args:
    read: the weights in a directory, as they lie on this server's devices. Raises ValueError or
      OSError.
    checksums: of weights that the engine holds, by SGLang's names of parameters.
    facts: what `/server_info` says of this server, which does not change.
  """

  def __init__(
    self,
    engine: EmbeddedEngine,
    *,
    read: Callable[[Path], Weights],
    checksums: Callable[[Weights], Mapping[str, str]],
    facts: Mapping[str, Any],
  ):
    self.engine, self.thread = engine, EngineThread()
    self._read, self._checksums, self._facts = read, checksums, facts
    self._paused = False
    self._serial = 0  # the engine's version: each update has a number, and then a name
    self._labels = {0: "default"}
    self._stamp = "default"  # the name that was given last, or whose the server is
    self._order = asyncio.Lock()

  def app(self) -> Starlette:
    """The routes, as an ASGI application."""
    control = {
      "/abort_request": self._abort,
      "/pause_generation": self._in_order(self._pause),
      "/continue_generation": self._in_order(self._continue),
      "/flush_cache": self._in_order(self._flush),
      "/update_weights_from_disk": self._in_order(self._update),
      "/update_weight_version": self._in_order(self._label),
      "/weights_checker": self._in_order(self._check),
    }
    posts = {route: _endpoint(act) for route, act in control.items()}
    posts["/generate"] = self._generate
    gets = {"/health": self._health, "/model_info": self._model, "/server_info": self._server}
    return Starlette(
      routes=[
        *(Route(route, _to_its_end(respond), methods=["POST"]) for route, respond in posts.items()),
        *(Route(route, endpoint, methods=["GET"]) for route, endpoint in gets.items()),
      ],
      exception_handlers={HTTPException: _not_here},
    )

  def serve(self, listener: socket.socket) -> None:
    """Answers at a bound socket until SIGINT or SIGTERM, which is then delivered."""
    config = uvicorn.Config(
      self.app(),
      log_config=None,
      log_level="warning",
      access_log=False,
      lifespan="off",
      ws="none",
      timeout_graceful_shutdown=int(_CLOSE_SECONDS),
    )
    uvicorn.Server(config).run(sockets=[listener])

  def close(self) -> None:
    """Ends the engine with all that it is doing. To be called once."""
    self.thread.close(self.engine.close())

  @property
  def _label_now(self) -> str:
    """The name that was given last: of what is served, or of what was, until an update has one."""
    return self._labels[max(self._labels)]

  async def _health(self, request: Request) -> Response:
    del request
    return Response(status_code=200 if await self.engine.healthy() else 503)

  async def _model(self, request: Request) -> Response:
    del request
    return _json({
      "weight_version": self._stamp,
      "model_path": self._facts.get("model_path"),
      "architectures": self._facts.get("model_config", {}).get("architectures"),
    })  # fmt: skip

  async def _server(self, request: Request) -> Response:
    del request
    return _json({**self._facts, "counters": dict(self.engine.counters)})

  async def _generate(self, request: Request) -> Response:
    try:
      asked = read_request(await _body(request))
      call = self.engine.generate(asked.request_id, asked.prompt, asked.params)
      made = await _unless_left(request, self.thread.call(call))
      if made is None:
        return Response(status_code=_LEFT)
      whole = await self.thread.call(self.engine.next_logp(asked.prompt)) if asked.top else None
    except (Refused, ValueError) as error:
      return _failed(400, error)
    except EngineError as error:
      return _failed(500 if await self.engine.healthy() else 503, error)
    return _json(answer(asked, made, self._labels, self._label_now, whole))

  async def _abort(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    if body.get("abort_all"):
      await self.thread.call(self.engine.abort_all())
    else:
      await self.thread.call(self.engine.abort(_text(body, "rid")))
    return {}

  async def _pause(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    mode = body.get("mode", "abort")  # as SGLang
    if mode not in ("retract", "in_place", "abort"):
      raise ValueError(f"mode is {mode!r}, expected retract, in_place or abort")
    await self.thread.call(self.engine.pause())
    self._paused = True
    if mode == "abort":
      await self.thread.call(self.engine.abort_all())
    return {}

  async def _continue(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    del body
    if self._serial not in self._labels:
      raise ValueError(
        f"the weights that were loaded after {self._label_now!r} have no version yet: they sample "
        "nothing before /update_weight_version names them"
      )
    self._paused = False
    await self.thread.call(self.engine.resume())
    return {}

  async def _flush(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    del body
    await self.thread.call(self.engine.flush())
    return {}

  async def _update(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    directory = Path(_text(body, "model_path"))
    if (form := body.get("load_format") or "auto") not in ("auto", "safetensors"):
      raise ValueError(f"load_format is {form!r}, expected auto or safetensors")
    if not self._paused:
      raise ValueError("weights are taken while generation is paused: /pause_generation first")
    weights = await asyncio.to_thread(self._read, directory)
    await self.thread.call(self.engine.load(weights, self._serial + 1))
    self._serial += 1
    return {"message": f"loaded {directory}"}

  async def _label(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    text = _text(body, "new_version")
    old = body.get("old_version", self._stamp)
    if old != self._stamp:  # two that found it free at once
      raise ValueError(f"the server bears {self._stamp!r}, not {old!r}")
    if body.get("abort_all_requests", True):  # as SGLang
      await self.thread.call(self.engine.abort_all())
    if body.get("names_weights", True):
      if self._labels.get(self._serial, text) != text and not self.engine.idle:
        raise ValueError(
          f"requests run under {self._label_now!r}, and their tokens would become {text!r}"
        )
      self._labels[self._serial] = text
    self._stamp = text
    return {"new_version": text}

  async def _check(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
    if body.get("action") != "checksum":
      raise ValueError(f"action is {body.get('action')!r}, expected checksum")
    made = await asyncio.to_thread(self._checksums, self.engine.weights)
    return {"ranks": [{"checksums": made, "parallelism_info": [{"tp_rank": 0}]}]}

  def _in_order(self, act: "_Act") -> "_Act":
    async def waited(body: Mapping[str, Any]) -> Mapping[str, Any]:
      async with self._turn():
        return await act(body)

    return waited

  @contextlib.asynccontextmanager
  async def _turn(self) -> AsyncIterator[None]:
    try:
      async with asyncio.timeout(_WAITING_SECONDS):
        await self._order.acquire()
    except TimeoutError as error:
      raise EngineError(f"a call before this one has run for {_WAITING_SECONDS:g} s") from error
    try:
      yield
    finally:
      self._order.release()


_Act = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
_Respond = Callable[[Request], Awaitable[Response]]


def _endpoint(act: _Act) -> _Respond:
  async def respond(request: Request) -> Response:
    try:
      return _json({"success": True, **await act(await _body(request))})
    except (ValueError, OSError, Refused) as error:
      return _failed(400, error)
    except EngineError as error:
      return _failed(503, error)
    except RuntimeError as error:  # a device's, of memory above all
      return _failed(500, error)

  return respond


def _to_its_end(respond: _Respond) -> _Respond:
  async def answered(request: Request) -> Response:
    try:
      return await respond(request)
    except asyncio.CancelledError:  # uvicorn's, of what still waits when it has been told to end
      return _failed(503, EngineError("the server is ending"))

  return answered


async def _body(request: Request) -> Mapping[str, Any]:
  """The JSON object of a request, {} where there is none. Raises ValueError for something else."""
  text = await request.body()
  try:
    found = json.loads(text) if text else {}
  except (ValueError, RecursionError) as error:
    raise ValueError(f"the body is not JSON: {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"the body is {str(found)[:100]}, expected a JSON object")
  return found


async def _unless_left(request: Request, call: Coroutine[Any, Any, _Made]) -> _Made | None:
  """What the call returns, None where the client leaves before: the call is cancelled then."""
  work, left = asyncio.ensure_future(call), asyncio.ensure_future(_left(request))
  try:
    await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
    return work.result() if work.done() else None
  finally:
    for task in (work, left):
      task.cancel()
    await asyncio.gather(work, left, return_exceptions=True)


async def _left(request: Request) -> None:
  while (await request.receive())["type"] != "http.disconnect":
    pass


def _text(body: Mapping[str, Any], name: str) -> str:
  value = body.get(name)
  if not isinstance(value, str) or not value:
    raise ValueError(f"{name} is {value!r}, expected a text")
  return value


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
  """In ASCII, as a body may hold text that no other encoding has: lone surrogates."""
  return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")


def _failed(status: int, error: Exception) -> Response:
  return _json({"success": False, "message": str(error)}, status)


async def _not_here(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  message = f"{request.method} {request.url.path} is not served by the embedded engine"
  return _json({"success": False, "message": message}, error.status_code)
