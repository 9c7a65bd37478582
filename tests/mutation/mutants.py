# ruff: noqa: E501 -- a line as it is in the source, and as it breaks
"""One-line faults of the loss library, file by file, and the tests that must notice each.

(file, line as it is, line as it breaks, tests that fail). A line must occur exactly once in its file.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
  file: str
  line: str
  broken: str
  tests: str


LOSSES, OPS = "agentrl_jax/losses", "agentrl_jax/ops"
REFERENCES = "tests/losses/test_references.py"
GRADIENTS = "tests/losses/test_gradients.py"
ORACLES = "tests/losses/test_oracles.py"
VALUES = "tests/losses/test_values.py"
READY = "tests/losses/test_readiness.py"
CHECKS = "tests/losses/test_checks.py"
SHARED = "tests/orchestrate/test_shared_prompts.py"

TABLE = {
  f"{LOSSES}/advantages.py": (REFERENCES, [
    ("jnp.sqrt(square_sum / jnp.maximum(count - 1.0, 1.0)) + eps", "jnp.sqrt(square_sum / jnp.maximum(count, 1.0)) + eps"),
    ("return jnp.maximum(count - 1.0, 1.0) / jnp.maximum(count, 1.0)", "return jnp.maximum(count, 1.0) / jnp.maximum(count - 1.0, 1.0)"),
    ("return jnp.where(mean > 0, mean, 1.0)", "return jnp.where(mean > 0, 1.0, mean)"),
    ("freedom = each(count - 1.0)", "freedom = each(count)"),
    ("mean = over(x) / jnp.maximum(count, 1.0)", "mean = over(x) / jnp.maximum(count - 1.0, 1.0)"),
    ("sums = reverse_recurrence(reward[order], jnp.where(ended, 0.0, gamma))", "sums = reverse_recurrence(reward[order], jnp.where(ended, gamma, gamma))"),
    ("variance = jnp.square(centred).sum() / jnp.maximum(count - 1.0, 1.0)", "variance = jnp.square(centred).sum() / count"),
    ("return Credit(-k1(delta))", "return Credit(k1(delta))"),
  ]),
  f"{LOSSES}/anchors.py": (f"{REFERENCES} {SHARED}", [
    ("belongs &= jnp.logical_not(batch.action)", "belongs |= batch.action"),
    ("terms = token * powers[upcoming - column]", "terms = token * powers[0]"),
    ("belongs = (batch.sample >= 0) & (upcoming < length) & (pick(batch.sample) == batch.sample)", "belongs = (batch.sample >= 0) & (upcoming < length)"),
    ("token = batch.tokens.astype(jnp.uint32) + jnp.uint32(1)", "token = batch.tokens.astype(jnp.uint32) * jnp.uint32(0)"),
    ("before = powers[jnp.maximum(spread(last, streams) - batch.position, 0)]", "before = powers[jnp.maximum(spread(last, streams) - batch.position + 1, 0)]"),
    ("inside = (batch.parent >= 0) & (batch.parent != batch.sample)", "inside = batch.parent >= 0"),
    ("observed = Partition(jnp.where(belongs, pick(TURN(batch).ids), -1), batch.turn_traj.shape[0])", "observed = Partition(jnp.where(belongs, pick(TURN(batch).ids) - 1, -1), batch.turn_traj.shape[0])"),
  ]),
  f"{LOSSES}/gae.py": (f"{REFERENCES} {GRADIENTS}", [
    ("return lambda steps: jnp.maximum(0.0, 1.0 - 1.0 / (alpha * jnp.maximum(steps, 1.0)))", "return lambda steps: jnp.maximum(0.0, 1.0 - 1.0 / (alpha * (steps + 1.0)))"),
    ("critic = actor if critic_lam is None else estimate(critic_lam)", "critic = actor"),
    ("gamma = jnp.where(leaves, outer_gamma, inner_gamma)", "gamma = jnp.where(leaves, inner_gamma, outer_gamma)"),
    ("mixed = traj * coarse + turn * (middle - coarse) + token * (a - middle)", "mixed = traj * coarse + turn * (middle - coarse) + token * (a - coarse)"),
    ("return jnp.where(is_last(batch, turns), spread(batch.turn_reward, turns), 0.0)", "return jnp.where(is_first(batch, turns), spread(batch.turn_reward, turns), 0.0)"),
    ("present = jnp.maximum((counts > 0).sum(dtype=jnp.float32), 1.0)", "present = jnp.maximum(counts.sum(dtype=jnp.float32), 1.0)"),
    ("reward = spread(unit_sum(token_rewards(batch), units), units)", "reward = spread(unit_mean(token_rewards(batch), units), units)"),
  ]),
  f"{LOSSES}/endpoint.py": (f"{REFERENCES} {ORACLES} {READY}", [
    ("worth = trajectory_returns(batch) + jnp.where(batch.traj_truncated, value, 0.0)", "worth = trajectory_returns(batch)"),
    ("filled = jnp.where(valid, worth, mean)", "filled = jnp.where(valid, worth, 0.0)"),
    ("return jnp.ceil(x / step - 0.5 - 1e-4) * step", "return jnp.floor(x / step + 0.5 + 1e-4) * step"),
    ("learns = is_first(batch, starts) & spread((count >= min_valid) & (group >= 0), starts)", "learns = is_first(batch, starts) & spread((count > min_valid) & (group >= 0), starts)"),
    ("return jnp.where(spread(valid, TRAJ(batch)), base(batch, aux, credit), 0.0)", "return base(batch, aux, credit)"),
  ]),
  f"{LOSSES}/ratios.py": (f"{GRADIENTS} {REFERENCES}", [
    ("mean, own = jax.lax.stop_gradient((coarse(log_ratio, batch), log_ratio))", "mean, own = coarse(log_ratio, batch), jax.lax.stop_gradient(log_ratio)"),
    ("log_ratio = jnp.where(stale, jax.lax.stop_gradient(log_ratio), log_ratio)", "log_ratio = jnp.where(stale, log_ratio, log_ratio)"),
    ("bounded = sign * jnp.minimum(sign * log_ratio, sign * jnp.clip(log_ratio, -low, high))", "bounded = jnp.clip(log_ratio, -low, high)"),
    ("return spread(unit_sum(log_ratio, units), units)", "return spread(unit_mean(log_ratio, units) * 1.0, units)"),
    ("stale = (drift > max_kl) & (batch.credit.advantage < 0)", "stale = (drift < max_kl) & (batch.credit.advantage < 0)"),
    ("return jnp.log(mean)", "return mean - 1.0"),
  ]),
  f"{LOSSES}/surrogates.py": (GRADIENTS, [
    ("return -jnp.clip(ratio, low, cap) * advantage * log_ratio, (ratio > cap) | (ratio < low)", "return -jnp.clip(ratio, 0.0, cap) * advantage * log_ratio, (ratio > cap) | (ratio < low)"),
    ("loss = jnp.where(advantage < 0, jnp.minimum(loss, -dual * advantage), loss)", "loss = jnp.minimum(loss, -dual * advantage)"),
    ("loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)", "loss = -jnp.maximum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)"),
    ("return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))", "return (ratio > 1 + high) | (ratio < 1 - low)"),
    ("return -advantage * 4.0 / tau * gate, jnp.zeros(log_ratio.shape, bool)", "return -advantage * 4.0 * gate, jnp.zeros(log_ratio.shape, bool)"),
    ("tau = jnp.where(advantage > 0, positive, negative)", "tau = jnp.where(advantage > 0, negative, positive)"),
    ("return jnp.where(outside, 0.0, -ratio * advantage * log_ratio), outside", "return -ratio * advantage * log_ratio, outside"),
  ]),
  f"{LOSSES}/penalties.py": (GRADIENTS, [
    ("return slope + jax.lax.stop_gradient(value(delta) - slope)", "return slope + value(delta) - jax.lax.stop_gradient(slope)"),
    ("return bounded_exp(_delta(policy, batch.aux.old_logp, batch)) * base(policy, batch)", "return jax.lax.stop_gradient(bounded_exp(_delta(policy, batch.aux.old_logp, batch))) * base(policy, batch)"),
    ("return lambda policy, batch: -coef * jnp.where(batch.traj.action, policy.entropy, 0.0)", "return lambda policy, batch: coef * jnp.where(batch.traj.action, policy.entropy, 0.0)"),
    ("success = (trajectory_returns(batch.traj) > above).astype(jnp.float32)", "success = (trajectory_returns(batch.traj) < above).astype(jnp.float32)"),
    ("return lambda policy, batch: coef * estimator(_delta(policy, batch.aux.old_logp, batch))", "return lambda policy, batch: coef * estimator(-_delta(policy, batch.aux.old_logp, batch))"),
  ]),
  f"{LOSSES}/weights.py": (REFERENCES, [
    ("return spread(1.0 / (jnp.maximum(present, 1.0) * jnp.maximum(counts, 1.0)), units)", "return spread(1.0 / jnp.maximum(counts.sum(), 1.0) * jnp.ones_like(counts), units)"),
    ("parts = unit_sum(is_first(batch, small).astype(jnp.float32), large)", "parts = unit_count(large)"),
    ("return jnp.where(units.ids >= 0, 1.0 / (present * length), 0.0)", "return jnp.where(batch.action, 1.0 / (present * length), 0.0)"),
    ("return lambda batch, aux, credit: jnp.where(scored(batch), 1.0 / divisor, 0.0)", "return lambda batch, aux, credit: jnp.where(batch.action, 1.0 / divisor, 0.0)"),
    ("cut = spread(batch.traj_truncated, TRAJ(batch))", "cut = spread(jnp.logical_not(batch.traj_truncated), TRAJ(batch))"),
  ]),
  f"{LOSSES}/corrections.py": (REFERENCES, [
    ("return base(batch, aux, credit) * jnp.clip(rho, low, cap)", "return base(batch, aux, credit) * jnp.minimum(rho, cap)"),
    ("return base(batch, aux, credit) * jnp.where((rho >= low) & (rho <= high), rho, 0.0)", "return base(batch, aux, credit) * jnp.where((rho >= low) & (rho <= high), 1.0, 0.0)"),
    ("return jnp.where((rho >= low) & (rho <= high), base(batch, aux, credit), 0.0)", "return jnp.where(rho <= high, base(batch, aux, credit), 0.0)"),
    ("drift = -_log_rho(at_scale(TRAJ), batch, aux, credit)", "drift = _log_rho(at_scale(TRAJ), batch, aux, credit)"),
    ("ratio = ratio or at_scale_product(TRAJ)", "ratio = ratio or at_scale(TRAJ)"),
    ("budget = jnp.maximum(1, (share * keep.sum(dtype=jnp.float32)).astype(jnp.int32))", "budget = jnp.maximum(1, (share * keep.size * jnp.ones(())).astype(jnp.int32))"),
    ("spread(unit_mean(k3(-apart), units), units) <= most, base(batch, aux, credit), 0.0", "spread(unit_mean(k3(apart), units), units) <= most, base(batch, aux, credit), 0.0"),
  ]),
  f"{LOSSES}/shaping.py": (REFERENCES, [
    ("cost = unit_sum(k1(apart), restrict(TURN(batch), keep))", "cost = -unit_sum(k1(apart), restrict(TURN(batch), keep))"),
    ("over = jnp.maximum(0.0, unit_count(TRAJ(batch)) - (limit - buffer)) / buffer", "over = jnp.maximum(0.0, unit_count(TRAJ(batch)) - limit) / buffer"),
    ("over = jnp.minimum(over, 1.0) if saturate else over", "over = jnp.minimum(over, 1.0)"),
    ("last = number == jax.ops.segment_max(number, owner, size + 1)[owner]", "last = number == jax.ops.segment_min(number, owner, size + 1)[owner]"),
    ("cost = jnp.where(last, jnp.append(over, 0.0)[owner], 0.0)", "cost = jnp.append(over, 0.0)[owner]"),
  ]),
  f"{LOSSES}/values.py": (VALUES, [
    ("near = old + jnp.clip(value - old, -clip, clip)", "near = jnp.clip(value - old, -clip, clip)"),
    ("error = jnp.maximum(error, jnp.square(near - target))", "error = jnp.minimum(error, jnp.square(near - target))"),
    ("return coef * (0.5 * weight * error).sum(), _moments(value, target, learns)", "return coef * (weight * error).sum(), _moments(value, target, learns)"),
    ("return jnp.maximum(0.0, 1.0 - jnp.abs(place[..., None] - centre))", "return jnp.maximum(0.0, 1.0 - jnp.square(place[..., None] - centre))"),
    ("if policy.value_span not in (None, (low, high)):", "if policy.value_span == (low, high):"),
    ('error = read("value_error_square") - read("value_error") ** 2', 'error = read("value_error_square")'),
  ]),
  f"{LOSSES}/compose.py": (f"{GRADIENTS} tests/losses/test_properties.py", [
    ("token_log_ratio = jnp.where(action, policy.logp, 0.0) - old", "token_log_ratio = policy.logp - old"),
    ("per_token += penalty(policy, batch)", "per_token -= penalty(policy, batch)"),
    ("live = action & (weight != 0)", "live = action"),
    ("total += value", "total = value"),
    ("metrics[name] = add_metrics(metrics[name], metric) if name in metrics else metric", "metrics[name] = metric"),
  ]),
  f"{LOSSES}/readiness.py": (READY, [
    ("return (below + (scaled - below > Fraction(1, 2))) / parts", "return (below + (scaled - below >= Fraction(1, 2))) / parts"),
    ("count = math.ceil(len(ready) * Fraction(str(share)))", "count = math.floor(len(ready) * Fraction(str(share)))"),
    ("if evidence.error >= self.most_local:", "if evidence.error > self.most_local:"),
    ("moved = self.offset + self.step * float(np.sign(self.target - entropy))", "moved = self.offset + self.step * float(np.sign(entropy - self.target))"),
    ("error = abs(guess - target) if np.isfinite(guess) else 1.0", "error = abs(guess - target) if np.isfinite(guess) else 0.0"),
    ("pairs = tokens * prefix + tokens * (tokens + 1) // 2", "pairs = tokens * prefix + tokens * tokens // 2"),
    ("opened=self.opened or state._small()", "opened=state._small()"),
  ]),
  f"{LOSSES}/replay.py": ("tests/losses/test_replay.py", [
    ("return dataclasses.replace(self, stored=(*self.stored, *fresh)[-self.capacity :])", "return dataclasses.replace(self, stored=(*self.stored, *fresh)[: self.capacity])"),
    ("cuts = int(most * len(one.ids)) // grid", "cuts = len(one.ids) // grid"),
    ("own = [one for one in self.stored if one.problem == order[k % len(order)]]", "own = [one for one in self.stored if one.problem == order[0]]"),
    ("chosen.append(Stored(one.problem, one.ids[: grid * int(rng.integers(cuts + 1))]))", "chosen.append(Stored(one.problem, one.ids[: grid * int(rng.integers(max(1, cuts)))]))"),
    ("return reached_chunk and not (out_of_budget or finished or answered)", "return reached_chunk and not (out_of_budget or finished)"),
  ]),
  f"{LOSSES}/describe.py": ("tests/launch/test_explain.py", [
    ("label = inner_role if coefficient is None else f\"{coefficient:g} x {inner_role}\"", "label = role"),
    ("yield from _parts(label, part, depth + 1)", "yield from _parts(label, part, depth)"),
    ("name = function.__qualname__.split(\".<locals>\")[0]", "name = function.__name__"),
    ("if functions and not _is_scale(value):", "if functions:"),
    ("return \"inf\" if math.isinf(value) else f\"{value:g}\"", "return f\"{value:.1f}\""),
  ]),
  f"{LOSSES}/checks.py": (CHECKS, [
    ("wrong = np.flatnonzero(batch.turn_traj[turn] != traj)", "wrong = np.flatnonzero(batch.turn_traj[turn] == -2)"),
    ("fell = np.flatnonzero((np.diff(turn) < 0) & (np.diff(traj) == 0))", "fell = np.flatnonzero((np.diff(turn) > 9999) & (np.diff(traj) == 0))"),
    ("if groups.size and counts.max() < 2:", "if groups.size and counts.max() < 1:"),
    ("bad = np.flatnonzero((returns < 0) & (batch.traj_group >= 0))", "bad = np.flatnonzero((returns < -1) & (batch.traj_group >= 0))"),
    ("if batch.traj_truncated[traj[i]] and action[i]:", "if batch.traj_truncated[traj[i]] and not action[i]:"),
  ]),
  f"{LOSSES}/arguments.py": ("tests/losses/test_arguments.py", [
    ("_expect(given, lambda x: x > 0, \"> 0\")", "_expect(given, lambda x: x >= 0, \"> 0\")"),
    ("_expect(given, lambda x: x >= 0, \">= 0\")", "_expect(given, lambda x: x > 0, \">= 0\")"),
    ("_expect(given, lambda x: 0 <= x <= 1, \"0 to 1\")", "_expect(given, lambda x: 0 < x < 1, \"0 to 1\")"),
    ("if not 0 <= low <= high:", "if not 0 <= low < high:"),
    ("or not math.isfinite(x) or not holds(float(x)):", "or not holds(float(x)):"),
    ("if x is GROUP:", "if x is None:"),
    ("if not callable(x):", "if x is None:"),
  ]),
  f"{LOSSES}/recipes.py": ("tests/losses/test_recipes.py", [
    ("return [kl_to_ref(coef, value_and_gradient(k3, k2))], frozenset({\"ref_logp\"})", "return [kl_to_ref(coef, k3)], frozenset({\"ref_logp\"})"),
    ("loss = policy_loss(at_scale(TRAJ), clip(low, high))", "loss = policy_loss(at_scale(TURN), clip(low, high))"),
    ("loss = policy_loss(straight_through(TRAJ), clip(low, high))", "loss = policy_loss(straight_through(TURN), clip(low, high))"),
    ("return Algorithm(shaped, drop_truncated(mean_over(TOKEN)), loss, NOTHING, GROUPS)", "return Algorithm(shaped, mean_over(TOKEN), loss, NOTHING, GROUPS)"),
    ("return Algorithm(gae(TURN, gamma=gamma, lam=lam, critic_lam=1.0), mean_over(TOKEN), loss, VALUE)", "return Algorithm(gae(TURN, gamma=gamma, lam=lam), mean_over(TOKEN), loss, VALUE)"),
    ("loss = policy_loss(per_token(), reinforce(cap=1.0 + high))", "loss = policy_loss(per_token(), reinforce(cap=high))"),
    ("actor = policy_loss(straight_through(scale), clip(low, high, dual=3.0), *penalties)", "actor = policy_loss(straight_through(scale), clip(low, high, dual=3.0))"),
    ("weight = truncated_is(fixed_length(1.0), cap=float(\"inf\"))", "weight = truncated_is(fixed_length(1.0), cap=1.0)"),
    ("critic or value_loss(coef, clip=0.2)", "critic or value_loss(coef, clip=20.0)"),
    ("to_go = weighted_sum((1.0, to_go), (kl, kl_to_go(gamma))) if kl else to_go", "to_go = weighted_sum((1.0, to_go), (-kl, kl_to_go(gamma))) if kl else to_go"),
    ("advantage = kl_in_reward(leave_one_out(), kl) if kl else leave_one_out()", "advantage = leave_one_out()"),
  ]),
  f"{LOSSES}/routers.py": ("tests/learner/test_routers.py", [
    ("return load_balance * balance + z * square, found", "return load_balance * balance - z * square, found"),
    ("share = sums.tokens[0] / jnp.maximum(whole.tokens[0], 1.0)", "share = jnp.ones(())"),
    ("if not load_balance and not z:", "if not load_balance or not z:"),
    ("needs=algorithm.needs | {\"routers\"}", "needs=algorithm.needs"),
    ("balance, square = load_balance_loss(sums, whole), router_z_loss(sums, whole)", "balance, square = load_balance_loss(sums, sums), router_z_loss(sums, whole)"),
  ]),
  f"{OPS}/scans.py": ("tests/ops/test_scans.py " + REFERENCES, [
    ("return decay_later * decay_earlier, x_earlier + decay_earlier * x_later", "return decay_later * decay_earlier, x_earlier + decay_later * x_later"),
    ("decay = jnp.where(end, 0.0, jnp.where(step, gamma * lam, 1.0))", "decay = jnp.where(end, 0.0, jnp.where(step, gamma * lam, gamma * lam))"),
    ("following = jnp.where(end, final, jnp.roll(carried, -1))", "following = jnp.roll(carried, -1)"),
    ("return jnp.where(batch.traj_truncated, end, 0.0)", "return end"),
    ("delta = jnp.where(step, reward + gamma * following - v, 0.0)", "delta = jnp.where(step, reward + gamma * following + v, 0.0)"),
  ]),
  f"{OPS}/scales.py": ("tests/ops/test_scales.py " + REFERENCES, [
    ("return unit_sum(x, units) / jnp.maximum(unit_count(units), 1.0)", "return unit_sum(x, units)"),
    ("return _is_least(-batch.sample, -batch.position, units)", "return _is_least(batch.sample, -batch.position, units)"),
    ("after = jnp.pad(marked[:, :-1], ((0, 0), (1, 0)))", "after = marked"),
    ("return jnp.where(inside, per_unit[units.ids], jnp.asarray(fill, per_unit.dtype))", "return per_unit[units.ids]"),
    ("return batch.action & (spread(batch.traj_group, TRAJ(batch), fill=-1) >= 0)", "return batch.action"),
  ]),
  f"{OPS}/stats.py": ("tests/ops/test_stats.py", [
    ("return jnp.exp(exponent) * (1.0 - delta - exponent) - 1.0 + delta", "return jnp.exp(exponent) - 1.0 + delta"),
    ("return Metric(a.total + b.total, a.count + b.count)", "return Metric(a.total + b.total, a.count)"),
  ]),
  f"{OPS}/logprobs.py": ("tests/ops/test_logprobs.py", [
    ("source = jnp.maximum(take - 1, 0)", "source = take"),
    ("d_logits = jnp.where(each(valid), d_logits, 0.0) / np.float32(temperature)", "d_logits = jnp.where(each(valid), d_logits, 0.0)"),
    ("return (sample >= 0) & (sample == before)", "return sample >= 0"),
    ("(g + h * (log_p + each(entropy)))", "(g + h * (log_p - each(entropy)))"),
    ("parts.cut(jnp.where(valid[..., None], picked, jnp.zeros((), picked.dtype)))", "parts.cut(picked)"),
  ]),
}  # fmt: skip

MUTANTS = [
  Mutant(file, line, broken, tests)
  for file, (tests, faults) in TABLE.items()
  for line, broken in faults
]
