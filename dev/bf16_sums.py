"""Sums of gradients in 16 bits (`--reduce-dtype bf16`), as a ring of ranks adds them up: each hop rounds to bf16.

Prints how far such a sum is from the exact sum of the same bf16 terms, as a share of the sum's size (both root mean
squares), the same for a sum that is rounded once, and how many terms are lost whole: adding them changes nothing. A
term is normal noise around a mean, as a rank's gradient of a weight is; the mean is a share of the noise's deviation.

    python3 dev/bf16_sums.py      (needs numpy)
"""
import numpy as np

DRAWS = 100_000


def bf16(x):
  """Rounds float32 to the nearest bf16, ties to even; the result is float32 again."""
  bits = x.astype(np.float32).view(np.uint32)
  return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rms(x):
  return np.sqrt(np.mean(np.square(x, dtype=np.float64)))


def row(random, ranks, mean):
  terms = bf16(mean + random.standard_normal((ranks, DRAWS)))
  exact = terms.astype(np.float64).sum(0)
  ring, lost = terms[0].copy(), 0
  for term in terms[1:]:
    after = bf16(ring + term)
    lost += np.mean((after == ring) & (term != 0)) / (ranks - 1)
    ring = after
  error, once = rms(ring - exact) / rms(exact), rms(bf16(exact) - exact) / rms(exact)
  print(f"| {ranks} | {mean} | {error:.2%} | {once:.2%} | {error / once:.1f} | {lost:.1%} |")


def main():
  print("| ranks | mean, in deviations | error in a ring | rounded once | ratio | terms lost |\n|--:|--:|--:|--:|--:|--:|")
  random = np.random.default_rng(0)
  for mean in (0.0, 0.1, 1.0):
    for ranks in (2, 8, 32, 128, 512):
      row(random, ranks, mean)


if __name__ == "__main__":
  main()
