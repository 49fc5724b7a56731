"""Reasoning between marks, before the answer."""

from typing import ClassVar

from rayllm.parsers.parser import ReasoningParser
from rayllm.parsers.reader import Reading, Truncated
from rayllm.parsers.registry import register_reasoning_parser


class ThinkParser(ReasoningParser):
    """Reasoning stands first, up to one of the `ends`. After it, all is content."""

    begins: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    ended_by: ClassVar[tuple[str, ...]] = ()
    """Marks of the content that end it too."""
    unmarked: ClassVar[bool] = False
    """Whether an answer that begins without a mark is reasoning, where the prompt does not show."""
    wrapped: ClassVar[tuple[str, str] | None] = None
    """Marks around the content."""

    @classmethod
    def inside_after(cls, prompt: str, continued: str | None) -> bool | None:
        """By the mark that the prompt ends with, or the last one of the message that goes on."""
        if continued is not None:
            return max(map(continued.rfind, cls.begins)) > max(map(continued.rfind, cls.ends))
        tail = prompt.rstrip()
        if tail.endswith(tuple(map(str.rstrip, cls.begins))):
            return True
        return False if tail.endswith(cls.ends) else None

    def read(self) -> Reading[None]:
        """Read the reasoning and what follows."""
        reader = self.reader
        # Until the first text shows, tokens are counted as what they will most likely be.
        self.thinking = self.unmarked if self._inside is None else self._inside
        try:
            yield from reader.space()
            begin = "" if self._inside is False else (yield from reader.literal(*self.begins, *self._empty))
        except Truncated:
            begin = ""
        if begin:
            self.thinking = begin in self.begins
            reader.mark()
        reader.rewind()
        if self.thinking:
            found = yield from reader.through((*self.ends, *self.ended_by), self.reasoning)
            self.thinking = False
            if found in self.ended_by:
                reader.rewind()
            else:
                reader.mark()
        yield from self._answer()

    @property
    def _empty(self) -> tuple[str, ...]:
        """What an answer without reasoning may begin with: the end alone."""
        return () if self.thinking or self.unmarked else self.ends

    def _answer(self) -> Reading[None]:
        reader, marks = self.reader, self.wrapped
        if marks is not None:
            try:
                yield from reader.space()
                if (yield from reader.literal(marks[0])):
                    yield from reader.literal("\n")
                    reader.mark()
                    yield from reader.through((f"\n{marks[1]}", marks[1]), self.content)
                    reader.mark()
            except Truncated:
                pass
            reader.rewind()
        yield from reader.rest(self.content)


def between_marks(begin: str, end: str) -> type[ThinkParser]:
    """A parser of reasoning between two marks."""
    marks: dict[str, tuple[str, ...]] = {"begins": (begin,), "ends": (end,), "markers": (begin, end)}
    return type("BetweenMarks", (ThinkParser,), marks)


@register_reasoning_parser(
    "qwen3", "glm45", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "holo2", "mimo", "poolside_v1"
)
class Think(ThinkParser):
    """`<think>` ... `</think>`, which the model writes where the prompt has not done so."""

    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")


@register_reasoning_parser("deepseek_r1", "qwq", "step3", "step3p5", "minimax_m2", "nemotron_v3", "olmo3", "gigachat35")
class ThinkFirst(Think):
    """Reasoning until `</think>`; `<think>` may stand first."""

    unmarked = True


@register_reasoning_parser("kimi_k2")
class KimiK2(ThinkFirst):
    """The same, which a section of tool calls ends too."""

    ended_by = ("<|tool_calls_section_begin|>",)
    markers = (*Think.markers, *ended_by)


@register_reasoning_parser("seed_oss")
class SeedOss(ThinkParser):
    """`<seed:think>` ... `</seed:think>`."""

    begins = ("<seed:think>",)
    ends = ("</seed:think>",)
    markers = ("<seed:think>", "</seed:think>")


@register_reasoning_parser("minimax_m3")
class MiniMaxM3(ThinkParser):
    """`<mm:think>` ... `</mm:think>`."""

    begins = ("<mm:think>",)
    ends = ("</mm:think>",)
    markers = ("<mm:think>", "</mm:think>")


@register_reasoning_parser("solar_open2")
class SolarOpen2(ThinkParser):
    """`<|think:start|>` ... `<|think:end|>`."""

    begins = ("<|think:start|>",)
    ends = ("<|think:end|>",)
    markers = ("<|think:start|>", "<|think:end|>")


@register_reasoning_parser("hy_v3")
class HyV3(ThinkParser):
    """`<think>` ... `</think>`, whose names `:opensource` may follow."""

    begins = ("<think:opensource>", "<think>")
    ends = ("</think:opensource>", "</think>")
    markers = (*begins, *ends)


@register_reasoning_parser("mistral")
class Mistral(ThinkParser):
    """`[THINK]` ... `[/THINK]`."""

    begins = ("[THINK]",)
    ends = ("[/THINK]",)
    markers = ("[THINK]", "[/THINK]")


@register_reasoning_parser("gemma4")
class Gemma4(ThinkParser):
    """`<|channel>thought` ... `<channel|>`."""

    begins = ("<|channel>thought\n",)
    ends = ("<channel|>",)
    markers = ("<|channel>", "<channel|>")


@register_reasoning_parser("granite")
class Granite(ThinkParser):
    """Parted by sentences of Granite 3.2."""

    begins = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")


@register_reasoning_parser("hunyuan_a13b")
class Hunyuan(Think):
    """`<think>` ... `</think>`, then `<answer>` ... `</answer>`."""

    wrapped = ("<answer>", "</answer>")
    markers = (*Think.markers, *wrapped)


@register_reasoning_parser("ernie45")
class Ernie45(ThinkFirst):
    """`<think>` ... `</think>`, then `<response>` ... `</response>`."""

    wrapped = ("<response>", "</response>")
    markers = (*Think.markers, *wrapped)


@register_reasoning_parser("cohere_command3")
class CohereCommand3(ThinkParser):
    """`<|START_THINKING|>` ... `<|END_THINKING|>`, then `<|START_RESPONSE|>` ... `<|END_RESPONSE|>`, or actions."""

    begins = ("<|START_THINKING|>",)
    ends = ("<|END_THINKING|>",)
    wrapped = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    markers = (*begins, *ends, *wrapped)


@register_reasoning_parser("cohere_command4")
class CohereCommand4(CohereCommand3):
    """The same, with the answer between `<|START_TEXT|>` and `<|END_TEXT|>`."""

    wrapped = ("<|START_TEXT|>", "<|END_TEXT|>")
    markers = (*CohereCommand3.begins, *CohereCommand3.ends, *wrapped)


@register_reasoning_parser("apertus")
class Apertus(ThinkParser):
    """`<|inner_prefix|>` ... `<|inner_suffix|>`."""

    begins = ("<|inner_prefix|>",)
    ends = ("<|inner_suffix|>",)
    markers = (*begins, *ends)


@register_reasoning_parser("minimax_m2_append_think")
class MiniMaxM2Content(ReasoningParser):
    """Reasoning stays in the content, behind the `<think>` that stands in the prompt."""

    markers = ("<think>", "</think>")

    def read(self) -> Reading[None]:
        """All is content."""
        yield from self.reader.peek()
        self.content("<think>")
        yield from self.reader.rest(self.content)


@register_reasoning_parser("identity")
class Identity(ReasoningParser):
    """All is content."""

    def read(self) -> Reading[None]:
        """All is content."""
        yield from self.reader.rest(self.content)
