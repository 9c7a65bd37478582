"""The sending rank of a SGLang server's weight update group, in SGLang's own environment.

    python broadcast.py        requests and answers are JSON lines on standard input and output

    {"op": "join", "backend": "gloo", "host": H, "world": N, "group": NAME}
        -> {"port": P} once others can find the group at H:P, {"joined": N} once all are there
    {"op": "send", "path": FILE, "offset": B, "nbytes": B}   broadcasts those bytes
        -> {"sent": B}

The trainer has no torch, and torch's groups speak only to torch: it leaves its packed weights in
shared memory, and this process broadcasts them from there. Errors are answered as {"error": TEXT},
and end it. It ends with its standard input, and with it the group.
"""

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group

_SECONDS = datetime.timedelta(seconds=600)  # the trainer's deadlines are shorter, and kill this


def main() -> None:
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # whatever libraries print is not an answer

  def answer(**fields) -> None:
    print(json.dumps(fields), file=answers, flush=True)

  group, device = None, "cpu"
  for line in sys.stdin:
    request = json.loads(line)
    try:
      if request["op"] == "join":
        device = "cuda" if request["backend"] == "nccl" else "cpu"
        group = join(request, lambda port: answer(port=port))
        answer(joined=request["world"])
      else:
        data = torch.from_file(
          request["path"], shared=False, size=request["offset"] + request["nbytes"],
          dtype=torch.uint8,
        )[request["offset"] :]  # fmt: skip
        dist.broadcast(data.to(device), src=0, group=group)
        answer(sent=request["nbytes"])
    except Exception as error:
      answer(error=f"{type(error).__name__}: {error}"[:500])
      os._exit(1)
  os._exit(0)  # a group of which others still wait would be waited for


def join(request, found):
  """The group, with this process as rank 0; `found(port)` says where it is to be joined."""
  store = dist.TCPStore(
    request["host"], 0, request["world"], is_master=True, timeout=_SECONDS, wait_for_workers=False
  )
  found(store.port)
  return init_custom_process_group(
    backend=request["backend"],
    store=dist.PrefixStore(request["group"], store),
    world_size=request["world"],
    rank=0,
    group_name=request["group"],
    timeout=_SECONDS,
  )


if __name__ == "__main__":
  main()
