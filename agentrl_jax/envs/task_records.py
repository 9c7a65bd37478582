"""The tensorflow-datasets builder of a task set: JSON text in array_record files, without
TensorFlow.

Apart from `datasets.py` because it is slow to import: only a run that stores tasks pays for it.
"""

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds

SPLIT = "tasks"


@dataclasses.dataclass
class RecordsConfig(tfds.core.BuilderConfig):
  """What a builder writes; `name` holds the digest of `lines`, so equal tasks are written once."""

  lines: Sequence[str] = dataclasses.field(default=(), repr=False)


class TaskRecords(tfds.core.GeneratorBasedBuilder):
  """One record a task, in the order given."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self) -> tfds.core.DatasetInfo:
    return self.dataset_info_from_configs(
      description="Tasks of one family and split.",
      features=tfds.features.FeaturesDict({"task": tfds.features.Text()}),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
    del dl_manager  # tasks come from the caller
    return {SPLIT: self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
    config = self.builder_config
    assert isinstance(config, RecordsConfig)
    for index, line in enumerate(config.lines):
      yield index, {"task": line}


def prepare(lines: Sequence[str], config_name: str, data_dir: str) -> str:
  """Writes the records and returns the directory they are in."""
  tfds.disable_progress_bar()
  config = RecordsConfig(name=config_name, lines=lines)
  builder = TaskRecords(config=config, data_dir=data_dir, file_format="array_record")
  with contextlib.redirect_stdout(io.StringIO()):  # it announces a download that is none
    builder.download_and_prepare()
  return str(builder.data_dir)


def open_records(directory: str) -> Any:
  """Random access to prepared records: `len`, and `[i]["task"]` as bytes or text."""
  builder: Any = tfds.builder_from_directory(directory)  # its decorators hide the signatures
  return builder.as_data_source(SPLIT)
