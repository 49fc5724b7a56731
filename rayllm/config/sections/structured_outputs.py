"""Options of reasoning, as far as structured outputs heed it."""

from rayllm.config.option import Kind, Option, State

STRUCTURED_OUTPUTS = (
    Option(
        name="reasoning-parser",
        kind=Kind.STR,
        state=State.PLANNED,
        default="",
        help="Parser that parts reasoning from the answer.",
    ),
    Option(
        name="reasoning-parser-plugin",
        kind=Kind.STR,
        state=State.PLANNED,
        default="",
        help="Python file that registers more reasoning parsers.",
    ),
)
