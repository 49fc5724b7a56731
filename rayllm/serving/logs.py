"""Logging of rayllm's own processes: one handler on the package's logger, set up at each process's entry."""

import logging
import sys

FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log the package's records of this level and above to stderr. Idempotent."""
    logger = logging.getLogger("rayllm")
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        logger.addHandler(handler)
