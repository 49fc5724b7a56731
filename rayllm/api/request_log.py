"""The log of requests: a line for each, and, where the settings say so, for its prompts and outputs."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rayllm.config.serve import RequestLogSettings
from rayllm.messages.engine import Add
from rayllm.render.renderer import Renderer

if TYPE_CHECKING:
    from rayllm.api.choice import Piece

log = logging.getLogger(__name__)


class RequestLog:
    """Logs the requests of one process. Texts of clients are written as Python literals, so that none is a line."""

    def __init__(self, settings: RequestLogSettings, renderer: Renderer) -> None:
        self._settings, self._renderer = settings, renderer

    def request(self, id_: str, adds: Sequence[Add], n: int) -> None:
        """Log a request of `n` choices for each prompt: id and parameters, and at DEBUG its prompts."""
        first = adds[0]
        prompts = [add.prompt_token_ids for add in adds[::n]]
        tokens = sum(map(len, prompts))
        sampling = msgspec.structs.replace(first.sampling, n=n)
        log.info("request %s: %d prompt tokens, priority %d, %r", id_, tokens, first.priority, sampling)
        if log.isEnabledFor(logging.DEBUG):
            for ids in prompts:
                # Spelled with its special tokens, as the engine gets it.
                text = self._renderer.tokenizer.decode(ids, skip_special_tokens=False)
                most = self._settings.max_prompt_length
                log.debug("request %s: prompt %r, token ids %r", id_, text[:most], ids[:most])

    def output(self, id_: str, index: int, stream: bool) -> "OutputLog | None":
        """The log of one choice, if outputs are to be logged; `stream` says that its client gets it in pieces."""
        if not self._settings.outputs:
            return None
        return OutputLog(f"{id_} choice {index}", stream and self._settings.deltas, self._renderer.tokens_only)


class OutputLog:
    """Logs the output of one choice: its text, or its token ids where there is no text."""

    def __init__(self, name: str, deltas: bool, as_ids: bool) -> None:
        self._name, self._deltas, self._as_ids = name, deltas, as_ids
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def piece(self, piece: "Piece") -> None:
        """A piece of the output."""
        self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        if self._deltas and (delta := piece.token_ids if self._as_ids else piece.text):
            log.info("request %s: delta %r", self._name, delta)

    def end(self, reason: str | None) -> None:
        """The whole output. `reason` is why it ended, None if it was cut because its client left."""
        output = self._token_ids if self._as_ids else "".join(self._texts)
        log.info("request %s: output (%s) %r", self._name, reason or "cut", output)
