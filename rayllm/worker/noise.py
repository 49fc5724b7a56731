"""Sampling noise as a function: the same (seed, choice, position, token) always draws the same value.

A sample then depends on nothing but the request: not on the batch, nor on the engine that happens to compute it. A
request that goes on elsewhere draws what it would have drawn. The noise of a token is also independent of which
other tokens are still in question, so it can be computed for the survivors of top-k and top-p alone.

The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), whose n-th
output is a mixing function of key + n * gamma, and so can be had without the ones before it.
"""

import numpy as np
import numpy.typing as npt

GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finalizer on one 64-bit number."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise_key(seed: int, choice_index: int, position: int) -> int:
    """The 64-bit key of one sampled token. `position` counts prompt and output tokens before it."""
    key = mix((seed + GAMMA) & MASK)
    key = mix((key + choice_index * GAMMA) & MASK)
    return mix((key + position * GAMMA) & MASK)


def gumbel(key: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Gumbel noise, float32, for each of the token ids: argmax(logit + noise) samples from softmax(logit)."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    # The upper 24 bits, shifted by a half into the open interval (0, 1).
    uniform = ((z >> np.uint64(40)).astype(np.float64) + 0.5) * 2.0**-24
    return (-np.log(-np.log(uniform))).astype(np.float32)
