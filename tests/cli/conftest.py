import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The command sets logging up for its process; later tests must not write to a stream of this one."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in ("rayllm", "rayllm_kernels", "uvicorn"))]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
