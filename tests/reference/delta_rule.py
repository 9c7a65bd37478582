"""The gated delta rule and the short convolution as loops over rows, positions and heads."""

import numpy as np


def stream(sample, parent, row, position):
  """The positions before and at `position` that it sees, in order."""
  own, of = sample[row][position], parent[row][position]
  return [t for t in range(position + 1) if sample[row][t] in (own, of) and own >= 0]


def recurrence(query, key, value, log_decay, strength, sample, parent):
  """(what each position reads, the memory after the last), each from its stream's start."""
  rows, length, heads, each, width = value.shape
  wide = query.shape[-1]
  read = np.zeros(value.shape)
  last = np.zeros((rows, heads, each, wide, width))
  for b in range(rows):
    for t in range(length):
      memory = np.zeros((heads, each, wide, width))
      for s in stream(sample, parent, b, t):
        for h in range(heads):
          k = key[b, s, h] / np.sqrt(np.sum(key[b, s, h] ** 2) + 1e-6)
          for r in range(each):
            kept = memory[h, r] * np.exp(log_decay[b, s, h, r])
            change = strength[b, s, h, r] * (value[b, s, h, r] - kept.T @ k)
            memory[h, r] = kept + np.outer(k, change)
      for h in range(heads):
        q = query[b, t, h] / np.sqrt(np.sum(query[b, t, h] ** 2) + 1e-6) / np.sqrt(wide)
        for r in range(each):
          read[b, t, h, r] = memory[h, r].T @ q
      last[b] = memory
  return read, last


def convolved(x, taps, sample, parent):
  """Each channel over a position and those before it of its stream."""
  made = np.zeros(x.shape)
  for b in range(x.shape[0]):
    for t in range(x.shape[1]):
      near = stream(sample, parent, b, t)[-len(taps) :]
      for back, s in enumerate(reversed(near)):
        made[b, t] += x[b, s] * taps[len(taps) - 1 - back]
  return made
