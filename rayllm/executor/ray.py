"""Ranks as actors in a placement group that the engine owns."""

import logging
import sys
import time
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayllm.config.engine import EngineConfig
from rayllm.config.parallel import ParallelSettings
from rayllm.errors import ConfigError
from rayllm.executor.link import LinkAddress
from rayllm.executor.ranked import WorkerDied

log = logging.getLogger(__name__)

PLACE_S = 60.0
"""How long a group may wait for room, where --distributed-timeout-seconds does not say."""
GPUS = "GPU"
CPUS = "CPU"


class RankActor:
    """The process of one rank. A rank that ends takes the actor's process with it."""

    def address(self) -> str:
        """This machine's address."""
        return _node_address()

    def run(self, config: EngineConfig, rank: int, beside: int, host: str, address: LinkAddress) -> None:
        """Serve as a rank, until the executor ends it."""
        from rayllm.executor.rank import Seat, run_rank  # loads torch, in the actor alone
        from rayllm.logs import configure_logging

        configure_logging(config.parallel.logs)
        run_rank(config, Seat(rank=rank, beside=beside, host=host), address)


class RayLauncher:
    """Starts one actor a rank, the ranks of a pipeline stage on one node where that is possible."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._group: PlacementGroup | None = None
        self._runs: list[Any] = []
        self._actors: list[Any] = []
        self.bind: tuple[str, int] | None = (_node_address(), 0)
        self.secret: str | None = None

    def start(self, address: LinkAddress) -> None:
        """See `Launcher`."""
        settings = self._config.parallel
        bundle = bundle_of(settings, ray.cluster_resources(), self._config.engines_on_host)
        self._group = group = _place(settings, bundle)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        order = order_by_node([nodes[i] for i in range(settings.size)], settings.tensor)
        beside = Counter(nodes.values())
        options = {
            "num_cpus": bundle.get(CPUS, 0),
            "num_gpus": bundle.get(GPUS, 0),
            "max_restarts": 0,
            "max_concurrency": 2,
        }
        actor = ray.remote(RankActor)
        for rank, index in enumerate(order):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            environment = _environment(settings, rank)
            self._actors.append(
                actor.options(scheduling_strategy=strategy, runtime_env=environment, **options).remote()
            )
        hosts = self._hosts()
        for rank, (one, host) in enumerate(zip(self._actors, hosts, strict=True)):
            log.info("worker %d: an actor on %s", rank, host)
            self._runs.append(one.run.remote(self._config, rank, beside[nodes[order[rank]]], host, address))

    def check(self) -> None:
        """See `Launcher`."""
        ended, _ = ray.wait(self._runs, timeout=0) if self._runs else ([], [])
        for run in ended:
            rank = self._runs.index(run)
            try:
                ray.get(run)
            except ray.exceptions.RayError as error:
                raise WorkerDied(f"worker {rank}: {str(error).strip().splitlines()[-1]}") from None
            raise WorkerDied(f"worker {rank} ended; its log says why")

    def missing(self) -> str:
        """See `Launcher`."""
        return "raise it, and see that the nodes reach one another"

    def stop(self) -> None:
        """See `Launcher`."""
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=5.0)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], [], None

    def _hosts(self) -> list[str]:
        limit = self._config.parallel.timeout_s or PLACE_S
        try:
            hosts: list[str] = ray.get([actor.address.remote() for actor in self._actors], timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise WorkerDied(f"the actors of the workers did not start within {limit:g} s") from None
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"the actors of the workers did not start: {error}") from None
        return hosts


def bundle_of(settings: ParallelSettings, cluster: dict[str, float], engines: int) -> dict[str, float]:
    """What one worker asks of its node: a GPU where the cluster has any, else a CPU, and resources that are set.

    Where the cluster has fewer CPUs than workers of all `engines`, a worker asks for its share of them: CPU workers
    are for trying things out, and should come up on the smallest machine.
    """
    own = dict(settings.resources)
    if GPUS in own or CPUS in own:
        return own
    if cluster.get(GPUS, 0) > 0:
        return {GPUS: 1.0, **own}
    workers = settings.size * engines
    share = min(1.0, cluster.get(CPUS, 0.0) / workers)
    return {CPUS: max(0.01, int(share * 100) / 100), **own}


def order_by_node(nodes: list[str], tensor: int) -> list[int]:
    """Bundles by rank, so that as many stages as possible have their `tensor` ranks on one node."""
    left: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        left.setdefault(node, []).append(index)
    order: list[int] = []
    while len(order) < len(nodes):
        # The fullest first: what is left over of each is joined at the end.
        node = max(left, key=lambda name: (len(left[name]) >= tensor, len(left[name])))
        taken, left[node] = left[node][:tensor], left[node][tensor:]
        while len(taken) < tensor:
            other = max(left, key=lambda name: len(left[name]))
            more = tensor - len(taken)
            taken, left[other] = taken + left[other][:more], left[other][more:]
        order += taken
    return order


def _place(settings: ParallelSettings, bundle: dict[str, float]) -> PlacementGroup:
    """A group of bundles, once it has its place.

    Raises:
        ConfigError: the cluster has no room for it.
    """
    labels = [dict(settings.labels)] * settings.size if settings.labels else None
    group = placement_group([bundle] * settings.size, strategy="PACK", bundle_label_selector=labels)
    limit = settings.timeout_s or PLACE_S
    told = False
    end = time.monotonic() + limit
    while not group.wait(2.0):
        if not told:
            log.info("waiting for %d workers of %s each; free: %s", settings.size, bundle, _free())
            told = True
        if time.monotonic() > end:
            remove_placement_group(group)
            where = f" on nodes with {dict(settings.labels)}" if settings.labels else ""
            raise ConfigError(
                "--tensor-parallel-size",
                f"the cluster has no room for {settings.size} workers of {bundle} each{where}: free are {_free()} of "
                f"{_known(ray.cluster_resources())} ({limit:g} s)",
                "add nodes, lower the parallel sizes, or end what runs there",
            )
    return group


def _free() -> dict[str, float]:
    return _known(ray.available_resources())


def _known(resources: dict[str, float]) -> dict[str, float]:
    hidden = ("node:", "memory", "object_store_memory")
    return {name: round(value, 2) for name, value in resources.items() if not name.startswith(hidden)}


def _environment(settings: ParallelSettings, rank: int) -> dict[str, Any]:
    environment: dict[str, Any] = {}
    if settings.numactl:
        environment["py_executable"] = " ".join(["numactl", *settings.numactl[rank], sys.executable])
    if settings.nsight:
        environment["nsight"] = "default"
    return environment


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
