"""Options of the choice of kernels, on the model that is built and the log that names them."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import Resolved
from rayllm.errors import ConfigError
from rayllm.model.compiled import CompiledDecoder
from rayllm.worker.worker import build_model
from rayllm_kernels.native.library import library
from tests.model.runner import all_logits, greedy

Tiny = Callable[[str], Path]
PROMPT = [1, 7, 30, 4, 55, 8, 8, 90, 3, 12, 41]
ONE_GROUP = ("--disable-hybrid-kv-cache-manager",)
"""The runner of these tests knows one table of blocks."""
compiled = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def resolved(path: Path, *arguments: str) -> Resolved:
    flags = [str(path), "--dtype", "float32", "--no-use-tqdm-on-load", *ONE_GROUP, *arguments]
    return load(parse_arguments(flags, registry()))


def started(path: Path, *arguments: str) -> Any:
    return build_model(resolved(path, *arguments).engine, torch.device("cpu"))


@compiled
@pytest.mark.option("ir-op-priority")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_the_implementation_that_is_named_runs(tiny: Tiny, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Of norms alone, where other operations are torch's; else it decides whether the whole is one compiled program."""
    caplog.set_level(logging.INFO)
    by_op = ("--attention-backend", "torch")
    plain = started(tiny(name), *by_op)
    assert "rms_norm: torch, of torch" in caplog.text
    mixed = started(tiny(name), *by_op, "--ir-op-priority.rms_norm+", "native")
    assert "rms_norm: native, of native, torch" in caplog.text
    assert "NativeOps" in repr(mixed.norm.ops.rms_norm) + repr(mixed.norm.ops.add_rms_norm)
    assert mixed.norm.ops.linear == plain.norm.ops.linear
    torch.testing.assert_close(all_logits(mixed, PROMPT, 4), all_logits(plain, PROMPT), rtol=1e-4, atol=1e-4)
    assert isinstance(started(tiny(name), "--ir-op-priority.rms_norm+", "native"), CompiledDecoder)
    caplog.clear()
    assert type(started(tiny(name), "--ir-op-priority", '{"rms_norm": ["torch"]}')) is type(plain)
    assert "rms_norm: torch, of torch, native" in caplog.text


@pytest.mark.option("ir-op-priority", "kernel-config")
def test_the_order_that_results(tiny: Tiny) -> None:
    def order(*arguments: str) -> tuple[str, ...]:
        return resolved(tiny("llama"), *arguments).engine.op_priority["rms_norm"]

    assert order() == ("native", "torch")
    assert order("--ir-op-priority.rms_norm+", "torch") == ("torch", "native")
    assert order("--ir-op-priority.rms_norm+=native,torch") == ("native", "torch")
    assert order("--attention-backend", "torch", "--ir-op-priority.rms_norm+", "native") == ("native", "torch")
    assert order("--kernel-config.ir_op_priority.rms_norm+", "torch") == ("torch", "native")
    assert "many times slower" in resolved(tiny("llama"), "--ir-op-priority.rms_norm+", "torch").notes[-1]
    for name, why in (("vllm_c", "no implementation; these are: native, torch"), ("triton", "needs a CUDA GPU")):
        with pytest.raises(ConfigError, match=rf"--ir-op-priority\.rms_norm: .*{why}"):
            order("--ir-op-priority.rms_norm+", name)
    with pytest.raises(ConfigError, match=r"--ir-op-priority\.rotary: is not a key"):
        order("--ir-op-priority.rotary+", "native")
    with pytest.raises(ConfigError, match=r"--ir-op-priority\.rms_norm: transformers runs"):
        resolved(tiny("gpt_neox"), "--ir-op-priority.rms_norm+", "native")


@pytest.mark.option("moe-backend", "kernel-config")
def test_experts(tiny: Tiny) -> None:
    model = tiny("mixtral")
    answers = [greedy(started(model, *given), PROMPT, 8) for given in ((), ("--moe-backend", "emulation"))]
    assert answers[0] == answers[1]
    backends = registry()["moe-backend"].choices
    for backend in set(backends) - {"auto", "emulation"}:
        with pytest.raises(ConfigError, match=f"--moe-backend: {backend} needs a.* GPU"):
            resolved(model, "--moe-backend", str(backend))
    with pytest.raises(ConfigError, match="--moe-backend: cutlass needs"):
        resolved(model, "--kernel-config.moe_backend", "cutlass")
    same = [resolved(model, flag, "emulation") for flag in ("--moe-backend", "--kernel-config.moe_backend")]
    assert same[0].engine == same[1].engine
    assert "--moe-backend has no effect" in resolved(tiny("llama"), "--moe-backend", "emulation").notes[-1]
    with pytest.raises(ConfigError, match=r"--kernel-config\.moe: is not a key "):
        resolved(model, "--kernel-config.moe", "emulation")
    with pytest.raises(ConfigError, match=r"--moe-backend: is 'auto', but --kernel-config.moe_backend is 'emulation'"):
        resolved(model, "--moe-backend", "auto", "--kernel-config.moe_backend", "emulation")
    with pytest.raises(ConfigError, match="--enable-flashinfer-autotune: needs a CUDA GPU"):
        resolved(model, "--kernel-config.enable_flashinfer_autotune", "true")


@pytest.mark.option("optimization-level")
def test_levels(tiny: Tiny) -> None:
    def engine(*arguments: str) -> Any:
        return resolved(tiny("llama"), *arguments).engine

    assert engine() == engine("-O2") == engine("-O", "1")
    assert engine("-O3") == engine("--optimization-level", "3") == engine("-O", "3")
    assert (engine("-O0").attention_backend, engine("-O0").op_priority["rms_norm"]) == ("torch", ("torch",))
    assert engine("-O0", "--attention-backend", "auto") == engine()
    for level in ("4", "-1"):
        with pytest.raises(ConfigError, match="--optimization-level: "):
            engine("--optimization-level", level)


@pytest.mark.slow
@pytest.mark.option("optimization-level")
def test_nothing_is_compiled_at_level_0(tiny: Tiny, tmp_path: Path) -> None:
    """On a machine without compiled kernels and with a slow compiler: only other levels wait for it."""
    code = (
        "import sys, time, torch\n"
        "from rayllm.config.load import load\n"
        "from rayllm.config.parser import parse_arguments\n"
        "from rayllm.config.registry import registry\n"
        "from rayllm.worker.worker import build_model\n"
        "engine = load(parse_arguments(sys.argv[1:], registry())).engine\n"
        "began = time.monotonic()\n"
        "build_model(engine, torch.device('cpu'))\n"
        "print(time.monotonic() - began)\n"
    )
    compiler = tmp_path / "bin/g++"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n: > {tmp_path}/compiled\n/bin/sleep 1\nexit 1\n")
    compiler.chmod(0o755)
    took = {}
    for level in ("-O0", "-O2"):
        flags = [str(tiny("llama")), "--no-use-tqdm-on-load", level]
        done = subprocess.run(
            [sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(compiler.parent)},
        )  # fmt: skip
        took[level] = float(done.stdout)
        assert (tmp_path / "compiled").exists() is (level == "-O2")
    assert max(took["-O0"], 1.0) < took["-O2"]
