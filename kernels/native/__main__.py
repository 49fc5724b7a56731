"""`python -m rayllm_kernels.native`: compile the kernels for this machine now rather than at the first start."""

import logging
import sys

from rayllm_kernels.native.library import library

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if library() is not None else 1)
