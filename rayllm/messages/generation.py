"""What a plain handle call to an engine gets and gives, for other applications on the same cluster."""

from dataclasses import dataclass, field
from typing import Any

from rayllm.messages.ingress import FinishReason

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or a conversation in OpenAI's message format."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one choice. The last piece of a choice has a finish reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for an end token."""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedChoice:
    """One whole choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole answer to one prompt."""

    prompt_tokens: int
    choices: list[GeneratedChoice] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text
