"""`launch/environment.sh` with fake Pythons: what it takes, refuses and leaves behind."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = [ROOT / "launch" / "environment.sh", ROOT / "launch" / "test.sh", ROOT / ".ci" / "run"]
TOOLS = "bash cat cut dirname find flock grep ls mkdir realpath rm sed sha256sum sleep sort timeout"

# A Python that answers the probe, makes "environments" and "installs" by writing down what it was
# asked to do. `-m pip` fails while the file `broken` exists.
FAKE = """#!/usr/bin/env bash
here=$(cd "$(dirname "$0")" && pwd)
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; : >"$3/pyvenv.cfg" ;;
  "-m pip") echo "pip $*" >>"{log}"; sleep {pause}; [ ! -e "{broken}" ] ;;
  "-c import ssl"*) echo "{version} $0" ;;
  "-c import jax"*) echo "import" >>"{log}" ;;
esac
"""
SHIM = '#!/usr/bin/env bash\necho "pyenv: $0: command not found" >&2\nexit 127\n'


class Machine:
  """A checkout with the real script and lock files, a PATH of our own, and a home without pyenv."""

  def __init__(self, path: pathlib.Path):
    self.path, self.root, self.bin = path, path / "checkout", path / "bin"
    self.log, self.broken = path / "log", path / "broken"
    for folder in (self.root / "launch", self.root / "third_party" / "python", self.bin):
      folder.mkdir(parents=True)
    shutil.copy(SCRIPTS[0], self.root / "launch")
    (self.root / "setup.py").write_text("# fake\n")
    for name in ("py312.txt", "py311.txt"):
      (self.root / "third_party" / "python" / name).write_text("jax==1\n")
    for tool in [*TOOLS.split(), "cp"]:
      found = shutil.which(tool)
      if found:
        (self.bin / tool).symlink_to(found)
    self.write(self.bin / "uv", SHIM)

  def write(self, path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

  def python(self, path: pathlib.Path, version: str, pause: float = 0) -> None:
    text = FAKE.replace("{version}", version).replace("{pause}", str(pause))
    self.write(path, text.replace("{log}", str(self.log)).replace("{broken}", str(self.broken)))

  def command(self, *arguments: str) -> list[str]:
    return [str(self.bin / "bash"), str(self.root / "launch" / "environment.sh"), *arguments]

  @property
  def environ(self) -> dict[str, str]:
    return {"PATH": str(self.bin), "HOME": str(self.path / "home")}

  def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      self.command(*arguments),
      env=self.environ | environ,
      capture_output=True,
      text=True,
      timeout=120,
      stdin=subprocess.DEVNULL,
    )

  def installs(self) -> list[str]:
    return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse(script):
  done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
  assert (done.returncode, done.stderr) == (0, "")


def test_help_names_the_flags(machine):
  done = machine.run("--help")
  assert done.returncode == 0
  for flag in ("--python", "--dir", "--extra"):
    assert flag in done.stdout


def test_takes_the_best_python_that_runs_and_says_which(machine):
  machine.write(machine.bin / "python3.13", SHIM)
  machine.python(machine.bin / "python3.12", "3.11")  # lies about its name
  machine.python(machine.bin / "python3.11", "3.11")
  done = machine.run()
  assert done.returncode == 0, done.stderr
  assert f"made {machine.root}/.venv with Python 3.11 ({machine.bin}/python3.11)" in done.stdout
  lock, own, check = machine.installs()
  assert "third_party/python/py311.txt" in lock
  assert "--no-deps" in own and own.endswith(f"-e {machine.root}")
  assert check == "import"


def test_looks_among_the_versions_of_pyenv_newest_first(machine):
  machine.python(machine.bin / "python3.11", "3.11")
  versions = machine.path / "pyenv" / "versions"
  machine.python(versions / "3.12.9" / "bin" / "python", "3.12")
  machine.python(versions / "3.12.10" / "bin" / "python", "3.12")
  done = machine.run(PYENV_ROOT=str(machine.path / "pyenv"))
  assert f"with Python 3.12 ({versions}/3.12.10/bin/python)" in done.stdout
  assert "py312.txt" in machine.installs()[0]


def test_a_second_run_does_nothing_until_the_pins_change(machine):
  machine.python(machine.bin / "python3.12", "3.12")
  machine.run()
  assert len(machine.installs()) == 3
  again = machine.run()
  assert "using" in again.stdout
  assert len(machine.installs()) == 3
  (machine.root / "third_party" / "python" / "py312.txt").write_text("jax==2\n")
  assert "made" in machine.run().stdout
  assert len(machine.installs()) == 6


def test_a_failed_install_leaves_nothing_and_says_what_failed(machine):
  machine.python(machine.bin / "python3.12", "3.12")
  machine.broken.touch()
  done = machine.run()
  assert done.returncode != 0
  assert "failed while installing the packages of third_party/python/py312.txt" in done.stderr
  assert not (machine.root / ".venv").exists()
  machine.broken.unlink()
  assert machine.run().returncode == 0


def test_a_killed_install_is_made_anew(machine):
  machine.python(machine.bin / "python3.12", "3.12", pause=30)
  process = subprocess.Popen(
    machine.command(), env=machine.environ, start_new_session=True, stdout=subprocess.DEVNULL
  )
  try:
    deadline = time.monotonic() + 60
    while not machine.installs() and time.monotonic() < deadline:
      time.sleep(0.1)
    assert machine.installs(), "waited 60 s for the install to start"
  finally:
    os.killpg(process.pid, 9)
    process.wait()
  assert (machine.root / ".venv" / "bin" / "python").exists()
  assert not (machine.root / ".venv" / ".agentrl-stamp").exists()
  machine.python(machine.bin / "python3.12", "3.12")
  done = machine.run()
  assert done.returncode == 0 and "made" in done.stdout


def test_two_at_once_install_once(machine):
  machine.python(machine.bin / "python3.12", "3.12", pause=0.5)
  both = [
    subprocess.Popen(machine.command(), env=machine.environ, stdout=subprocess.PIPE, text=True)
    for _ in range(2)
  ]
  outputs = [process.communicate(timeout=120)[0] for process in both]
  assert [process.returncode for process in both] == [0, 0]
  assert sorted("made" in output for output in outputs) == [False, True]
  assert len(machine.installs()) == 3


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("--python=3.9",), "--python is '3.9', expected 3.11, 3.12 or 3.13"),
    (("--extra=rocm",), "--extra is 'rocm', expected cuda13, tpu, plan-tpu or plan-gpu"),
    (("--dir=",), "unknown argument '--dir='"),
    (("extra",), "unknown argument 'extra'; see --help"),
    (("--python=3.12",), "no Python 3.12 that runs, on PATH or in pyenv"),
    ((), "no Python 3.13 or 3.12 or 3.11 that runs"),
  ],
)
def test_what_cannot_be_done_is_one_line(machine, arguments, message):
  done = machine.run(*arguments)
  assert done.returncode == 1
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1


def test_nobody_elses_folder_is_removed(machine):
  machine.python(machine.bin / "python3.12", "3.12")
  precious = machine.path / "precious" / "pyvenv.cfg"
  precious.parent.mkdir()
  precious.write_text("home = mine\n")
  done = machine.run(f"--dir={precious.parent}")
  assert done.returncode == 1
  assert "was not made by this script" in done.stderr
  assert precious.exists()


def test_lock_files_pin_everything_that_setup_asks_for():
  """Also that this Python's environment, when made by the script, is the pinned one."""
  for name in ("py311.txt", "py312.txt"):
    lines = (ROOT / "third_party" / "python" / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin.split(";")[0] for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    asked = subprocess.run(
      [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 0, asked.stderr
    assert set(asked.stdout.split()) - pinned == set()


PROBE = """
import re, setuptools
asked = {}
setuptools.setup = lambda **options: asked.update(options)
exec(open("setup.py").read())
names = asked["install_requires"] + asked["extras_require"]["test"]
print(*(re.match(r"[A-Za-z0-9_.-]+", n)[0].lower().replace("_", "-") for n in names))
"""
