"""Options of attention."""

from rayllm.config.option import Kind, Option

ATTENTION_BACKENDS = ("auto", "torch")

ATTENTION = (
    Option(
        name="attention-backend",
        kind=Kind.STR,
        check=lambda value: (
            None
            if value in ATTENTION_BACKENDS
            else f"{value!r} is not supported yet, only {', '.join(ATTENTION_BACKENDS)}"
        ),
        help="Implementation of attention. auto or unset: the best for the device.",
    ),
)
