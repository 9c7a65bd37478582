"""The house's import arrows, the home of algorithm names, and the host side's freedom from jax."""

import ast
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "agentrl_jax"

# What each layer may import, itself included: the transitive closure of ARCHITECTURE's arrows.
DEVICE_LOW = {"types", "ops"}
LEARNER = DEVICE_LOW | {"losses", "models", "learner"}
HOST = {"rollout", "envs"}
SAMPLER = DEVICE_LOW | {"models", "rollout", "sampler"}
TRANSFER = LEARNER | {"transfer"}
TOP = TRANSFER | SAMPLER | HOST
ALLOWED = {
  "types": {"types"},
  "ops": DEVICE_LOW,
  "losses": DEVICE_LOW | {"losses"},
  "models": DEVICE_LOW | {"models"},
  "learner": LEARNER,
  "transfer": TRANSFER,
  "rollout": {"rollout"},
  "envs": HOST,
  "sampler": SAMPLER,
  "orchestrate": TOP | {"orchestrate"},
  "analysis": TOP | {"analysis"},
}
# Nothing in the package may need these.
LEAVES = {"experiments", "launch", "configs"}

ALGORITHMS = re.compile(
  r"(?<![a-z])(dr_?)?(grpo|gspo|gmpo|dapo|cispo|ppo|rloo|reinforce_?pp|sapo|vapo|gtpo|mpo|ac2)(?![a-z])",
  re.IGNORECASE,
)


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: pathlib.Path) -> set[str]:
  """Absolute dotted names that a file imports anywhere, functions included."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    match node:
      case ast.Import():
        names |= {alias.name for alias in node.names}
      case ast.ImportFrom(level=0, module=str(module)):
        names |= {f"{module}.{alias.name}" for alias in node.names}
      case ast.ImportFrom(level=level) if level:
        pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno}: relative import")
  return names


def layer(name: str) -> str | None:
  """`agentrl_jax.ops.scans.x` -> `ops`; None outside the package."""
  parts = name.split(".")
  return parts[1] if parts[0] == "agentrl_jax" and len(parts) > 1 else None


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
  own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
  if own == "__init__":
    assert not {layer(name) for name in imports(path)} - {None}, "the package root imports nothing"
    return
  assert own in ALLOWED, f"layer {own!r} is not in ARCHITECTURE's arrows"
  for name in sorted(imports(path)):
    assert name.split(".")[0] not in LEAVES, f"{path.relative_to(ROOT)} imports {name}, a leaf"
    target = layer(name)
    assert target is None or target in ALLOWED[own], f"{own} may not import {name}"


def test_experiments_are_imported_by_nothing():
  for folder in ("configs", "launch"):
    for path in sources(ROOT / folder):
      guilty = sorted(n for n in imports(path) if n.split(".")[0] == "experiments")
      assert not guilty, f"{path.relative_to(ROOT)} imports {guilty}"


def test_names_of_algorithms_stay_in_their_places():
  allowed = {PACKAGE / "losses" / "recipes.py"}
  for path in sources(PACKAGE) + sources(ROOT / "launch"):
    if path in allowed:
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      for word in words(node):
        assert not ALGORITHMS.search(word), (
          f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} names an algorithm: {word!r}"
        )


def words(node: ast.AST) -> list[str]:
  """The identifiers and code strings of a node; docstrings may cite papers, so not those."""
  match node:
    case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
      return [name]
    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
      return [name]
    case ast.keyword(arg=str(name)) | ast.alias(name=name):
      return [name]
    case ast.Constant(value=str(text)) if "\n" not in text and " " not in text:
      return [text]
  return []


@pytest.mark.parametrize(
  ("word", "named"),
  [
    ("grpo", True), ("use_grpo_loss", True), ("DAPOConfig", True), ("dr_grpo", True), ("ppo", True),
    ("opposite", False), ("group_relative", False), ("supported", False), ("temporal", False),
    ("component", False), ("opportunity", False),
  ],
)  # fmt: skip
def test_the_pattern_for_algorithm_names(word, named):
  assert bool(ALGORITHMS.search(re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])", "_", word))) is named


def test_host_side_loads_no_jax():
  modules = ["agentrl_jax"]
  for name in ("rollout", "envs"):
    prefix = f"agentrl_jax.{name}"
    modules.append(prefix)
    modules += [m.name for m in pkgutil.walk_packages([str(PACKAGE / name)], f"{prefix}.")]
  program = (
    "import importlib, sys\n"
    f"for name in {modules!r}:\n"
    "  importlib.import_module(name)\n"
    "  guilty = sorted({'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules))\n"
    "  if guilty: sys.exit(f'{name} loads {guilty}')\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
