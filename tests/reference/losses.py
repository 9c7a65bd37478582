"""The formulas of `losses/` as loops over trajectories and tokens, in Python floats.

Everything takes `batches.Trajectory` objects and returns, for each, a list with one number per
action token in time order. Nothing here is shared with the library.
"""

import math
import statistics

from tests.reference.batches import Trajectory

Lists = list[list[float]]


def units_of(one: Trajectory, scale: str) -> list[list[int]]:
  """Indices of a trajectory's action tokens (in time order), unit by unit."""
  places = one.places()
  turn = [one.streams[s].turn[i] for s, i in places]
  if scale == "token":
    return [[j] for j in range(len(places))]
  if scale == "traj":
    return [list(range(len(places)))] if places else []
  found: list[list[int]] = []
  for j, k in enumerate(turn):
    fresh = j == 0 or turn[j - 1] != k
    if scale == "turn":
      split = fresh
    elif scale.startswith("chunk"):
      split = fresh or len(found[-1]) == int(scale.removeprefix("chunk"))
    elif scale.startswith("marked"):
      marks = {int(m) for m in scale.removeprefix("marked").split(",")}
      split = fresh or one.actions("tokens")[j - 1] in marks
    else:
      raise ValueError(scale)
    found.append([j]) if split else found[-1].append(j)
  return found


def scored(trajectories: list[Trajectory]) -> list[Trajectory]:
  return [one for one in trajectories if one.group >= 0]


def group_relative(trajectories: list[Trajectory], kind: str) -> Lists:
  out = []
  pooled, freedom = 0.0, 0
  for g in {one.group for one in scored(trajectories)}:
    returns = [sum(one.rewards) for one in trajectories if one.group == g]
    mean = sum(returns) / len(returns)
    pooled += sum((r - mean) ** 2 for r in returns)
    freedom += len(returns) - 1
  for one in trajectories:
    returns = [sum(other.rewards) for other in trajectories if other.group == one.group]
    mean, mine = sum(returns) / len(returns), sum(one.rewards)
    if one.group < 0 or len(returns) < 2 or max(returns) - min(returns) < 1e-6:
      a = 0.0
    elif kind == "std":
      a = (mine - mean) / (statistics.stdev(returns) + 1e-6)
    elif kind == "centred":
      a = mine - mean
    elif kind == "shared":
      a = (mine - mean) / (math.sqrt(pooled / freedom) + 1e-6)
    elif kind == "mean":
      a = (mine - mean) / mean if mean > 0 else 0.0
    elif kind == "others":
      a = mine - (sum(returns) - mine) / (len(returns) - 1)
    else:
      raise ValueError(kind)
    out.append([a] * len(one.places()))
  return out


def turn_return(one: Trajectory, k: int, gamma: float) -> float:
  return sum(gamma ** (j - k) * r for j, r in enumerate(one.rewards) if j >= k)


def group_relative_turns(trajectories: list[Trajectory], gamma: float) -> Lists:
  out = []
  for one in trajectories:
    pool = [
      turn_return(other, k, gamma)
      for other in trajectories
      if other.group == one.group
      for k in range(len(other.rewards))
    ]
    a = []
    for s, i in one.places():
      mine = turn_return(one, one.streams[s].turn[i], gamma)
      flat = one.group < 0 or len(pool) < 2 or max(pool) - min(pool) < 1e-6
      mean = sum(pool) / len(pool)
      a.append(0.0 if flat else (mine - mean) / (statistics.stdev(pool) + 1e-6))
    out.append(a)
  return out


def anchor(one: Trajectory, k: int) -> tuple[int, ...]:
  """The non-action tokens directly before turn k in its stream."""
  for piece in one.streams:
    if k in piece.turn:
      start = piece.turn.index(k)
      seen = []
      for i in range(start - 1, -1, -1):
        if piece.turn[i] >= 0:
          break
        seen.append(piece.tokens[i])
      return tuple(seen)
  raise ValueError(f"turn {k} has no token")


def step_groups(trajectories: list[Trajectory], gamma: float) -> Lists:
  steps = [
    (one.group, anchor(one, k), turn_return(one, k, gamma))
    for one in scored(trajectories)
    for k in range(len(one.rewards))
  ]
  out = []
  for one in trajectories:
    a = []
    for s, i in one.places():
      k = one.streams[s].turn[i]
      same = [r for g, o, r in steps if g == one.group and o == anchor(one, k)]
      a.append(turn_return(one, k, gamma) - sum(same) / len(same) if one.group >= 0 else 0.0)
    out.append(a)
  return out


def recursion(rewards, values, boot, gammas, lams) -> list[float]:
  """Backward GAE over steps of one trajectory."""
  out, following, advantage = [], boot, 0.0
  for r, v, g, l in reversed(list(zip(rewards, values, gammas, lams, strict=True))):  # noqa: E741
    advantage = r + g * following - v + g * l * advantage
    following = v
    out.append(advantage)
  return out[::-1]


def token_rewards(one: Trajectory) -> list[float]:
  turns = units_of(one, "turn")
  out = [0.0] * len(one.places())
  present = sorted({one.streams[s].turn[i] for s, i in one.places()})
  for k, unit in zip(present, turns, strict=True):
    out[unit[-1]] = one.rewards[k]
  return out


def gae(trajectories: list[Trajectory], scale: str, gamma: float, lam) -> tuple[Lists, Lists]:
  """(advantage, value target), both on every token of a unit; `lam` is a number or of the steps."""
  advantages, targets = [], []
  for one in trajectories:
    units, values, r = units_of(one, scale), one.actions("old_value"), token_rewards(one)
    a, target = [0.0] * len(values), [0.0] * len(values)
    if one.group >= 0 and units:
      factor = lam(len(units)) if callable(lam) else lam
      v = [values[unit[0]] for unit in units]
      rewards = [sum(r[j] for j in unit) for unit in units]
      n = len(units)
      steps = recursion(rewards, v, one.bootstrap(), [gamma] * n, [factor] * n)
      for unit, step, value in zip(units, steps, v, strict=True):
        for j in unit:
          a[j], target[j] = step, step + value
    advantages.append(a)
    targets.append(target)
  return advantages, targets


def two_scale(trajectories: list[Trajectory], inner, outer, scale: str = "turn") -> Lists:
  """`inner` and `outer` are (gamma, lambda)."""
  out = []
  for one in trajectories:
    values, r = one.actions("old_value"), token_rewards(one)
    leaves = {unit[-1] for unit in units_of(one, scale)}
    factors = [outer if j in leaves else inner for j in range(len(values))]
    gammas, lams = [f[0] for f in factors], [f[1] for f in factors]
    a = recursion(r, values, one.bootstrap(), gammas, lams)
    out.append(a if one.group >= 0 else [0.0] * len(a))
  return out


def resolution_mix(trajectories, traj, turn, token, gamma, lam) -> Lists:
  out = []
  for one, a in zip(trajectories, gae(trajectories, "token", gamma, lam)[0], strict=True):
    mixed = [0.0] * len(a)
    for unit in units_of(one, "turn"):
      coarse = sum(a) / len(a)
      middle = sum(a[j] for j in unit) / len(unit)
      for j in unit:
        mixed[j] = traj * coarse + turn * (middle - coarse) + token * (a[j] - middle)
    out.append(mixed)
  return out


def reward_to_go(trajectories: list[Trajectory], gamma: float) -> Lists:
  out = []
  for one in trajectories:
    r, n = token_rewards(one), len(one.places())
    out.append(
      [sum(gamma ** (i - j) * r[i] for i in range(j, n)) * (one.group >= 0) for j in range(n)]
    )
  return out


def whiten(trajectories: list[Trajectory], base: Lists, scale: str) -> Lists:
  votes = [
    sum(a[j] for j in unit) / len(unit)
    for one, a in zip(trajectories, base, strict=True)
    if one.group >= 0
    for unit in units_of(one, scale)
  ]
  mean, spread = sum(votes) / len(votes), math.sqrt(statistics.variance(votes) + 1e-8)
  return [
    [(x - mean) / spread if one.group >= 0 else 0.0 for x in a]
    for one, a in zip(trajectories, base, strict=True)
  ]


def endpoint(trajectories: list[Trajectory], min_valid: int) -> tuple[Lists, Lists]:
  """(advantage, critic target at each trajectory's first action token, nan where there is none)."""
  worth = [
    sum(one.rewards) + (one.streams[-1].old_value[-1] if one.truncated else 0.0)
    for one in trajectories
  ]
  advantages, targets = [], []
  for one, mine in zip(trajectories, worth, strict=True):
    valid = [
      w
      for w, o in zip(worth, trajectories, strict=True)
      if o.group == one.group >= 0 and math.isfinite(w)
    ]
    mean = sum(valid) / len(valid) if valid else 0.0
    members = [o for o in trajectories if o.group == one.group]
    mine = mine if math.isfinite(mine) else mean
    live = one.group >= 0 and len(members) > 1
    n = len(one.places())
    advantages.append([mine - mean if live else 0.0] * n)
    tenths = math.ceil(round(mean * 10, 4) - 0.5)
    good = one.group >= 0 and len(valid) >= min_valid and n
    targets.append([tenths / 10] + [math.nan] * (n - 1) if good else [math.nan] * n)
  return advantages, targets


def per_unit(trajectories: list[Trajectory], tokens: Lists, scale: str, how: str) -> Lists:
  """A number per unit from its tokens' log-ratios, on each token of the unit."""
  out = []
  for one, d in zip(trajectories, tokens, strict=True):
    made = [0.0] * len(d)
    for unit in units_of(one, scale):
      x = [d[j] for j in unit]
      value = {
        "mean": lambda x=x: sum(x) / len(x),
        "sum": lambda x=x: sum(x),
        "arithmetic": lambda x=x: math.log(sum(math.exp(v) for v in x) / len(x)),
      }[how]()
      for j in unit:
        made[j] = value
    out.append(made)
  return out


def mean_weights(trajectories: list[Trajectory], scale: str) -> Lists:
  """1 / (units x tokens of the unit) over scored trajectories."""
  if scale == "group":
    sizes: dict[int, int] = {}
    for one in scored(trajectories):
      sizes[one.group] = sizes.get(one.group, 0) + len(one.places())
    count = sum(n > 0 for n in sizes.values())
    return [
      [1 / (count * sizes[one.group]) if one.group >= 0 else 0.0 for _ in one.places()]
      for one in trajectories
    ]
  total = sum(len(units_of(one, scale)) for one in scored(trajectories))
  out = []
  for one in trajectories:
    w = [0.0] * len(one.places())
    for unit in units_of(one, scale) if one.group >= 0 else []:
      for j in unit:
        w[j] = 1 / (total * len(unit))
    out.append(w)
  return out


def nested_weights(trajectories: list[Trajectory]) -> Lists:
  """1 / (trajectories x turns of it x tokens of the turn)."""
  total = sum(bool(one.places()) for one in scored(trajectories))
  out = []
  for one in trajectories:
    w, turns = [0.0] * len(one.places()), units_of(one, "turn")
    for unit in turns if one.group >= 0 else []:
      for j in unit:
        w[j] = 1 / (total * len(turns) * len(unit))
    out.append(w)
  return out


def surrogate(name: str, r: float, a: float, d: float, **p) -> tuple[float, float, bool]:
  """(loss, coefficient of d logp, clipped) of one token."""
  if name == "reinforce":
    capped = min(max(r, p.get("low", 0.0)), p.get("cap", math.inf))
    return -capped * a * d, -capped * a, capped != r
  if name == "clip":
    low, high, dual = p["low"], p["high"], p.get("dual")
    inside = min(max(r, 1 - low), 1 + high)
    loss, slope = -min(r * a, inside * a), -r * a
    dead = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
    if dual and a < 0 and r > dual:
      loss, dead = -dual * a, True
    return loss, 0.0 if dead else slope, dead
  if name == "gated":
    dead = (a > 0 and r > 1 + p["high"]) or (a < 0 and r < 1 - p["low"])
    return (0.0, 0.0, True) if dead else (-r * a * d, -r * a, False)
  if name == "soft_gate":
    tau = p["positive"] if a > 0 else p["negative"]
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return -a * 4 / tau * s, -a * r * 4 * s * (1 - s), False
  if name == "unclipped":
    return -r * a, -r * a, False
  if name == "likelihood":
    return -a * d, -a, False
  raise ValueError(name)
