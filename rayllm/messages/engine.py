"""What an ingress sends to an engine over their session. A frame is a list of these."""

from typing import Literal

import msgspec

from rayllm.messages.sampling import SamplingParams


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message on a connection: proves the right to use it and names the ingress."""

    secret: str
    ingress_id: str


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
    """Begins a profile of the workers, or ends it and has its trace written; answered with `Profiled`."""

    number: int
    begin: bool


ToEngine = Hello | Add | Abort | Ping | StatsRequest | Profile
