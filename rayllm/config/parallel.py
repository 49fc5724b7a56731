"""How an engine's model is divided among workers, and what runs them."""

import re
from dataclasses import dataclass, field

from rayllm.config.hardware import Hardware
from rayllm.config.registry import Values
from rayllm.config.serve import LogSettings
from rayllm.errors import ConfigError

_CPUS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """Of one engine. Its ranks are numbered stage by stage: rank = stage * tensor + rank among those of the stage."""

    tensor: int = 1
    """Ranks that share each layer."""
    stages: int = 1
    """Runs of layers, one after the other."""
    executor: str | None = None
    """`uni`, `mp`, `ray` or `external_launcher`; None: `uni` for one rank, else what suits the process."""
    nodes: int = 1
    """Machines of one engine, where `mp` runs it."""
    node_rank: int = 0
    master: tuple[str, int] = ("127.0.0.1", 29501)
    """Where these machines meet: at the first one."""
    secret: str = field(default="", repr=False)
    """What these machines show one another."""
    timeout_s: float | None = None
    """How long ranks wait for one another; None: as long as torch does."""
    loading: int | None = None
    """Ranks that may load the model at the same time; None: all."""
    numactl: tuple[tuple[str, ...], ...] = ()
    """For each rank of this machine the arguments of numactl; none without."""
    nsight: bool = False
    """Whether Ray runs workers under Nsight."""
    resources: tuple[tuple[str, float], ...] = ()
    """What each worker asks of Ray beside, or in place of, a GPU or CPU."""
    labels: tuple[tuple[str, str], ...] = ()
    """Of the Ray nodes that workers may be placed on."""
    logs: LogSettings = field(default_factory=LogSettings)
    """Of worker processes."""

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.tensor * self.stages

    @property
    def local(self) -> range:
        """Ranks on this machine, where `mp` runs them."""
        each = self.size // self.nodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)


def resolve_parallel(values: Values, hardware: Hardware) -> ParallelSettings:
    """Decide how an engine is divided.

    Raises:
        ConfigError: options contradict one another or the machine.
    """
    tensor, stages = values["tensor-parallel-size"], values["pipeline-parallel-size"]
    executor, nodes, node_rank = values["distributed-executor-backend"], values["nnodes"], values["node-rank"]
    size = tensor * stages
    if executor == "uni" and size > 1:
        raise ConfigError(
            "--distributed-executor-backend", f"uni runs one worker, and the sizes ask for {size}", "choose mp or ray"
        )
    if node_rank >= nodes:
        raise ConfigError("--node-rank", f"{node_rank} is not below --nnodes, {nodes}", "number the nodes from 0")
    if nodes > 1:
        if executor in ("uni", "ray"):
            raise ConfigError("--nnodes", f"{executor} does not start nodes by number", "leave it out, or choose mp")
        if size % nodes:
            raise ConfigError("--nnodes", f"{size} workers cannot be divided among {nodes} nodes", "change one of them")
        if executor is None:
            executor = "mp"
    if executor == "external_launcher" and values["max-parallel-loading-workers"] is not None:
        raise ConfigError(
            "--max-parallel-loading-workers", "processes that a launcher started load by themselves", "leave it out"
        )
    if values["ray-workers-use-nsight"]:
        if executor not in (None, "ray"):
            raise ConfigError("--ray-workers-use-nsight", f"{executor} has no Ray workers", "choose ray, or drop it")
        executor = "ray"
    return ParallelSettings(
        tensor=tensor,
        stages=stages,
        executor=executor,
        nodes=nodes,
        node_rank=node_rank,
        master=(values["master-addr"], values["master-port"]),
        timeout_s=values["distributed-timeout-seconds"],
        loading=values["max-parallel-loading-workers"],
        numactl=_numactl(values, size // nodes, hardware),
        nsight=values["ray-workers-use-nsight"],
    )


def check_served(settings: ParallelSettings) -> None:
    """Refuse what cannot stand behind a server.

    Raises:
        ConfigError: names the option.
    """
    if settings.executor == "external_launcher":
        raise ConfigError(
            "--distributed-executor-backend", "external_launcher is for an LLM in each process of torchrun",
            "choose mp or ray for a server",
        )  # fmt: skip


def parallel_notes(values: Values) -> tuple[str, ...]:
    """Options that have nothing to do."""
    alone = values["tensor-parallel-size"] * values["pipeline-parallel-size"] == 1
    notes = [
        f"--{name} has no effect: one worker waits for no other"
        for name in ("distributed-timeout-seconds", "max-parallel-loading-workers")
        if name in values.given and alone
    ]
    notes += [
        f"--{name} has no effect without --nnodes"
        for name in ("master-addr", "master-port")
        if name in values.given and values["nnodes"] == 1
    ]
    return tuple(notes)


def _numactl(values: Values, workers: int, hardware: Hardware) -> tuple[tuple[str, ...], ...]:
    nodes, cpus = values["numa-bind-nodes"], values["numa-bind-cpus"]
    for name, given in (("--numa-bind-nodes", nodes), ("--numa-bind-cpus", cpus)):
        if given is None:
            continue
        if not values["numa-bind"]:
            raise ConfigError(name, "needs --numa-bind", "add it, or drop this")
        if len(given) != workers:
            raise ConfigError(name, f"has {len(given)} entries for {workers} workers", "give one for each")
    if not values["numa-bind"]:
        return ()
    if values["distributed-executor-backend"] in ("uni", "external_launcher") or workers == 1 == values["nnodes"]:
        raise ConfigError("--numa-bind", "binds worker processes, and there are none", "drop it, or choose mp or ray")
    if not hardware.numactl:
        raise ConfigError("--numa-bind", "the program numactl is not installed", "install it, or drop the option")
    known = hardware.numa_nodes
    chosen = nodes if nodes is not None else [known[i * len(known) // workers] for i in range(workers)]
    for node in chosen:
        if node not in known:
            raise ConfigError("--numa-bind-nodes", f"this machine has no NUMA node {node}", f"these are: {known}")
    for entry in cpus or ():
        if not _CPUS.fullmatch(entry):
            raise ConfigError("--numa-bind-cpus", f"{entry!r} is no list of CPUs", "write 0-3 or 0,2,4-7")
    if cpus is not None:
        where = [f"--physcpubind={entry}" for entry in cpus]
    else:
        where = [f"--cpunodebind={node}" for node in chosen]
    return tuple((cpu, f"--membind={node}") for cpu, node in zip(where, chosen, strict=True))
