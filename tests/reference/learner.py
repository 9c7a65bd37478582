"""The toy model's supervised gradient and AdamW in numpy float64, by loops."""

import numpy as np


def toy_gradient(weights, batch, *, temperature):
  """(loss, gradient) of the mean negative log-likelihood of action tokens."""
  embedding, norm, head = weights["embedding"], weights["norm"], weights["head"]
  gradient = {name: np.zeros_like(value) for name, value in weights.items()}
  loss, count = 0.0, int(batch.action.sum())
  for b, t in zip(*np.nonzero(batch.action), strict=True):
    before, token = batch.tokens[b, t - 1], batch.tokens[b, t]
    hidden = embedding[before] * norm
    logits = hidden @ head / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    loss -= np.log(p[token]) / count
    d_logits = p.copy()
    d_logits[token] -= 1.0
    d_logits /= count * temperature
    d_hidden = head @ d_logits
    gradient["head"] += np.outer(hidden, d_logits)
    gradient["norm"] += d_hidden * embedding[before]
    gradient["embedding"][before] += d_hidden * norm
  return loss, gradient


def adam_step(weights, gradient, moments, k, *, rate, clip, b1, b2, eps, decay):
  """Weights after update k (from 0); `moments` (first, second) change in place."""
  norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
  scale = min(1.0, clip / norm)
  out = {}
  for name, w in weights.items():
    g = gradient[name] * scale
    moments[0][name] = b1 * moments[0][name] + (1 - b1) * g
    moments[1][name] = b2 * moments[1][name] + (1 - b2) * g * g
    first = moments[0][name] / (1 - b1 ** (k + 1))
    second = moments[1][name] / (1 - b2 ** (k + 1))
    out[name] = w - rate * (first / (np.sqrt(second) + eps) + decay.get(name, 0.0) * w)
  return out
