"""Reasoning and tool calls in answers: which parsers read them, and what becomes of their events on the wire."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rayllm.config.serve import FrontendSettings
from rayllm.errors import ConfigError, RequestError
from rayllm.messages.sampling import Thinking
from rayllm.messages.structured import StructuredOutputs
from rayllm.parsers.events import CallArguments, CallStart, Content, Event, Reasoning, joined
from rayllm.parsers.output import OutputParser
from rayllm.parsers.parser import ReasoningParser, ToolParser
from rayllm.parsers.reasoning import between_marks
from rayllm.parsers.registry import load_plugin, reasoning_parsers, tool_parsers
from rayllm.render.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rayllm.api.choice import Piece

Json = dict[str, Any]
T = TypeVar("T")

_BUDGET = "thinking_token_budget"
_TAIL = 32
"""Tokens at the end of a prompt that may show whether it ends within reasoning."""


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers to one request are parsed."""

    new: Callable[[], OutputParser]
    """Makes the parser of one choice."""
    kept: frozenset[int]
    """Special tokens whose texts the parsers have to see."""
    counts_reasoning: bool
    reason_of_calls: str
    """The finish reason of an answer that calls tools and stops."""


class Parsers:
    """The parsers of a service, as its settings name them."""

    def __init__(self, settings: FrontendSettings, tokenizer: Tokenizer) -> None:
        """Load the plugins.

        Raises:
            ConfigError: one cannot be loaded, or a parser is missing.
        """
        self._tokenizer = tokenizer
        if settings.tool_parser_plugin is not None:
            load_plugin("--tool-parser-plugin", settings.tool_parser_plugin)
        if settings.reasoning_parser_plugin is not None:
            load_plugin("--reasoning-parser-plugin", settings.reasoning_parser_plugin)
        self._tools = _find("--tool-call-parser", tool_parsers(), settings.tool_parser)
        self._reasoning = _find("--reasoning-parser", reasoning_parsers(), settings.reasoning_parser)
        begin, end = settings.reasoning_marks
        if self._reasoning is None and end:
            self._reasoning = between_marks(begin, end)
        self._last_thought = end
        """What an end of reasoning that is forced says; empty: its mark alone."""

    @property
    def part_reasoning(self) -> bool:
        """Whether reasoning is parted from answers."""
        return self._reasoning is not None

    def parsing(
        self,
        prompt: Sequence[int],
        continued: str | None,
        tools: Sequence[Json],
        show_reasoning: bool = True,
        parallel_calls: bool = True,
        forced: Callable[[Sequence[Json]], ToolParser] | None = None,
        reason_of_calls: str = "tool_calls",
    ) -> Parsing | None:
        """How answers to a prompt are parsed; None: they are not.

        `continued` is the text of the message that they go on with, `tools` are those that may be called; `forced`
        reads calls that a grammar makes.
        """
        reasoning = self._reasoning
        calls: Callable[[Sequence[Json]], ToolParser] | None = forced or (self._tools if tools else None)
        if reasoning is None and calls is None:
            return None
        inside = None
        if reasoning is not None:
            inside = reasoning.inside_after(self._tail(prompt), continued)

        def new() -> OutputParser:
            return OutputParser(
                None if reasoning is None else reasoning(inside),
                None if calls is None else calls(tools),
                show_reasoning,
                parallel_calls,
            )

        return Parsing(new, self._kept(reasoning, calls), reasoning is not None, reason_of_calls)

    def after_reasoning(
        self, form: StructuredOutputs, prompt: Sequence[int], continued: str | None
    ) -> StructuredOutputs:
        """A form as answers to a prompt have it: after their reasoning.

        Where the prompt does not show whether there is any, an answer shows it by how it begins.
        """
        reasoning = self._reasoning
        if reasoning is None or not (ends := _ends(reasoning)):
            return form
        inside = reasoning.inside_after(self._tail(prompt), continued)
        if inside is False:
            return form
        told = inside or getattr(reasoning, "unmarked", False)
        begins = () if told else tuple(map(self._ids, getattr(reasoning, "begins", ())))
        return msgspec.structs.replace(form, after_ids=tuple(map(self._ids, ends)), begin_ids=begins)

    def thinking(self, budget: int, prompt: Sequence[int], continued: str | None) -> Thinking:
        """How the reasoning in answers to a prompt is ended after `budget` tokens.

        Raises:
            RequestError: the budget is none, or this server does not know how reasoning ends.
        """
        if budget < 0:
            raise RequestError("thinking_token_budget must be a whole number that is not negative", _BUDGET)
        reasoning = self._reasoning
        if reasoning is None or not (ends := _ends(reasoning)):
            raise RequestError(
                "thinking_token_budget needs a server that knows the marks of reasoning; start it with "
                "--reasoning-parser or --reasoning-config", _BUDGET,
            )  # fmt: skip
        inside = reasoning.inside_after(self._tail(prompt), continued)
        mark = self._ids(ends[0])
        before = self._last_thought.removesuffix(ends[0])
        return Thinking(
            budget=budget,
            inside=getattr(reasoning, "unmarked", False) if inside is None else inside,
            begin_ids=tuple(map(self._ids, getattr(reasoning, "begins", ()))),
            mark_ids=tuple(map(self._ids, ends)),
            end_ids=(*self._tokenizer.encode(before, add_special_tokens=False), *mark) if before else mark,
        )

    def _ids(self, mark: str) -> tuple[int, ...]:
        id_ = self._tokenizer.token_to_id(mark)
        return tuple(self._tokenizer.encode(mark, add_special_tokens=False)) if id_ is None else (id_,)

    def _tail(self, prompt: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False, continues=True)

    def _kept(self, *parsers: Any) -> frozenset[int]:
        marks = {mark for parser in parsers if parser is not None for mark in getattr(parser, "markers", ())}
        ids = {id_ for mark in marks if (id_ := self._tokenizer.token_to_id(mark)) is not None}
        return frozenset(ids & self._tokenizer.special.ids)


class PieceParser:
    """Parses the pieces of one choice."""

    def __init__(self, parsing: Parsing, echo: str) -> None:
        """`echo` is the text of the prompt that the choice shows before its own."""
        self._parser, self._echo = parsing.new(), echo
        self._counts, self._reason_of_calls = parsing.counts_reasoning, parsing.reason_of_calls
        self._thoughts = 0

    @property
    def reasoning_tokens(self) -> int | None:
        """Output tokens so far that were reasoning, None if that is not known."""
        return self._thoughts if self._counts else None

    def read(self, piece: "Piece") -> None:
        """Set the events of a piece, and its finish reason if it ends a choice that called tools."""
        parser = self._parser
        own = piece.text.removeprefix(self._echo)
        piece.events = [Content(self._echo)] if self._echo else []
        self._echo = ""
        # Token by token, so that those of the reasoning can be counted, however many an output has.
        for part in piece.parts:
            piece.events += parser.feed(part)
            self._thoughts += parser.thinking
            own = own[len(part) :]
        if own:
            piece.events += parser.feed(own)
        if piece.finish_reason is None:
            return
        piece.events += parser.finish()
        if piece.finish_reason == "stop" and 0 < parser.calls_begun == parser.calls_ended:
            piece.finish_reason = self._reason_of_calls


def delta_of(events: Iterable[Event]) -> Json:
    """What events add to a message, in the layout of streams."""
    delta: Json = {}
    calls: dict[int, Json] = {}
    for event in events:
        match event:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                # The name that clients know from vLLM and SGLang, and the one that vLLM has now.
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case CallStart(index, id_, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id_, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def message_of(events: Iterable[Event]) -> Json:
    """The fields of a whole message."""
    delta = delta_of(joined(events))
    calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", ())]
    reasoning = delta.get("reasoning")
    nothing = None if calls or reasoning else ""
    message = {"content": delta.get("content", nothing), "reasoning": reasoning, "reasoning_content": reasoning}
    return {**message, "tool_calls": calls} if calls else message


def _ends(reasoning: type[ReasoningParser]) -> tuple[str, ...]:
    """The marks that end reasoning; the first is that with which it is ended."""
    ends: tuple[str, ...] = getattr(reasoning, "ends", ())
    return (*ends, *getattr(reasoning, "ended_by", ()))


def _find(option: str, parsers: Mapping[str, T], name: str | None) -> T | None:
    if name is None:
        return None
    if name not in parsers:
        raise ConfigError(option, f"{name!r} is no parser", f"choose one of {', '.join(sorted(parsers))}")
    return parsers[name]
