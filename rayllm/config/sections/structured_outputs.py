"""Options of reasoning, as far as structured outputs heed it."""

from rayllm.config.option import Kind, Option

STRUCTURED_OUTPUTS = (
    Option(
        name="reasoning-parser",
        kind=Kind.STR,
        default="",
        help="Parser that parts reasoning from answers in chats, by the model's family, such as deepseek_r1 or qwen3; "
        "an unknown name lists all.",
    ),
    Option(
        name="reasoning-parser-plugin",
        kind=Kind.STR,
        default="",
        help="Python file that registers more reasoning parsers; rayllm/parsers/registry.py shows how.",
    ),
)
