"""Stands for the SGLang interpreter in launcher tests: `fake_sglang.py -m sglang.launch_server
--port P ...`.

Starts a child that sleeps (as the scheduler would), then serves /health, /model_info and /generate,
or misbehaves as $FAKE_SGLANG says: "crash" ends with an error, "mute" never becomes healthy,
"taken:N" ends as if its port were another's, of the first N ones that it is given. A request whose
rid begins with "hang" is never answered.
"""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def do_GET(self):
    if os.environ.get("FAKE_SGLANG") == "mute":
      self.send_error(503)
    else:
      self.reply({"weight_version": "default"})

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    if str(body.get("rid")).startswith("hang"):
      time.sleep(600)
    self.reply(
      {
        "output_ids": [5],
        "meta_info": {
          "finish_reason": {"type": "length", "length": 1},
          "output_token_logprobs": [[-0.5, 5, None]],
          "weight_version": "default",
        },
      }
    )

  def reply(self, answer):
    data = json.dumps(answer).encode()
    self.send_response(200)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, format, *args):
    pass


def main() -> None:
  port = int(sys.argv[sys.argv.index("--port") + 1])
  subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
  print("fake server on port", port, flush=True)
  if os.environ.get("FAKE_SGLANG") == "crash":
    raise RuntimeError("no such architecture")
  kind, _, times = os.environ.get("FAKE_SGLANG", "").partition(":")
  if kind == "taken":
    tried = pathlib.Path(sys.argv[sys.argv.index("--model-path") + 1]) / "ports"
    with tried.open("a") as file:
      file.write(f"{port}\n")
    if len(tried.read_text().split()) <= int(times):
      sys.exit(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): "
               "address already in use")  # fmt: skip
  http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
  main()
