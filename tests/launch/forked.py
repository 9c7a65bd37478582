"""Runs commands one after another, each in a fork that has the project's slow imports already.

Reads JSON from stdin, a list of {arguments, environment}; prints JSON, a list of [code, output].
For commands that are refused: what a process does from its first import on is tested elsewhere.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback

import agentrl_jax.analysis.report
import agentrl_jax.orchestrate.sync_loop  # noqa: F401
import launch.configuration  # noqa: F401


def become(arguments: list[str], environment: dict[str, str], output: int) -> None:
  """The command `python -m ARGUMENTS`, with all that it writes in `output`; ends the process."""
  os.dup2(output, 1)
  os.dup2(output, 2)
  os.environ.update(environment)
  code = 0
  try:
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:
    traceback.print_exc()
    code = 1
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
  results = []
  for job in json.load(sys.stdin):
    with tempfile.TemporaryFile() as output:
      child = os.fork()
      if child == 0:
        become(job["arguments"], job["environment"], output.fileno())
      code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
      output.seek(0)
      results.append([code, output.read().decode(errors="replace")])
  print(json.dumps(results))


if __name__ == "__main__":
  main()
