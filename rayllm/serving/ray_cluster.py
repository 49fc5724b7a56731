"""Ray beneath one `rayllm serve`: a cluster that is there is joined, else a private one is started and ended.

All calls to Ray are made from one thread that lives as long as the process: the kernel ends Ray's processes when the
thread that started them ends, which is what cleans up after a server that was killed.
"""

import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rayllm.errors import ConfigError, RayLLMError

T = TypeVar("T")

OBJECT_STORE_BYTES = 128 * 2**20
"""Next to nothing goes through the object store of a private Ray."""
ERROR_LINE = re.compile(r"^(?:\S+\.)?rayllm\.errors\.\w+: (.*)$", re.MULTILINE)
POLL_S = 0.5
JOIN_S = 5.0
FOLDER = "rllm-"


class DeployFailed(RayLLMError):
    """Serve could not start a deployment; the message is the error that its replica gave."""


class Cluster:
    """Ray and Serve for one server. `submit` runs functions in the thread that may call them."""

    def __init__(self, address: str | None, environment: MutableMapping[str, str]) -> None:
        """`address` is the cluster to join; None starts a private one.

        `environment` is the process's own, which Ray's processes inherit; to be changed before Ray is imported.
        """
        self.private = address is None
        self._address = address
        self._folder: str | None = None
        self._apps: list[str] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rllm-ray")
        self._started = False
        self._serve_was_there = False
        if self.private:
            _remove_abandoned()
            self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=_short_folder())
            environment.update(_private_variables(self._folder))
        environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function in Ray's thread."""
        return self._thread.submit(function)

    def start(self) -> None:
        """Start or join Ray, and start Serve without proxies. To be called in Ray's thread.

        Raises:
            ConfigError: the cluster cannot be joined.
        """
        import ray
        from ray import serve

        self._started = True
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if self.private:
            ray.init(
                address="local",
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=self._folder,
            )
        else:
            _check_reachable(str(self._address))
            try:
                ray.init(address=self._address, logging_level=logging.ERROR, log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError("RAY_ADDRESS", f"cannot join the Ray cluster at {self._address}: {error}") from None
            self._serve_was_there = _serve_runs()
        # A cluster that runs Serve keeps its proxies: this only applies where Serve is not running yet.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})

    @property
    def address(self) -> str:
        """Where other processes of this server join the cluster. To be called in Ray's thread."""
        import ray

        address: str = ray.get_runtime_context().gcs_address
        return address

    @property
    def node(self) -> str:
        """The id of the node that this process runs on. To be called in Ray's thread."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    @property
    def nodes(self) -> int:
        """How many nodes there are. To be called in Ray's thread."""
        import ray

        return sum(node["Alive"] for node in ray.nodes())

    def deploy(self, apps: Sequence[tuple[str, Any]], elastic: bool = False) -> None:
        """Deploy applications by name, without waiting for them. To be called in Ray's thread.

        `elastic`: the numbers of their replicas may be changed later.

        Raises:
            ConfigError: the cluster has an application of such a name.
        """
        from ray import serve

        if not self.private and (taken := {name for name, _ in apps} & serve.status().applications.keys()):
            name = min(taken)
            raise ConfigError("RAY_ADDRESS", f"the cluster runs an application {name!r} already", "end that one first")
        self._apps += [name for name, _ in apps]
        logging_config = {"log_level": "ERROR", "enable_access_log": False}
        targets = [
            serve.RunTarget(
                target=app, name=name, route_prefix=None, logging_config=logging_config, external_scaler_enabled=elastic
            )
            for name, app in apps
        ]
        serve.run_many(targets, wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)

    def watch_start(self, app: str, done: threading.Event) -> None:
        """Wait until `done` is set. To be called in Ray's thread.

        Raises:
            DeployFailed: a deployment of the application cannot start.
        """
        from ray import serve

        while not done.wait(POLL_S):
            status = serve.status().applications.get(app)
            if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                messages = [d.message for d in status.deployments.values() if d.status != "HEALTHY"]
                raise _start_error("\n".join(messages) or status.message)

    def stop(self) -> None:
        """End what was started: the private cluster, or the applications on one that was joined. Takes seconds."""
        if self._started:
            self._thread.submit(self._stop).result()
        self._thread.shutdown(wait=False)

    def _stop(self) -> None:
        import ray
        from ray import serve

        if not self.private and ray.is_initialized():
            for name in reversed(self._apps):
                serve.delete(name)
            if not self._serve_was_there and not serve.status().applications:
                serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()

    def remove_files(self) -> None:
        """Remove what a private Ray wrote. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _short_folder() -> str:
    """Where temporary files go; paths of sockets in it must stay under 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) < 20 else "/tmp"


def _remove_abandoned() -> None:
    """Remove what servers left that were killed and could not clean up."""
    for folder in Path(_short_folder()).glob(f"{FOLDER}*-*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Ray itself keeps trying an address for minutes.

    Raises:
        ConfigError: nothing listens there.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # `auto` and the like
    try:
        socket.create_connection((host, int(port)), timeout=JOIN_S).close()
    except OSError as error:
        raise ConfigError("RAY_ADDRESS", f"no Ray cluster answers at {address}: {error}") from None


def _private_variables(folder: str) -> dict[str, str]:
    """Variables for a Ray that nobody else is to reach, and that leaves nothing behind."""
    return {
        # The documented way to keep Ray on the loopback address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TMPDIR": folder,
        # Ray runs its workers at a low priority by default; the engine is the one that has work to do.
        "RAY_worker_niceness": "0",
    }


def _start_error(message: str) -> RayLLMError:
    """The error behind a deployment's status message, which holds a traceback as text."""
    found = ERROR_LINE.findall(message)
    if not found:
        lines = [line for line in message.strip().splitlines() if line.strip()]
        return DeployFailed(f"the engine did not start: {lines[-1].strip() if lines else 'no reason given'}\n{message}")
    return DeployFailed(found[-1])
