"""What a step's groups of episodes say: which carry a signal, and their averages."""

from collections.abc import Sequence

from agentrl_jax.rollout.records import Episode, Outcome


def mixed(groups: Sequence[Sequence[Episode]]) -> list[Sequence[Episode]]:
  """Groups whose scored members did not all get the same reward."""

  def rewards(group: Sequence[Episode]) -> set[float]:
    return {e.reward for e in group if e.outcome is not Outcome.FAULT}

  return [group for group in groups if len(rewards(group)) > 1]


def rollout_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
  """Means over scored episodes: reward, its parts, success, finishing; and the share of mixed
  groups.
  """
  scored = [e for group in groups for e in group if e.outcome is not Outcome.FAULT]
  total = sum(map(len, groups))
  values: dict[str, list[float]] = {
    "reward": [e.reward for e in scored],
    "success": [float(e.outcome is Outcome.SUCCESS) for e in scored],
  }
  for e in scored:
    for name, value in e.info.items():
      values.setdefault(name, []).append(value)
    parts = {name for turn in e.reward_parts for name in turn}
    for name in parts:
      whole = sum(turn.get(name, 0.0) for turn in e.reward_parts)
      values.setdefault(f"reward/{name}", []).append(whole)
  means = {name: sum(x) / len(scored) for name, x in values.items()}
  return means | {
    "mixed_groups": len(mixed(groups)) / max(1, len(groups)),
    "faults": (total - len(scored)) / max(1, total),
  }
