"""Profiles of a worker's steps: which steps a trace holds, and how it is written."""

import gzip
import json

import pytest
import torch

from rayllm.config.engine import ProfilerSettings
from rayllm.errors import ConfigError
from rayllm.worker.profile import Profile


def run_steps(profile, count):
    for index in range(count):
        assert profile.step(index, lambda: torch.ones(4) @ torch.ones(4)) == 4


def traces(folder):
    return sorted(folder.glob("*.pt.trace.json*"))


def steps_in(trace):
    """The tokens of the steps that a trace holds."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    names = [event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "user_annotation"]
    return [int(name.split()[2]) for name in names if name.startswith("step of")]


@pytest.mark.option("profiler-config")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_trace_holds_the_steps_between_start_and_stop(tmp_path, zipped):
    profile = Profile(ProfilerSettings(folder=str(tmp_path / "new"), gzip=zipped, stack=False))
    run_steps(profile, 2)
    profile.start()
    run_steps(profile, 3)
    profile.stop()
    run_steps(profile, 1)
    [trace] = traces(tmp_path / "new")
    assert trace.suffix == (".gz" if zipped else ".json")
    assert steps_in(trace) == [0, 1, 2]
    profile.start()
    profile.start()
    run_steps(profile, 1)
    profile.stop()
    profile.stop()
    assert len(traces(tmp_path / "new")) == 2


@pytest.mark.option("profiler-config")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"delay_iterations": 2}, [2, 3, 4, 5, 6, 7]),
        ({"max_iterations": 3}, [0, 1, 2]),
        ({"delay_iterations": 1, "max_iterations": 2}, [1, 2]),
        ({"wait_iterations": 2, "warmup_iterations": 1, "active_iterations": 3}, [3, 4, 5]),
        ({"delay_iterations": 20}, None),
    ],
)
def test_which_steps_are_kept(tmp_path, settings, steps):
    profile = Profile(ProfilerSettings(folder=str(tmp_path), stack=False, **settings))
    profile.start()
    run_steps(profile, 8)
    profile.stop()
    assert [steps_in(trace) for trace in traces(tmp_path)] == ([] if steps is None else [steps])


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="torch_profiler_dir"):
        Profile(ProfilerSettings(folder=str(tmp_path / "file" / "sub")))


def test_a_trace_that_cannot_be_written_ends_no_step(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    profile = Profile(ProfilerSettings(folder=str(tmp_path), stack=False, max_iterations=2))
    monkeypatch.setattr("rayllm.worker.profile.tensorboard_trace_handler", lambda *args, **kwargs: fail)
    profile.start()
    run_steps(profile, 3)
    with pytest.raises(OSError, match="the disk is full"):
        profile.stop()
    profile.stop()
