"""The JSON of SGLang's `/generate`, as far as rollouts use it: one request of token ids."""

import itertools
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.rollout.engine import Generation, SamplingParams
from agentrl_jax.rollout.sglang import FULL_SUPPORT

_FIELDS = frozenset({
  "rid", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream",
  "lora_path",
})  # fmt: skip
_SAMPLING = frozenset({
  "temperature", "max_new_tokens", "stop_token_ids", "sampling_seed", *FULL_SUPPORT
})  # fmt: skip
_NEW_TOKENS = 128  # as SGLang


class Asked(NamedTuple):
  """One call of `/generate`."""

  request_id: str
  prompt: list[int]
  params: SamplingParams
  top: int  # so many of the next token's largest log-probs are wanted, too


def read_request(body: Mapping[str, Any]) -> Asked:
  """What a body asks for.

  Raises:
    ValueError: naming a field that is missing, malformed, or asks for what is not done here.
  """
  for name in body.keys() - _FIELDS:
    raise ValueError(f"{name} is not taken here, expected some of {sorted(_FIELDS)}")
  if body.get("stream"):
    raise ValueError("stream is set, answers are given whole")
  if body.get("lora_path") is not None:
    raise ValueError(f"lora_path is {body['lora_path']!r}, no adapters are served here")
  sampling = body.get("sampling_params") or {}
  if not isinstance(sampling, dict):
    raise ValueError(f"sampling_params is {sampling!r}, expected an object")
  for name in sampling.keys() - _SAMPLING:
    raise ValueError(f"sampling_params.{name} is not taken here, expected of {sorted(_SAMPLING)}")
  for name, value in FULL_SUPPORT.items():
    if sampling.get(name, value) != value:
      raise ValueError(
        f"sampling_params.{name} is {sampling[name]!r}, only {value} is sampled: the whole "
        "vocabulary, without penalties"
      )
  params = SamplingParams(
    _whole(sampling.get("max_new_tokens", _NEW_TOKENS), "sampling_params.max_new_tokens"),
    tuple(_ids(sampling.get("stop_token_ids") or [], "sampling_params.stop_token_ids")),
    _number(sampling.get("temperature", 1.0), "sampling_params.temperature"),
    _whole(sampling.get("sampling_seed") or 0, "sampling_params.sampling_seed"),
  )
  top = _whole(body.get("top_logprobs_num") or 0, "top_logprobs_num")
  if top and (params.max_new_tokens, params.temperature) != (1, 1.0):
    raise ValueError(
      f"top_logprobs_num is {top} for {params.max_new_tokens} tokens at temperature "
      f"{params.temperature:g}, only one at temperature 1 comes with others"
    )
  request_id = body.get("rid") or uuid.uuid4().hex
  if not isinstance(request_id, str):
    raise ValueError(f"rid is {request_id!r}, expected a string")
  return Asked(request_id, _ids(body.get("input_ids"), "input_ids"), params, top)


def answer(
  asked: Asked,
  made: Generation,
  labels: Mapping[int, str],
  current: str,
  distribution: np.ndarray | None = None,
) -> dict[str, Any]:
  """What `/generate` answers.

  Args:
    labels: the name of each version in `made`.
    current: the name of what is served now.
    distribution: log-probs of all next tokens, where some were asked for.
  """
  ids = made.ids.tolist()
  reason: dict[str, Any] = {"type": made.finish}
  if made.finish == "stop":
    reason["matched"] = ids[-1]
  if made.finish == "length":
    reason["length"] = asked.params.max_new_tokens
  meta = {
    "id": asked.request_id,
    "finish_reason": reason,
    "prompt_tokens": len(asked.prompt),
    "completion_tokens": len(ids),
    "output_token_logprobs": _entries(made.logp, ids),
    "weight_version": current,
    "weight_versions": version_spans(made.version, labels),
  }
  if distribution is not None:
    largest = np.argsort(-distribution, kind="stable")[: asked.top].tolist()
    meta["output_top_logprobs"] = [_entries(distribution[largest], largest)]
  return {"output_ids": ids, "meta_info": meta}


def version_spans(versions: np.ndarray, labels: Mapping[int, str]) -> list[dict[str, Any]]:
  """Half-open spans over the sampled tokens, by the weights that made them."""
  spans, start = [], 0
  for version, members in itertools.groupby(versions.tolist()):
    end = start + len(list(members))
    spans.append({"start": start, "end": end, "version": labels[version]})
    start = end
  return spans


def _entries(logp: np.ndarray, ids: Sequence[int]) -> list[list[Any]]:
  return [[value, token, None] for value, token in zip(logp.tolist(), ids, strict=True)]


def _ids(value: Any, name: str) -> list[int]:
  if not isinstance(value, list):
    raise ValueError(f"{name} is {str(value)[:100]}, expected a list of token ids")
  for place, token in enumerate(value):
    _whole(token, f"{name}[{place}]")
  return value


def _whole(value: Any, name: str) -> int:
  if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
    raise ValueError(f"{name} is {str(value)[:100]}, expected a whole number of at least 0")
  return value


def _number(value: Any, name: str) -> float:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not (number and abs(value) <= sys.float_info.max):
    raise ValueError(f"{name} is {str(value)[:100]}, expected a finite number")
  return float(value)
