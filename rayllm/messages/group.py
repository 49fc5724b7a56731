"""What servers and engines of a data-parallel group and their coordinator tell each other. A frame is a list of these.

A server joins with its ranks, and waits until the group is complete. An engine whose steps are collectives enters with
its rank, and steps in waves (`rayllm.parallel.waves`).
"""

import msgspec


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """First message of a server: which ranks it runs, and what all servers must have alike."""

    size: int
    ranks: list[int]
    model: str
    """The name that requests call it by."""


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """First message of an engine: its rank, of which it has taken no step yet."""

    rank: int


class Want(msgspec.Struct, frozen=True, tag="want"):
    """This rank has taken `step` steps and has work for another."""

    step: int


ToCoordinator = Join | Enter | Want


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """To a server: all ranks have joined."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The first message does not fit the group; the connection ends."""

    option: str
    """The server's option at fault."""
    reason: str


class Run(msgspec.Struct, frozen=True, tag="run"):
    """To an engine: take all steps through this number, with work or without."""

    through: int
    wave: int
    """Counts the waves, for logs."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """To an engine: the group has lost a member, and goes on only with fresh ones."""

    reason: str


FromCoordinator = Complete | Refused | Run | Broken
