"""Speaks the protocol of `third_party/sglang/broadcast.py` with plain sockets for two members."""

import json
import socket
import sys
from pathlib import Path


def say(**fields):
  print(json.dumps(fields), flush=True)


def main():
  member = None
  for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "join":
      listener = socket.create_server((request["host"], 0))
      say(port=listener.getsockname()[1])
      member, _ = listener.accept()
      say(joined=request["world"])
      continue
    data = Path(request["path"]).read_bytes()[request["offset"] :]
    if len(data) != request["nbytes"]:
      say(error=f"{len(data)} bytes, expected {request['nbytes']}")
      return
    member.sendall(data)
    say(sent=len(data))


if __name__ == "__main__":
  main()
