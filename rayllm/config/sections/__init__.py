"""The declarations, one file for each section of `--help`."""

from collections.abc import Mapping

from rayllm.config.option import Option
from rayllm.config.sections.attention import ATTENTION
from rayllm.config.sections.cache import CACHE
from rayllm.config.sections.compilation import COMPILATION
from rayllm.config.sections.frontend import FRONTEND
from rayllm.config.sections.general import GENERAL
from rayllm.config.sections.kernel import KERNEL
from rayllm.config.sections.load import LOAD
from rayllm.config.sections.lora import LORA
from rayllm.config.sections.mamba import MAMBA
from rayllm.config.sections.model import MODEL
from rayllm.config.sections.multimodal import MULTIMODAL
from rayllm.config.sections.observability import OBSERVABILITY
from rayllm.config.sections.offload import OFFLOAD
from rayllm.config.sections.parallel import PARALLEL
from rayllm.config.sections.scheduler import SCHEDULER
from rayllm.config.sections.structured_outputs import STRUCTURED_OUTPUTS
from rayllm.config.sections.system import SYSTEM

SECTIONS: Mapping[str, tuple[Option, ...]] = {
    "general": GENERAL,
    "frontend": FRONTEND,
    "model": MODEL,
    "load": LOAD,
    "attention": ATTENTION,
    "mamba": MAMBA,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "parallel": PARALLEL,
    "cache": CACHE,
    "offload": OFFLOAD,
    "multimodal": MULTIMODAL,
    "lora": LORA,
    "observability": OBSERVABILITY,
    "scheduler": SCHEDULER,
    "compilation": COMPILATION,
    "kernel": KERNEL,
    "system": SYSTEM,
}
