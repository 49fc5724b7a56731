"""Data parallelism: which ranks a server runs, who spreads requests over them, and where servers of a group meet."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rayllm.config.registry import Values
from rayllm.errors import ConfigError

Balancing = Literal["internal", "hybrid", "external"]
DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29550


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The engines of this server among those of its group. A rank is an engine replica."""

    size: int = 1
    """Ranks of the whole group."""
    first: int = 0
    """The lowest rank of this server."""
    engines: int = 1
    """How many it runs, from that one on."""
    balancing: Balancing = "internal"
    """Who spreads requests over ranks: this server over all (`internal`), this server over its own and something else
    over servers (`hybrid`), or something else over all, each of which is a server (`external`)."""
    one_node: bool = True
    """Whether all ranks of this server stay on its node. If not, the cluster decides."""
    per_node: int | None = None
    """Most ranks on one node, where the cluster decides."""
    meeting: tuple[str, int] | None = None
    """Host and port where the servers of the group meet before they start; None: each goes by itself."""
    elastic: bool = False
    """Whether the number of engines may be changed while they serve."""

    @property
    def ranks(self) -> range:
        """Those of this server."""
        return range(self.first, self.first + self.engines)

    @property
    def alone(self) -> bool:
        """Whether no other server has ranks of the group."""
        return self.engines == self.size

    @property
    def engines_on_host(self) -> int:
        """How many share a machine, at most."""
        return self.engines if self.per_node is None else min(self.engines, self.per_node)


def resolve_data_parallel(values: Values) -> DataParallel:
    """What the options --data-parallel-* and --enable-elastic-ep say together.

    Raises:
        ConfigError: they contradict one another.
    """
    size, local = values["data-parallel-size"], values["data-parallel-size-local"]
    if local is not None and not 1 <= local <= size:
        reason = "a server needs an engine" if local == 0 else f"{local} is more than --data-parallel-size, {size}"
        raise ConfigError("--data-parallel-size-local", reason, f"give 1 to {size}, or leave it out")
    balancing = _balancing(values)
    if values["enable-elastic-ep"] and balancing != "internal":
        raise ConfigError(
            "--enable-elastic-ep",
            f"with --data-parallel-{balancing}-lb other servers have ranks, which this one cannot add or end",
            "drop one of them",
        )
    match balancing:
        case "external":
            return _external(values)
        case "hybrid":
            return _hybrid(values)
        case "internal":
            return _internal(values)


def data_parallel_notes(values: Values) -> Iterator[str]:
    """What the user should know about options that the others leave nothing to do."""
    settings = resolve_data_parallel(values)
    meets = [name for name in ("data-parallel-address", "data-parallel-rpc-port") if values[name] is not None]
    if settings.meeting is None:
        for name in meets:
            yield f"--{name} has no effect: no other server has ranks of the group"
    if values["data-parallel-hybrid-lb"] and settings.alone:
        yield "--data-parallel-hybrid-lb has no effect: all ranks are this server's own"
    if "data-parallel-backend" in values.given and settings.engines == 1:
        yield f"--data-parallel-backend {values['data-parallel-backend']} has no effect: this server runs one engine"


def _balancing(values: Values) -> Balancing:
    """Who spreads requests, said by an option of its own or implied by a rank."""
    rank, start = values["data-parallel-rank"], values["data-parallel-start-rank"]
    external, hybrid = values["data-parallel-external-lb"], values["data-parallel-hybrid-lb"]
    if rank is not None:
        if not external and "data-parallel-external-lb" in values.given:
            raise ConfigError(
                "--no-data-parallel-external-lb", "contradicts --data-parallel-rank, which implies it", "drop one"
            )
        external = True
    if external and hybrid:
        given = "--data-parallel-external-lb" if rank is None else "--data-parallel-rank"
        raise ConfigError(
            "--data-parallel-hybrid-lb",
            f"contradicts {given}, which leaves this server one engine and nothing to spread",
            "drop one of them",
        )
    if external:
        return "external"
    if start and not hybrid:
        if "data-parallel-hybrid-lb" in values.given:
            raise ConfigError(
                "--data-parallel-start-rank",
                "is for a server among others, and --no-data-parallel-hybrid-lb makes this one the only one",
                "drop one of them",
            )
        return "hybrid"
    return "hybrid" if hybrid else "internal"


def _external(values: Values) -> DataParallel:
    size, rank = values["data-parallel-size"], values["data-parallel-rank"]
    if rank is None:
        raise ConfigError(
            "--data-parallel-external-lb",
            "each rank is a server of its own, and this one does not know which it is",
            "give --data-parallel-rank",
        )
    if rank >= size:
        raise ConfigError(
            "--data-parallel-rank",
            f"{rank} is not below --data-parallel-size, {size}",
            f"ranks are 0 to {size - 1}; give --data-parallel-size the number of all ranks",
        )
    for name, fits in (("data-parallel-start-rank", (None, rank)), ("data-parallel-size-local", (None, 1))):
        if values[name] not in fits:
            raise ConfigError(
                f"--{name}", f"{values[name]} contradicts --data-parallel-rank {rank}: one engine runs here", "drop it"
            )
    return DataParallel(
        size=size, first=rank, engines=1, balancing="external", meeting=_meeting(values) if size > 1 else None
    )


def _hybrid(values: Values) -> DataParallel:
    size, local, start = (values[f"data-parallel-{name}"] for name in ("size", "size-local", "start-rank"))
    start = start or 0
    given = "--data-parallel-hybrid-lb" if values["data-parallel-hybrid-lb"] else "--data-parallel-start-rank"
    if local is None:
        raise ConfigError(
            given, "this server does not know how many of the ranks are its own", "give --data-parallel-size-local"
        )
    if start + local > size:
        raise ConfigError(
            "--data-parallel-start-rank",
            f"ranks {start} to {start + local - 1} do not exist among --data-parallel-size, {size}",
            f"give {size - local} at most",
        )
    if values["data-parallel-backend"] == "ray":
        raise ConfigError(
            "--data-parallel-backend", "ray would place this server's engines on other servers' nodes", "give mp"
        )
    if local == size:
        return DataParallel(size=size, engines=size)
    return DataParallel(size=size, first=start, engines=local, balancing="hybrid", meeting=_meeting(values))


def _internal(values: Values) -> DataParallel:
    size, local = values["data-parallel-size"], values["data-parallel-size-local"]
    elastic = values["enable-elastic-ep"]
    if values["data-parallel-backend"] == "ray":
        return DataParallel(size=size, engines=size, one_node=False, per_node=local, elastic=elastic)
    if local is not None and local < size:
        raise ConfigError(
            "--data-parallel-size-local",
            f"with --data-parallel-backend mp all {size} engines run on this node",
            "give --data-parallel-backend ray, which places the others in the cluster, or, for a server on each node, "
            "--data-parallel-hybrid-lb",
        )
    return DataParallel(size=size, engines=size, elastic=elastic)


def _meeting(values: Values) -> tuple[str, int] | None:
    host, port = values["data-parallel-address"], values["data-parallel-rpc-port"]
    if host is None and port is None:
        return None
    return host or DEFAULT_ADDRESS, port or DEFAULT_PORT
