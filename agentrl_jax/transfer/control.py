"""The control calls of one SGLang server that a push needs, each with a deadline and a named
failure.
"""

import asyncio
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import httpx

from agentrl_jax.transfer.report import PushError

PauseMode = Literal["retract", "abort"]
Failure = Literal["unreachable", "refused", "lost"]
KEEP_SECONDS = 2.0  # that a connection may rest
CLAIMED = "claimed"  # in place of a version: of a run that has not pushed yet
FENCED = "fenced"  # of a run that ended after a push that failed: the server is paused


class CallError(PushError):
  """A control call failed.

  "unreachable": it was never sent. "refused": the server answered no. "lost": it was sent and no
  answer came, so it may have happened.
  """

  def __init__(self, failure: Failure, message: str):
    super().__init__(message)
    self.failure: Failure = failure


class Held(NamedTuple):
  """What a server says it serves: `version` is -1 before anything was published to it, and where a
  run has claimed or fenced it; `text` is all that it says.
  """

  run_id: str | None
  version: int
  text: str = "default"

  @property
  def fenced(self) -> bool:
    """Whether a run left it paused, after a push that failed."""
    return self.text.endswith(f":{FENCED}")


class RankChecksum(NamedTuple):
  """A tensor-parallel rank's own checksum of each of its parameters, by the engine's names."""

  rank: int
  tensors: Mapping[str, str]


def make_client() -> httpx.AsyncClient:
  """The connections of a publisher, for all of its servers.

  No proxy stands between. One that has rested is used again only while the server, which ends it
  after 5 s (uvicorn), cannot be about to: what is sent into that moment is lost.
  """
  return httpx.AsyncClient(trust_env=False, limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS))


class Control:
  """One server by its URL; the client is shared and closed by the publisher."""

  def __init__(self, url: str, client: httpx.AsyncClient, deadline: float):
    self.url, self.client, self.deadline = url.rstrip("/"), client, deadline

  async def held(self) -> Held:
    """The version that is served, from "RUN:VERSION", "VERSION", SGLang's "default", or a stamp."""
    answer = await self.call("GET", "/model_info")
    text = str(answer.get("weight_version"))
    run_id, _, number = text.rpartition(":")
    if text == "default":
      return Held(None, -1)
    if run_id and number in (CLAIMED, FENCED):
      return Held(run_id, -1, text)
    if not number.isdecimal():
      raise CallError(
        "refused", f"{self.url} reports weight version {text!r}, expected RUN:VERSION"
      )
    return Held(run_id or None, int(number), text)

  async def facts(self) -> Mapping[str, Any]:
    """The server's own arguments (device, dtype, tp_size, ...)."""
    return await self.call("GET", "/server_info")

  async def pause(self, mode: PauseMode = "retract") -> None:
    """Stops generation. "retract" requeues running requests, whose KV is recomputed later."""
    await self.call("POST", "/pause_generation", {"mode": mode})

  async def resume(self) -> None:
    """Continues generation."""
    await self.call("POST", "/continue_generation", {})

  async def flush(self) -> None:
    """Empties the prefix cache; refused while requests run."""
    await self.call("POST", "/flush_cache")

  async def set_version(self, text: str) -> None:
    """Names the weights it serves, without touching requests."""
    body = {"new_version": text, "abort_all_requests": False}
    await self.call("POST", "/update_weight_version", body)

  async def stamp(self, text: str, instead_of: str) -> None:
    """Says whose the server is, where it bears `instead_of`. Only the embedded one compares, and
    keeps the name of the weights for what they sample.
    """
    body = {"new_version": text, "abort_all_requests": False}
    only = {"old_version": instead_of, "names_weights": False}
    await self.call("POST", "/update_weight_version", body | only)

  async def checksums(self) -> tuple[RankChecksum, ...]:
    """Each rank's checksums. Calls are served in order: an answer proves earlier writes ended."""
    answer = await self.call("POST", "/weights_checker", {"action": "checksum"})
    ranks = answer.get("ranks") or ()
    if not ranks:
      raise CallError("refused", f"{self.url}/weights_checker gave no checksums: {answer}")
    try:
      found = [RankChecksum(_rank(r["parallelism_info"]), r["checksums"]) for r in ranks]
    except (KeyError, IndexError, TypeError) as error:
      raise CallError("refused", f"{self.url}/weights_checker answer lacks {error}") from error
    return tuple(sorted(found, key=lambda checksum: checksum.rank))

  async def adapters(self) -> tuple[str, ...]:
    """The names of the adapters that requests may ask for."""
    answer = await self.call("GET", "/v1/models")
    try:
      return tuple(str(card["id"]) for card in answer["data"] if card.get("parent"))
    except (KeyError, TypeError, AttributeError) as error:
      raise CallError("refused", f"{self.url}/v1/models answer lacks {error}") from error

  async def load_adapter(self, name: str, body: Mapping[str, Any], ranks: int) -> None:
    """Loads an adapter under a new name, beside those that are there; `body` holds one payload."""
    payloads = [*body["serialized_named_tensors"]] * ranks
    whole = {**body, "lora_name": name, "serialized_named_tensors": payloads}
    await self.call("POST", "/load_lora_adapter_from_tensors", whole)

  async def unload_adapter(self, name: str) -> None:
    """Takes an adapter away; the server waits for the requests on it, and other loads wait too."""
    await self.call("POST", "/unload_lora_adapter", {"lora_name": name})

  async def prompt_logp(self, ids: Sequence[int], adapter: str | None) -> list[float]:
    """Log-probs of ids[1:] at temperature 1, by an adapter or by the model itself."""
    body = {
      "input_ids": list(ids), "return_logprob": True, "logprob_start_len": 0, "lora_path": adapter,
      "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }  # fmt: skip
    answer = await self.call("POST", "/generate", body)
    try:
      return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    except (KeyError, IndexError, TypeError) as error:
      raise CallError("refused", f"{self.url}/generate answer lacks {error}") from error

  async def call(
    self,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    content: AsyncIterable[bytes] | None = None,
    length: int = 0,
  ) -> Mapping[str, Any]:
    """One request; `content` of `length` bytes is a JSON body sent as it is made.

    Raises:
      CallError: after at most `deadline` seconds.
    """
    where = f"{self.url}{path}"
    options: dict[str, Any] = {}
    if content is not None:
      options = {
        "content": content,
        "headers": {"content-type": "application/json", "content-length": str(length)},
      }
    elif body is not None:
      options = {"json": body}
    try:
      async with asyncio.timeout(self.deadline):
        answer = await self.client.request(method, where, timeout=None, **options)
    except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
      raise CallError("unreachable", f"{where}: {error or type(error).__name__}") from error
    except TimeoutError as error:
      raise CallError("lost", f"{where} did not answer within {self.deadline:g} s") from error
    except httpx.HTTPError as error:
      raise CallError("lost", f"{where} broke off: {error or type(error).__name__}") from error
    return _read(where, answer)


def _rank(info: Any) -> int:
  return int((info[0] if isinstance(info, list) else info)["tp_rank"])


def _read(where: str, answer: httpx.Response) -> Mapping[str, Any]:
  try:
    data = answer.json()
  except ValueError:
    data = {}
  data = data if isinstance(data, dict) else {}
  if answer.status_code != 200 or data.get("success") is False:
    reason = str(data.get("message") or data.get("error") or answer.text)[:500].strip()
    raise CallError("refused", f"{where} answered {answer.status_code}: {reason}")
  return data
