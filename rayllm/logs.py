"""Logging of rayllm's own processes: a handler on each package's logger, set up at each process's entry."""

import logging
import logging.config
import sys
from collections.abc import Set

from rayllm.config.serve import LogSettings
from rayllm.errors import ConfigError

FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
OURS = ("rayllm", "rayllm_kernels")
ACCESS = "uvicorn.access"


def configure_logging(settings: LogSettings) -> None:
    """Log our packages' records of the level and above to stderr, or as the config says. Idempotent.

    Raises:
        ConfigError: the config cannot be applied.
    """
    for name in OURS:
        logging.getLogger(name).setLevel(settings.level.upper())
    if settings.config is None:
        _log_to_stderr()
        return
    for name in (*OURS, "uvicorn", "uvicorn.error", ACCESS):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    try:
        # A file that names only some loggers is not meant to silence the rest.
        logging.config.dictConfig({"disable_existing_loggers": False, **settings.config})
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError("--log-config-file", f"cannot be applied: {reason}") from None


def _log_to_stderr() -> None:
    for name in OURS:
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
            logger.addHandler(handler)


def hide_paths(paths: Set[str]) -> None:
    """Keep requests to these paths out of this process's access log. Replaces what an earlier call asked for."""
    logger = logging.getLogger(ACCESS)
    for earlier in [one for one in logger.filters if isinstance(one, _Hide)]:
        logger.removeFilter(earlier)
    if paths:
        logger.addFilter(_Hide(paths))


class _Hide(logging.Filter):
    """On records of uvicorn's access log, whose arguments are client, method, path, version and status."""

    def __init__(self, paths: Set[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep a record."""
        assert isinstance(record.args, tuple)
        return str(record.args[2]).partition("?")[0] not in self._paths
