"""The keys of sampling noise: the same (seed, choice, position) always gives the same key.

With `rayllm_kernels.sampling.gumbel` a sample then depends on nothing but the request: not on the batch, nor on the
engine that happens to compute it. A request that goes on elsewhere draws what it would have drawn.
"""

import numpy as np
import numpy.typing as npt

from rayllm_kernels.sampling import GAMMA, Keys, mix

MASK = (1 << 64) - 1


def stream_key(seed: int, choice_index: int) -> int:
    """The 64-bit key of one choice of a request."""
    key = mix(np.array([seed & MASK], np.uint64) + GAMMA)
    return int(mix(key + np.array([choice_index], np.uint64) * GAMMA)[0])


def noise_keys(stream_R: Keys, position_R: npt.NDArray[np.int32]) -> Keys:
    """The key of one sampled token for each of R choices. A position counts prompt and output tokens before it."""
    return mix(stream_R + position_R.astype(np.uint64) * GAMMA)
