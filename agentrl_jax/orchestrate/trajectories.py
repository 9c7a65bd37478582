"""Episodes on disk, one JSON line each, with the credit that their tokens got."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl_jax.orchestrate.pack import Packed, unpack
from agentrl_jax.rollout.records import Episode, to_json


def write_trajectories(
  path: Path, groups: Sequence[Sequence[Episode]], packed: Packed, advantage: np.ndarray
) -> None:
  """All episodes of the step, and the `advantage` [B T] that trained action tokens got."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(to_json(e) + "\n" for group in groups for e in group))
  advantages = unpack(advantage, packed)
  rows = (
    {"trajectory_id": e.trajectory_id, "advantage": [round(float(a), 5) for a in values]}
    for e, values in zip(packed.episodes, advantages, strict=True)
  )
  text = "".join(json.dumps(row) + "\n" for row in rows)
  path.with_suffix(".advantages.jsonl").write_text(text)
