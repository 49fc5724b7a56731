"""Logits processors of the user's own: classes loaded at start, applied to the requests that name them."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ConfigError
from rayllm.plugins import load_attribute


class LogitsProcessor(Protocol):
    """What a class given to --logits-processors must offer. It is constructed once, with the model's facts.

    A request uses it by giving arguments under its `name` (`vllm_xargs` over HTTP, `extra_args` in Python). One with an
    attribute `every` that is true is used by all requests; its argument is None where they give none.
    """

    name: str

    def __call__(self, logits_V: torch.Tensor, prompt: list[int], output: list[int], argument: Any) -> torch.Tensor:
        """The logits to sample from, float32, given the request's tokens so far. May change `logits_V` in place."""
        ...


def load_processors(names: tuple[str, ...], model: ModelFacts) -> Mapping[str, LogitsProcessor]:
    """Load classes given as `module:Class`; by the name that requests use.

    Raises:
        ConfigError: one cannot be imported, or does not look like a logits processor.
    """
    loaded: dict[str, LogitsProcessor] = {}
    for path in names:
        make = load_attribute("--logits-processors", path)
        try:
            processor = make(model)
        except Exception as error:
            raise ConfigError("--logits-processors", f"{path} cannot be made: {error}") from error
        if not isinstance(getattr(processor, "name", None), str) or not callable(processor):
            raise ConfigError("--logits-processors", f"{path} has no name or cannot be called")
        loaded[processor.name] = processor
    return loaded


def used_by_all(processors: Mapping[str, LogitsProcessor]) -> dict[str, None]:
    """The names of those that every request uses, each with the argument of requests that give none."""
    return {name: None for name, processor in processors.items() if getattr(processor, "every", False)}
