"""Options of what runs in a step."""

from rayllm.config.option import Kind, Option, State

SCHEDULER = (
    Option(
        name="max-num-batched-tokens",
        kind=Kind.HUMAN_INT,
        minimum=1,
        help="Tokens computed in one step, of prompts and outputs together. Unset: 512 on a CPU, or what "
        "--performance-mode says.",
    ),
    Option(
        name="max-num-seqs",
        kind=Kind.INT,
        minimum=1,
        maximum=2**20,
        help="Requests that run at once. Unset: 256, or what --performance-mode says.",
    ),
    Option(
        name="max-num-partial-prefills",
        kind=Kind.INT,
        default=1,
        minimum=1,
        help="Prompts that may be prefilled in pieces at the same time; they share each step alike.",
    ),
    Option(
        name="max-long-partial-prefills",
        kind=Kind.INT,
        default=1,
        minimum=1,
        help="How many of them may be long; shorter prompts go ahead of a long one that must wait.",
    ),
    Option(
        name="long-prefill-token-threshold",
        kind=Kind.INT,
        default=0,
        unit="tokens",
        minimum=0,
        help="Tokens above which a prompt is long; 0: 4% of --max-model-len.",
    ),
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
        help="Cut prompts into pieces that fit --max-num-batched-tokens. Unset: on. Off, a prompt is computed whole, "
        "and --max-num-batched-tokens is at least --max-model-len.",
    ),
    Option(
        name="disable-chunked-mm-input",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Never cut an image in two.",
    ),
    Option(
        name="scheduler-cls",
        kind=Kind.STR,
        help="Scheduler, as module.Class: a subclass of rayllm.engine.scheduler.Scheduler, which tells how.",
    ),
    Option(
        name="scheduler-reserve-full-isl",
        kind=Kind.BOOL,
        default=True,
        help="Admit a request only when its whole prompt fits into the cache, not just the first piece.",
    ),
    Option(
        name="disable-hybrid-kv-cache-manager",
        kind=Kind.BOOL,
        default=None,
        help="Let layers with a window keep all tokens of a request, as those without do. Unset: they give back the "
        "blocks that have left their window, so that the same memory holds more tokens.",
    ),
    Option(
        name="async-scheduling",
        kind=Kind.BOOL,
        default=None,
        help="Prepare a step while the one before runs. Unset: on.",
    ),
    Option(
        name="stream-interval",
        kind=Kind.INT,
        default=1,
        unit="tokens",
        minimum=1,
        help="Tokens between two pieces of a stream. The first token and the end are sent at once.",
    ),
)
