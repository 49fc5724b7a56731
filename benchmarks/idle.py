"""What a server costs while nobody asks for anything: CPU time of its processes, beside empty deployments on Ray.

    python -m benchmarks.idle MODEL --seconds 60

`rayllm serve MODEL` is started and left alone, then Ray Serve with two deployments that do nothing in the place of the
engine and the renderer. The main threads of the replicas run Serve's own loop: what ours take more is our own. Every
other thread is Ray's. The last line is one JSON object.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SETTLE_S = 40.0
EMPTY = """
import time, ray
from ray import serve
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
def empty(name):
    return serve.deployment(name=name, ray_actor_options={"num_cpus": 0}, health_check_period_s=2.0)(type(name, (), {}))
serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
for name in ("engine", "renderer"):
    serve.run(empty(name).bind(), name=name, route_prefix=None)
print("ready", flush=True)
time.sleep(3600)
"""


def main_thread_s(pid: int) -> float:
    """CPU seconds of a process's first thread so far."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(root: int) -> dict[int, str]:
    """Process ids below `root`, it included, and what they are called."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: names.get(pid, "") for pid in found}


def percent(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Per cent of a core that each main thread takes."""
    before = {name: main_thread_s(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    return {name: (main_thread_s(pid) - before[name]) / seconds * 100 for name, pid in pids.items()}


def replicas(root: int) -> dict[str, int]:
    """The replicas below a process, by the deployment's name."""
    found = {}
    for pid, name in family(root).items():
        for part in ("engine", "renderer"):
            if "ServeReplica" in name and name.strip().endswith(part):
                found[part] = pid
    return found


def wait_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Until `/health` answers.

    Raises:
        RuntimeError: the server ended.
    """
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("the server ended before it was healthy")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process as a user would, and wait."""
    process.send_signal(signal.SIGINT)
    process.wait(60)


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "rayllm", "serve", args.model, "--host", "127.0.0.1", "--port", str(args.port)]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        wait_healthy(f"http://127.0.0.1:{args.port}/health", server)
        time.sleep(SETTLE_S)
        ours = percent({"rayllm": server.pid, **replicas(server.pid)}, args.seconds)
    finally:
        stop(server)
    empty = subprocess.Popen([sys.executable, "-c", EMPTY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert empty.stdout is not None
        if b"ready" not in empty.stdout.readline():
            raise RuntimeError("Ray Serve did not start")
        time.sleep(SETTLE_S)
        bare = percent(replicas(empty.pid), args.seconds)
    finally:
        stop(empty)
    own = sum(share - bare.get(name, 0.0) for name, share in ours.items())
    print(json.dumps({"main_threads": ours, "empty_deployments": bare, "own_percent_of_a_core": own}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
