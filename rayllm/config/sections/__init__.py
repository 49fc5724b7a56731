"""The declarations, one file for each section of `--help`."""

from collections.abc import Mapping

from rayllm.config.option import Option
from rayllm.config.sections.cache import CACHE
from rayllm.config.sections.frontend import FRONTEND
from rayllm.config.sections.general import GENERAL
from rayllm.config.sections.model import MODEL
from rayllm.config.sections.parallel import PARALLEL
from rayllm.config.sections.scheduler import SCHEDULER

SECTIONS: Mapping[str, tuple[Option, ...]] = {
    "general": GENERAL,
    "model": MODEL,
    "frontend": FRONTEND,
    "parallel": PARALLEL,
    "cache": CACHE,
    "scheduler": SCHEDULER,
}
