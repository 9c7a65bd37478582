"""The flags that every training command has: a Fiddle configuration and a work directory."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import fiddle as fdl
from absl import flags
from fiddle import absl_flags, printing
from fiddle.experimental import serialization

import configs
from agentrl_jax.orchestrate.run import WrittenConfig
from configs.engines import TRANSPORTS, use_transport
from launch import command

T = TypeVar("T")
_UNQUOTED = re.compile(r'Could not parse literal value "(.*)" while trying to set "(.*?)"\.')
_UNKNOWN_MODULE = "the folder of a module of your own must be in PYTHONPATH"

flags.disclaim_key_flags()  # `--help` shows a command's flags, wherever they are defined


def define_config() -> flags.FlagHolder:
  """`--config=config:NAME`, then any of `set:PATH=VALUE` and `fiddler:NAME`; or `config_file:PATH`.

  NAME is a function of `configs`, or `module.function` of anything that can be imported.
  """
  holder = absl_flags.DEFINE_fiddle_config(
    "config",
    default_module=configs,
    help_string="config:NAME, then any of set:PATH=VALUE and fiddler:NAME; or config_file:PATH",
    allow_imports=True,
  )
  flags.declare_key_flag("config")
  return holder


def define_workdir() -> flags.FlagHolder[str | None]:
  """`--workdir=DIR`."""
  return flags.DEFINE_string("workdir", None, "The run's directory; made if absent.")


def define_show() -> flags.FlagHolder[bool]:
  """`--show`."""
  return flags.DEFINE_bool(
    "show", False, "Print every value that --config=set:PATH=VALUE changes, and end."
  )


def define_transport() -> flags.FlagHolder[str | None]:
  """`--transport=NAME`."""
  return flags.DEFINE_enum(
    "transport",
    None,
    list(TRANSPORTS),
    "How weights get to a SGLang server, instead of the configuration's way; auto takes the best "
    "that works and says why a better one does not.",
  )


def with_transport(
  flag: flags.FlagHolder, transport: flags.FlagHolder[str | None]
) -> flags.FlagHolder:
  """The configuration, changed by `--transport` where that is given. Raises ValueError if the
  engine takes none.
  """
  if transport.value is not None:
    use_transport(given(flag), transport.value)
  return flag


def built(flag: flags.FlagHolder, kind: type[T]) -> T:
  """What the configuration builds. Raises ValueError if it is missing or builds something else."""
  result: object = fdl.build(given(flag))
  if not isinstance(result, kind):
    raise ValueError(f"--config builds {type(result).__name__}, this command takes {kind.__name__}")
  return result


def opened(workdir: flags.FlagHolder[str | None]) -> Path:
  """The work directory, made if it is not there."""
  if not workdir.value:
    raise ValueError("--workdir is missing: give the directory that the run shall live in")
  directory = Path(workdir.value)
  directory.mkdir(parents=True, exist_ok=True)
  command.traceback_directory = directory
  return directory


def written(config: flags.FlagHolder) -> WrittenConfig:
  """The resolved configuration: JSON that runs again with `config_file:PATH`, and a text with a
  line `path = value` for each value, marked where it is a default.

  Raises ValueError where it holds what JSON cannot name: a closure, a partial application.
  """
  resolved = given(config)
  try:
    made = serialization.dump_json(resolved, indent=2)
  except (AttributeError, serialization.UnserializableValueError) as error:
    raise ValueError(
      "the configuration cannot be written down and run again: it holds something that no import "
      "gives. Give `fdl.Config(function, ...)` of a module's function, not what it returned"
    ) from error
  text = printing.as_str_flattened(resolved, include_types=False)
  text = re.sub(r"<\[unset; default: (.*)\]>", r"\1  (default)", text)
  kind = fdl.get_callable(resolved)
  for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
    if field.default_factory is not dataclasses.MISSING:
      value = f"{field.name} = {field.default_factory()}"
      text = text.replace(f"\n{field.name} = <factory>", f"\n{value}")
  return WrittenConfig(made, re.sub(r"<function (\S+) at 0x\w+>", r"\1", text) + "\n")


def imported(load: Callable[[], T]) -> T:
  """What `load` gives. Raises ValueError where that names a module that no import finds."""
  try:
    return load()
  except ModuleNotFoundError as error:
    raise ValueError(f"{str(error).splitlines()[0]}: {_UNKNOWN_MODULE}") from None


def given(config: flags.FlagHolder) -> fdl.Config:
  """What the flag says, read here first: Fiddle's errors in terms of this project's flags."""
  try:
    value = imported(lambda: config.value)
  except (json.JSONDecodeError, KeyError) as error:
    flag = flags.FLAGS[config.name]
    if not isinstance(flag, absl_flags.FiddleFlag) or flag.first_command != "config_file":
      raise
    text = f"config_file gives no configuration ({error!r}): a run's is config.json"
    raise ValueError(text) from None
  except ValueError as error:
    text = re.sub(r"<function (\S+) at 0x\w+>", r"\1", command.one_line(error))
    if found := _UNQUOTED.match(text):
      literal, path = found.groups()
      text = (
        f"{path} is set to {literal}, no Python literal; a string needs quotes of its own: "
        f"--config='set:{path}=\"{literal}\"'"
      )
    elif text.startswith("not enough values to unpack"):  # Fiddle cuts at the "="
      text = "a --config=set: has no value: --config=set:PATH=VALUE"
    elif "Could not resolve reference to named function" in text:
      text = f"{text.split(': ')[0]}: there are {', '.join(configs.__all__)}"
    elif "No module named" in text and _UNKNOWN_MODULE not in text:
      text = f"{text}: {_UNKNOWN_MODULE}"
    raise ValueError(text) from None
  if value is None:
    raise ValueError("--config is missing: for example --config=config:quickstart")
  return value
