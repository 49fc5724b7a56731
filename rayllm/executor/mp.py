"""Ranks as processes of this machine, and of others that join it by number."""

import hashlib
import logging
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from rayllm.config.engine import EngineConfig
from rayllm.config.parallel import ParallelSettings
from rayllm.errors import ConfigError
from rayllm.executor.link import LinkAddress, LinkError
from rayllm.executor.rank import Seat, run_rank
from rayllm.executor.ranked import START_S, WorkerDied
from rayllm.logs import configure_logging

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
END_S = 5.0
UNREACHED = 3
"""Exit status of a worker that did not find its engine."""


class LocalLauncher:
    """Starts the ranks of this machine."""

    def __init__(self, config: EngineConfig, host: str = LOCAL) -> None:
        """`host` is this machine's address, for ranks elsewhere."""
        self._config, self._host = config, host
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.bind = config.parallel.master if config.parallel.nodes > 1 else None
        self.secret = shared_secret(config.parallel) if config.parallel.nodes > 1 else None

    def start(self, address: LinkAddress) -> None:
        """See `Launcher`."""
        settings = self._config.parallel
        for i, rank in enumerate(settings.local):
            seat = Seat(rank=rank, beside=len(settings.local), host=self._host)
            bound = ["numactl", *settings.numactl[i]] if settings.numactl else []
            process = subprocess.Popen([*bound, sys.executable, "-m", __name__], stdin=subprocess.PIPE)
            self._processes[rank] = process
            log.info("worker %d: process %d%s", rank, process.pid, f", {' '.join(bound)}" if bound else "")
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(pickle.dumps((self._config, seat, address, list(sys.path))))

    def wait(self) -> int:
        """Wait for the end of all; the exit status of the first that failed, or 0."""
        codes = [process.wait() for process in self._processes.values()]
        self._processes = {}
        return next((code for code in codes if code), 0)

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes.values():
            process.kill()

    def check(self) -> None:
        """See `Launcher`."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise WorkerDied(f"worker {rank} ended with code {code}; its log above says why")

    def missing(self) -> str:
        """See `Launcher`."""
        settings = self._config.parallel
        if settings.nodes > 1:
            host, port = settings.master
            return f"start the other nodes with --master-addr {host} --master-port {port}, or raise it"
        return "raise it, or look at the workers' logs above"

    def stop(self) -> None:
        """See `Launcher`."""
        for process in self._processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = {}


def launcher(config: EngineConfig) -> LocalLauncher:
    """That of the node which has the engine.

    Raises:
        ConfigError: it is another node's.
    """
    settings = config.parallel
    if settings.node_rank:
        raise ConfigError("--node-rank", "only node 0 has the engine", "run rayllm serve on this node")
    return LocalLauncher(config, settings.master[0] if settings.nodes > 1 else LOCAL)


def serve_node(config: EngineConfig) -> int:
    """Run this node's workers for the engine on node 0, again and again, for the engine may be replaced.

    Returns when node 0 cannot be reached for as long as workers wait; the exit status.
    """
    settings = config.parallel
    host, port = settings.master
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    address = LinkAddress(secret=shared_secret(settings), host=host, port=port)
    while True:
        log.info("node %d of %d: joining %s:%d", settings.node_rank, settings.nodes, host, port)
        workers = LocalLauncher(config, own_address(host, port))
        try:
            workers.start(address)
            code = workers.wait()
        finally:
            workers.kill()
        if code == UNREACHED:
            log.error("--master-addr: no engine at %s:%d", host, port)
            return 1


def shared_secret(settings: ParallelSettings) -> str:
    """What nodes know of one another without having met."""
    return hashlib.sha256(f"rayllm {settings.secret}".encode()).hexdigest()


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def main() -> None:
    """The process of a rank, which its parent tells through a pipe what to be."""
    config, seat, address, path = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    configure_logging(config.parallel.logs)
    patience = (config.parallel.timeout_s or START_S) if address.path is None else 0.0
    try:
        run_rank(config, seat, address, patience)
    except LinkError as error:
        log.error("worker %d: %s", seat.rank, error)
        sys.exit(UNREACHED)


if __name__ == "__main__":
    main()
