"""Where the ranks of an engine meet, and the process groups that they form there."""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from rayllm.config.parallel import ParallelSettings
from rayllm.errors import ConfigError
from rayllm.parallel.group import TorchGroup
from rayllm.parallel.pipeline import Pipeline
from rayllm.parallel.ranks import Ranks

SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands, and how it reaches the stages beside its own."""

    ranks: Ranks = field(default_factory=Ranks)
    pipeline: Pipeline | None = None


class Meeting:
    """Rank 0's place: a port at one address of its machine, which `join` makes a store of."""

    def __init__(self, host: str) -> None:
        """Listen at `host`.

        Raises:
            OSError: it is no address of this machine.
        """
        self._socket = socket.create_server((host, 0))
        self.host, self.port = self._socket.getsockname()[:2]

    def open(self, size: int, timeout: timedelta) -> dist.TCPStore:
        """The store, for as many ranks."""
        return dist.TCPStore(
            self.host, self.port, size, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )  # fmt: skip


def join(settings: ParallelSettings, rank: int, host: str, port: int, meeting: Meeting | None) -> Place:
    """Form the groups of an engine with its other ranks, at rank 0's `meeting`.

    Raises:
        ConfigError: some ranks did not come in time.
    """
    timeout = dist.default_pg_timeout if settings.timeout_s is None else timedelta(seconds=settings.timeout_s)
    if name := _interface_toward(host, port):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        if meeting is not None:
            store = meeting.open(settings.size, timeout)
        else:
            store = dist.TCPStore(host, port, settings.size, is_master=False, timeout=timeout, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.size, timeout=timeout)
        return _place(settings)
    except dist.DistError as error:
        raise ConfigError(
            "--distributed-timeout-seconds", f"the workers did not meet at {host}:{port}: {error}", "look at their logs"
        ) from None


def join_launched(settings: ParallelSettings) -> Place:
    """Form the groups of processes that a launcher such as torchrun told of one another by their environment."""
    timeout = dist.default_pg_timeout if settings.timeout_s is None else timedelta(seconds=settings.timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    return _place(settings)


def leave() -> None:
    """Leave the groups that were joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _place(settings: ParallelSettings) -> Place:
    rank, tensor = dist.get_rank(), settings.tensor
    stage, number = divmod(rank, tensor)
    layers = [dist.new_group(list(range(first, first + tensor))) for first in range(0, settings.size, tensor)]
    ranks = Ranks(tensor=TorchGroup(layers[stage]), stage=stage, stages=settings.stages)
    if settings.stages == 1:
        return Place(ranks)
    lines = [dist.new_group(list(range(first, settings.size, tensor))) for first in range(tensor)]
    return Place(ranks, Pipeline(lines[number], stage))


def _interface_toward(host: str, port: int) -> str | None:
    """The network interface that packets to an address leave by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None
