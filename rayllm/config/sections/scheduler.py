"""Options of what runs in a step."""

from rayllm.config.option import Kind, Option

SCHEDULER = (
    Option(
        name="max-num-batched-tokens",
        kind=Kind.HUMAN_INT,
        minimum=1,
        help="Tokens computed in one step, of prompts and outputs together. Unset: 512 on a CPU.",
    ),
    Option(name="max-num-seqs", kind=Kind.INT, minimum=1, help="Requests that run at once. Unset: 256."),
    Option(
        name="scheduling-policy",
        kind=Kind.ENUM,
        default="fcfs",
        choices=("fcfs", "priority"),
        help="Order of waiting requests: by arrival, or by their priority (lower first), then arrival.",
    ),
    Option(
        name="enable-chunked-prefill",
        kind=Kind.BOOL,
        default=None,
        check=lambda value: (
            None if value is not False else "prompts are always cut to the step's budget; only on is supported"
        ),
        help="Cut prompts into pieces that fit --max-num-batched-tokens. Always on.",
    ),
    Option(
        name="async-scheduling",
        kind=Kind.BOOL,
        default=None,
        help="Prepare a step while the one before runs. Unset: on.",
    ),
)
