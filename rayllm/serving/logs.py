"""Logging of rayllm's own processes: a handler on each package's logger, set up at each process's entry."""

import logging
import sys

FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log our packages' records of this level and above to stderr. Idempotent."""
    for name in ("rayllm", "rayllm_kernels"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.propagate = False
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
            logger.addHandler(handler)
