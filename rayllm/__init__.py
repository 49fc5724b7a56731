"""rayllm: serves large language models on a Ray cluster.

`LLM` runs one model in this process, without Ray or HTTP; `rayllm serve` runs the whole service.
Importing the package loads neither torch nor Ray.
"""

from typing import TYPE_CHECKING, Any

from rayllm.messages.sampling import SamplingParams
from rayllm.messages.structured import StructuredOutputs

if TYPE_CHECKING:
    from rayllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM imports torch, which a process that only speaks HTTP must never do.
    if name == "LLM":
        from rayllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'rayllm' has no attribute {name!r}")
