"""Fixtures of the model's tests: tiny models, made once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayllm.config.load import load as config_load
from rayllm.config.model_facts import read_model_facts
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.model.decoder import Decoder
from rayllm.model.loader import load_model
from rayllm.model.precheck import check_model
from rayllm.worker.worker import build_model
from tests.models import make_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads that wait for each other are many times slower on a machine that others use too."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model to its folder."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def load() -> Callable[..., Decoder]:
    """Folder or file to a loaded decoder, float32 unless said otherwise."""

    def get(path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Decoder:
        return load_model(read_model_facts(str(path)), dtype, torch.device("cpu"), **more)

    return get


@pytest.fixture(scope="session")
def start() -> Callable[..., Decoder]:
    """What an engine does with a command line of `rayllm serve`, up to the loaded model; float32 unless it says."""

    def get(path: Path | str, *arguments: str) -> Decoder:
        flags = [str(path), "--attention-backend", "torch", "--dtype", "float32", "--no-use-tqdm-on-load"]
        flags += ["--disable-hybrid-kv-cache-manager", *arguments]  # the tests' runner has one table of blocks
        engine = config_load(parse_arguments(flags, registry())).engine
        check_model(engine)
        model = build_model(engine, torch.device("cpu"))
        assert isinstance(model, Decoder)
        return model

    return get


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """Folder to the model that transformers makes of it, float32, attention written out."""
    from transformers import AutoModelForCausalLM

    def get(path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    return get
