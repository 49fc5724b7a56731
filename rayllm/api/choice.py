"""One choice of a request on its way to a client: the engine's outputs in, pieces of text out."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from rayllm.api.parsing import Parsing, PieceParser
from rayllm.api.request_log import OutputLog
from rayllm.api.service import Stream
from rayllm.errors import GenerationFailed
from rayllm.messages.ingress import RequestOutput, TokenLogprobs
from rayllm.messages.sampling import SamplingParams
from rayllm.parsers.events import Event
from rayllm.render.detokenize import Detokenizer
from rayllm.render.stops import StopStrings
from rayllm.render.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """What a choice shows of its prompt, before its own text. Ids and offsets only where logprobs are shown too."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """What one output adds to a choice."""

    text: str = ""
    parts: Sequence[str] = ()
    """What each token adds to the text, where that is parsed; the text may have more before and after."""
    events: list[Event] | None = None
    """What parsers find in the text; None where there are no parsers."""
    token_ids: list[int] = field(default_factory=list)
    """Of the output."""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Of the output, if asked for; behind those of an echoed prompt."""
    logprob_ids: list[int] = field(default_factory=list)
    """The tokens of `logprobs`."""
    offsets: list[int] = field(default_factory=list)
    """For each of `logprobs`, the characters of the choice before its token."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the requested stop token that ended the choice."""

    def extend(self, later: "Piece") -> None:
        """Add what came after."""
        self.text += later.text
        if later.events is not None:
            self.events = [] if self.events is None else self.events
            self.events += later.events
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.logprob_ids += later.logprob_ids
        self.offsets += later.offsets
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class ChoiceText:
    """Turns the outputs of one choice into pieces, applies stop strings, and counts.

    Tokens that only end a text (end tokens, stop tokens, a stop string's) count as output and are in `token_ids` and
    `logprobs`, but their text is not shown, unless `include_stop_str_in_output` asks for it.
    """

    def __init__(
        self,
        abort: Callable[[str], None],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        echo: Echo | None = None,
        parsing: Parsing | None = None,
    ) -> None:
        """`abort` stops the engine's work on it, given the reason."""
        self._abort, self._sampling = abort, sampling
        kept = parsing.kept if parsing is not None else frozenset()
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, kept=kept)
        self._in_parts = parsing is not None
        include = sampling.include_stop_str_in_output
        self._stops = StopStrings(sampling.stop, include) if sampling.stop else None
        self._by_token = self._stops is not None or sampling.logprobs is not None or self._in_parts
        self._echo = echo
        self._characters = len(echo.text) if echo else 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def take(self, output: RequestOutput) -> Piece:
        """The piece that an output adds; the last one has a finish reason.

        Raises:
            GenerationFailed: the engine gave up.
        """
        if output.finish_reason == "error":
            self.finish_reason = "error"
            raise GenerationFailed(output.error or "the server ended this request before it was complete")
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        piece = Piece(prompt_logprobs=output.prompt_logprobs)
        ends = output.finish_reason == "stop" and output.stop_token_id is not None
        hide_last = ends and bool(output.token_ids) and not self._sampling.include_stop_str_in_output
        used = self._add_text(piece, output.token_ids, hide_last)
        self.completion_tokens += used
        piece.token_ids = output.token_ids[:used]
        if output.logprobs is not None:
            piece.logprobs += output.logprobs[:used]
            piece.logprob_ids = piece.token_ids
        matched = self._finish_text(piece, output.finish_reason is not None)
        if matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", matched
            if output.finish_reason is None:
                self._abort("stop")
        elif output.finish_reason is not None:
            piece.finish_reason = output.finish_reason
            if ends and output.stop_token_id in self._sampling.stop_token_ids:
                piece.stop_reason = output.stop_token_id
        self.finish_reason = piece.finish_reason
        if self._echo is not None:
            self._put_echo(piece, self._echo)
            self._echo = None
        return piece

    def _put_echo(self, piece: Piece, echo: Echo) -> None:
        """Put the prompt in front of the first piece."""
        piece.text = echo.text + piece.text
        piece.logprobs = [*(piece.prompt_logprobs or [None] * len(echo.token_ids)), *piece.logprobs]
        piece.logprob_ids = [*echo.token_ids, *piece.logprob_ids]
        piece.offsets = [*echo.offsets, *piece.offsets]

    def _add_text(self, piece: Piece, token_ids: list[int], hide_last: bool) -> int:
        """Add the text of tokens, up to the one that completes a stop string; return how many were used."""
        shown = len(token_ids) - hide_last
        if not self._by_token:
            piece.text = self._detokenizer.feed(token_ids[:shown])
            return len(token_ids)
        parts: list[str] = []
        if self._in_parts:
            piece.parts = parts
        for i, token_id in enumerate(token_ids):
            piece.offsets.append(self._characters)
            if i < shown:
                text = self._detokenizer.feed((token_id,))
                self._characters += len(text)
                text = self._watch(text, self.completion_tokens + i + 1)
                piece.text += text
                parts.append(text)
            if self._stops is not None and self._stops.matched is not None:
                return i + 1
        return len(token_ids)

    def _watch(self, text: str, tokens: int) -> str:
        if self._stops is None:
            return text
        return self._stops.feed(text, search=tokens >= self._sampling.min_tokens)

    def _finish_text(self, piece: Piece, ended: bool) -> str | None:
        """Add what was held back if this is the end; return the stop string that was found."""
        if ended and (self._stops is None or self._stops.matched is None):
            piece.text += self._watch(self._detokenizer.finish(), self.completion_tokens)
            if self._stops is not None and self._stops.matched is None:
                piece.text += self._stops.finish()
        return None if self._stops is None else self._stops.matched


class Choice:
    """One choice of a request: its stream, and the text that becomes of it."""

    def __init__(
        self,
        index: int,
        stream: Stream,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        echo: Echo | None = None,
        log: OutputLog | None = None,
        parsing: Parsing | None = None,
    ) -> None:
        self.index = index
        self._log = log
        self._stream = stream
        self._text = ChoiceText(stream.abort, sampling, tokenizer, echo, parsing)
        self._parser = PieceParser(parsing, echo.text if echo else "") if parsing is not None else None

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far."""
        return self._text.completion_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held."""
        return self._text.cached_tokens

    @property
    def reasoning_tokens(self) -> int | None:
        """Output tokens so far that were reasoning, None if that is not known."""
        return self._parser.reasoning_tokens if self._parser is not None else None

    @property
    def finish_reason(self) -> str | None:
        """Why the engine or a stop string ended it, None while it goes on."""
        return self._text.finish_reason

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces as they come; the last one has a finish reason.

        Raises:
            GenerationFailed: the engine gave up.
            ReplicaLost: the engine is gone.
        """
        async for output in self._stream:
            piece = self._text.take(output)
            if self._log is not None:
                self._log.piece(piece)
            if self._parser is not None:
                self._parser.read(piece)
            yield piece
            if piece.finish_reason is not None:
                return
        raise GenerationFailed("the output ended before the request did")

    def close(self) -> None:
        """Stop the engine if it has not stopped; to be called in every case."""
        if self._text.finish_reason is None:
            self._stream.abort()
        if self._log is not None:
            self._log.end(self._text.finish_reason)
