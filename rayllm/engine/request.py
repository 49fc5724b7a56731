"""One request (one choice) inside the engine: its tokens, its blocks, and where it stands."""

from enum import Enum, auto

from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput, TokenLogprobs
from rayllm.messages.worker import EmbeddedRows


class State(Enum):
    """Where a request stands."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    """Waits again, its blocks given up."""
    FINISHED = auto()


NEXT = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set(),
}
"""The moves there are."""


class Request:
    """A request's state. `tokens[:num_prompt]` is the prompt, the rest the output; both known to be right.

    Beside these, `in_flight` tokens are being sampled by steps that were sent but have not come back.
    """

    __slots__ = (
        "add", "blocks", "cached_tokens", "client", "computed", "embeds", "first_token_time", "grammar", "hashes",
        "in_flight", "last_token_time", "limit", "num_prompt", "passed", "prompt_logprobs", "published", "queued_time",
        "root", "row", "running_time", "sort_key", "spent_before", "state", "stop_ids", "tokens", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        client: int,
        add: Add,
        *,
        limit: int,
        stop_ids: frozenset[int],
        root: bytes,
        now: float,
        embeds: tuple[EmbeddedRows, ...] = (),
    ) -> None:
        """`limit` is the most tokens, prompt included, that it may reach; `stop_ids` end it.

        `embeds` stand in place of tokens of the prompt.
        """
        self.client = client
        self.add = add
        self.tokens = [*add.prompt_token_ids, *add.output_token_ids]
        self.num_prompt = len(add.prompt_token_ids)
        self.limit = limit
        self.stop_ids = stop_ids
        self.root = root
        self.embeds = embeds
        self.state = State.WAITING
        self.row = -1
        self.computed = 0
        """Leading tokens whose KV entries exist, or will after the steps that were sent."""
        self.in_flight = 0
        self.blocks: list[int] = []
        """One for each group of layers in turn, for each stretch of `block_size` tokens."""
        self.hashes: list[bytes] = []
        self.published = 0
        """Leading stretches whose hashes the pool knows."""
        self.passed = 0
        """Leading stretches that lie before the window of layers that have one: these hold no blocks for them."""
        self.cached_tokens: int | None = None
        """Tokens that the first admission found in the prefix cache."""
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if add.sampling.prompt_logprobs is not None else None
        """Collected while the prompt is computed; None when not asked for, or when sent."""
        self.sort_key: tuple[float, ...] = ()
        self.grammar: object = None
        """Holds what the output must follow, where it must, among those that the executor knows."""
        self.queued_time = now
        self.running_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.spent_before: tuple[float, float] | None = None
        """Seconds that the engine's steps had taken before its first one: in the model, and in all."""
        self.unsent: RequestOutput | None = None
        """What `StreamInterval` holds back."""

    @property
    def key(self) -> tuple[int, int]:
        """Its name in this engine."""
        return self.client, self.add.request_id

    @property
    def num_output(self) -> int:
        """Output tokens known."""
        return len(self.tokens) - self.num_prompt

    @property
    def unplanned(self) -> int:
        """Tokens that could be computed next: the gap between tokens wanted and tokens computed."""
        wanted = len(self.tokens) + self.in_flight
        if wanted >= self.limit and self.computed >= len(self.tokens):
            return 0  # the tokens in flight are its last: nothing needs their KV entries
        return wanted - self.computed

    def move_to(self, state: State) -> None:
        """Change the state, along `NEXT` only."""
        assert state in NEXT[self.state], (self.state, state)
        self.state = state

    def __lt__(self, other: "Request") -> bool:
        return self.sort_key < other.sort_key
