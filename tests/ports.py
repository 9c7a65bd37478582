"""Ports for what is started later and cannot be given a listener."""

import random
import socket


def free_port() -> int:
  """A port of this machine that nothing uses, and that connections are not given by themselves:
  systems take those from 32768 up, and would have another process's by the time it is needed.
  """
  draw = random.SystemRandom()
  while True:
    port = draw.randrange(20_000, 32_000)
    with socket.socket() as probe:
      try:
        probe.bind(("127.0.0.1", port))
      except OSError:
        continue
      return port
