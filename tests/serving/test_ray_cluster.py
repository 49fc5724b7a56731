"""What is said when a start fails on Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayllm.errors import ConfigError
from rayllm.serving.ray_cluster import Cluster, _check_reachable, _start_error

TRACEBACK = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:rayllm:engine.initialize() (pid=1, ip=127.0.0.1)
  File "x.py", line 1, in __init__
    raise rayllm.errors.ModelError(...)
rayllm.errors.ModelError: /m/model.safetensors: tensor a.b: truncated
"""


def test_the_error_of_the_replica_is_what_the_user_reads():
    assert str(_start_error(TRACEBACK)) == "/m/model.safetensors: tensor a.b: truncated"


def test_an_unknown_failure_is_shown_whole():
    error = str(_start_error("A replica died.\nSegmentation fault\n"))
    assert error.startswith("the engine did not start: Segmentation fault")
    assert "A replica died." in error


def test_a_cluster_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS.*127\.0\.0\.1:1"):
        _check_reachable("127.0.0.1:1")
    _check_reachable("auto")


def test_a_private_ray_keeps_to_this_machine_and_leaves_no_files(tmp_path):
    variables = {}
    cluster = Cluster(None, variables)
    assert variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert variables["RAY_AUTH_MODE"] == "token"
    folder = variables["TMPDIR"]
    cluster.remove_files()
    cluster.remove_files()
    assert not Path(folder).exists()


def test_a_joined_cluster_gets_nothing_of_that():
    variables = {}
    Cluster("127.0.0.1:6379", variables)
    assert "TMPDIR" not in variables


def test_what_a_killed_server_left_is_removed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned, ours = Path(f"/tmp/rllm-{ended.pid}-x"), Path(f"/tmp/rllm-{os.getpid()}-x")
    for folder in (abandoned, ours):
        folder.mkdir()
    Cluster(None, {}).remove_files()
    assert not abandoned.exists()
    assert ours.exists()
    ours.rmdir()
