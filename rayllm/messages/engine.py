"""What an ingress sends to an engine over their session. A frame is a list of these."""

from typing import Any, Literal

import msgspec

from rayllm.messages.sampling import SamplingParams


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message on a connection: proves the right to use it and names the ingress."""

    secret: str
    ingress_id: str


class Embeds(msgspec.Struct, frozen=True, array_like=True):
    """A file of `torch.save` whose tensor's rows stand in place of tokens of a prompt."""

    at: int
    """The first of these tokens."""
    saved: bytes


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add", omit_defaults=True):
    """One choice of one request.

    Prompt and output so far are kept apart, so that penalties, `min_tokens` and usage stay right when a request
    that lost its engine goes on in another. `request_id` is unique within the session.
    """

    request_id: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    sampling: SamplingParams
    """`n` is 1, and `seed` and `max_tokens` are set."""
    choice_index: int = 0
    priority: int = 0
    """Lower is served earlier, under the policy `priority`."""
    arrival_time: float
    """Unix seconds at which the request entered the service."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt."""
    prompt_embeds: tuple[Embeds, ...] = ()
    """What stands in place of some of the prompt's tokens, or of all, in order; these tokens are 0."""
    external_id: str = ""
    """The id that clients and logs know, such as `chatcmpl-...`."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request and free its blocks at once; nothing more is sent for it.

    The reason is what it counts as: `stop` where a stop string ended it, `abort` where its client went away.
    """

    request_id: int
    reason: Literal["abort", "stop"] = "abort"


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat; answered with `Pong` by the I/O thread."""

    number: int


class StatsRequest(msgspec.Struct, frozen=True, tag="stats?"):
    """Asks for the engine's metrics; answered with `Stats`."""

    number: int


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Begins a profile of the workers, or ends it and has its trace written."""

    begin: bool


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    """Forgets what the cache holds; requests that run keep their blocks, or with `preempt` compute them again."""

    preempt: bool = False


PauseMode = Literal["abort", "wait", "keep"]


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Lets no request go on until `Resume`; new ones wait.

    Requests under way are ended (`abort`), finished first (`wait`), or stand still (`keep`). Done when none moves.
    """

    mode: PauseMode = "abort"


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Ends a pause."""


class IsPaused(msgspec.Struct, frozen=True, tag="paused?"):
    """Asks whether there is a pause."""


class AbortNamed(msgspec.Struct, frozen=True, tag="abort-named"):
    """Ends requests, with what they have so far, by the ids that their clients know; answered with their number."""

    names: list[str]


class CallWorkers(msgspec.Struct, frozen=True, tag="call"):
    """Calls a method of every worker; answered with one result a worker."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


Command = Profile | ResetPrefixCache | Pause | Resume | IsPaused | AbortNamed | CallWorkers


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Has the engine carry out a command; answered with `Answer`, once that is done."""

    number: int
    command: Command


ToEngine = Hello | Add | Abort | Ping | StatsRequest | Ask
