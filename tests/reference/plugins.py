"""What a SGLang server finds on its path of a plug-in that is not installed: for $PYTHONPATH."""

import shutil
from pathlib import Path


def write_plugin(directory: Path, source: Path, register: str) -> Path:
  """Puts `source`, a module or a package, into the directory, and an entry point to `register` of
  it ("module:function").
  """
  if source.is_dir():
    shutil.copytree(source, directory / source.name)
  else:
    shutil.copy(source, directory)
  name = f"{source.stem}_path"
  info = directory / f"{name}-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
  (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {register}\n")
  return directory
