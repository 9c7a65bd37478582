"""A mixture of experts by loops over tokens and experts, in float64 numpy."""

import numpy as np


def softmax(x):
  shifted = np.exp(x - x.max())
  return shifted / shifted.sum()


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def largest(scores, count, among=None):
  """Indices of the largest scores, best first."""
  among = range(len(scores)) if among is None else among
  return sorted(among, key=lambda e: -scores[e])[:count]


def route_softmax(logits, count, normalized):
  """{expert: weight} of one token."""
  score = softmax(logits)
  chosen = {e: score[e] for e in largest(score, count)}
  total = sum(chosen.values()) if normalized else 1.0
  return {e: s / total for e, s in chosen.items()}


def route_sigmoid(logits, correction, count, normalized, groups, kept, scale):
  """{expert: weight} of one token."""
  score = sigmoid(logits)
  wanted = score + correction
  size = len(logits) // groups
  members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
  best = [sum(sorted((wanted[e] for e in group), reverse=True)[:2]) for group in members]
  allowed = [e for g in largest(best, kept) for e in members[g]] if groups != kept else None
  chosen = {e: score[e] for e in largest(wanted, count, allowed)}
  total = sum(chosen.values()) if normalized else 1.0
  return {e: scale * s / total for e, s in chosen.items()}


def mix(x, chosen, gate, up, down):
  """One token through its experts."""
  out = np.zeros_like(x)
  for e, weight in chosen.items():
    opened = x @ gate[e]
    out += weight * ((opened * sigmoid(opened) * (x @ up[e])) @ down[e])
  return out


def grouped_matmul(x, weight, sizes):
  out, row = np.zeros((len(x), weight.shape[2])), 0
  for group, size in enumerate(sizes):
    for _ in range(size):
      out[row] = x[row] @ weight[group]
      row += 1
  return out


def router_losses(logits, experts):
  """(load balance, z) of one layer; logits [N E], experts: the set chosen by each token."""
  tokens, count = logits.shape
  balance = 0.0
  for e in range(count):
    share = sum(e in chosen for chosen in experts) / tokens
    balance += share * sum(softmax(row)[e] for row in logits) / tokens
  z = sum(np.log(np.exp(row).sum()) ** 2 for row in logits) / tokens
  return count * balance, z
