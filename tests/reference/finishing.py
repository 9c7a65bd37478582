"""The split of a change in pass@1, one problem at a time and sample by sample."""


def split_problem(base, rl, extended=()):
  """(finishing, reliability, reach) from lists of (finished, correct) pairs."""

  def rates(samples):
    finished = [correct for done, correct in samples if done]
    f = len(finished) / len(samples)
    return f, (sum(finished) / len(finished) if finished else None)

  (f_base, c_base), (f_rl, c_rl) = rates(base), rates(rl)
  if c_base is None and c_rl is None:
    return 0.0, 0.0, 0.0
  c_base = c_rl if c_base is None else c_base
  c_rl = c_base if c_rl is None else c_rl
  finishing = (f_rl - f_base) * (c_base + c_rl) / 2
  accuracy = (c_rl - c_base) * (f_base + f_rl) / 2
  solved = any(done and correct for done, correct in [*base, *extended])
  return (finishing, accuracy, 0.0) if solved else (finishing, 0.0, accuracy)
