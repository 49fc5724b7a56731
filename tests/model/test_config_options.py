"""Options that change what a model's config says, on the logits and limits that follow."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import Resolved
from rayllm.errors import ConfigError, ModelError
from rayllm.model.decoder import Decoder
from rayllm.model.families import spec_of
from tests.model.gguf_writer import write_gguf
from tests.model.runner import all_logits

Start = Callable[..., Decoder]
Tiny = Callable[[str], Path]
PROMPT = [1, 7, 30, 4, 55, 8, 8, 90, 3, 12, 41]


def resolved(*arguments: str) -> Resolved:
    return load(parse_arguments(arguments, registry()))


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model with another config."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return target


def same(one: Decoder, other: Decoder) -> bool:
    return torch.equal(all_logits(one, PROMPT), all_logits(other, PROMPT))


@pytest.mark.option("hf-overrides")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_window"])
def test_fewer_layers(tiny: Tiny, start: Start, name: str) -> None:
    one = start(tiny(name), "--hf-overrides", '{"num_hidden_layers": 1}')
    assert len(one.layers) == 1
    assert same(one, start(tiny(name), "--hf-overrides.num_hidden_layers", "1"))
    assert not same(one, start(tiny(name)))


@pytest.mark.option("hf-overrides")
def test_of_a_gguf_file(tiny: Tiny, tmp_path: Path, start: Start) -> None:
    file = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama")
    assert len(start(file, "--hf-overrides.num_hidden_layers", "2").layers) == 2
    assert not same(start(file, "--hf-overrides.rope_theta", "50"), start(file))


@pytest.mark.option("hf-overrides")
def test_values_that_no_config_has(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"--hf-overrides\.num_layers: .*did you mean num_hidden_layers"):
        resolved(str(tiny("llama")), "--hf-overrides.num_layers", "1")
    with pytest.raises(ConfigError, match="--hf-overrides: is not a JSON object"):
        resolved(str(tiny("llama")), "--hf-overrides", "[1]")
    with pytest.raises(ModelError, match=r"hidden_act: 'relu2' is not supported"):
        spec_of(resolved(str(tiny("llama")), "--hf-overrides.hidden_act", "relu2").engine.model)


@pytest.mark.option("hf-overrides", "rope-theta")
def test_rope_theta(tiny: Tiny, tmp_path: Path, start: Start) -> None:
    """Wherever a config keeps its own."""
    for name, own in [
        ("flat", {"rope_parameters": ..., "rope_theta": 1e4}),
        ("both", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ]:
        folder = changed(tiny("llama"), tmp_path / name, **own)
        wanted = changed(tiny("llama"), tmp_path / f"{name}-wanted", rope_parameters=..., rope_theta=50.0)
        assert same(start(folder, "--rope-theta", "50"), start(wanted))
        assert same(start(folder, "--hf-overrides.rope_parameters.rope_theta", "50"), start(wanted))
        assert not same(start(folder), start(wanted))
    with_kinds = resolved(str(tiny("gemma3")), "--rope-theta", "50").engine.model.config["rope_parameters"]
    assert with_kinds["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 50.0}
    assert with_kinds["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.option("hf-overrides", "rope-scaling")
def test_rope_scaling(tiny: Tiny, tmp_path: Path, start: Start) -> None:
    scaling = '{"rope_type": "linear", "factor": 2.0}'
    folder = str(tiny("llama"))
    old, new = resolved(folder, "--rope-scaling", scaling), resolved(folder, "--hf-overrides.rope_scaling", scaling)
    assert old.engine == new.engine
    assert [note for note in old.notes if "--rope-scaling is deprecated" in note]
    assert old.engine.max_model_len == 512
    wanted = changed(tiny("llama"), tmp_path / "w", rope_parameters={"rope_theta": 1e4, **json.loads(scaling)})
    assert same(start(folder, "--rope-scaling", scaling), start(wanted))
    assert not same(start(folder), start(wanted))
    # Another type takes nothing over from the old one but the base.
    other = resolved(str(tiny("llama_llama3")), "--hf-overrides.rope_scaling", scaling).engine.model.config
    assert other["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    more = resolved(str(tiny("llama_llama3")), "--hf-overrides.rope_parameters.factor", "9").engine.model.config
    assert more["rope_parameters"] == {
        "rope_type": "llama3", "factor": 9, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    plain = resolved(str(tiny("llama_llama3")), "--hf-overrides.rope_parameters", "null").engine.model.config
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.option("hf-config-path")
def test_a_config_elsewhere(tiny: Tiny, tmp_path: Path, start: Start) -> None:
    weights = changed(tiny("llama"), tmp_path / "weights")
    (weights / "config.json").unlink()
    changed(tiny("llama"), tmp_path / "other", rms_norm_eps=0.5)
    (tmp_path / "other/model.safetensors").unlink()
    model = start(weights, "--hf-config-path", str(tmp_path / "other"))
    assert model.spec.norm_eps == 0.5
    assert torch.equal(model.embed.weight, start(tiny("llama")).embed.weight)
    assert same(model, start(weights, "--hf-config-path", str(tmp_path / "other/config.json")))
    with pytest.raises(ConfigError, match=r"--hf-config-path: .*/config\.json does not exist"):
        start(weights, "--hf-config-path", str(tmp_path))
    file = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama")
    with pytest.raises(ConfigError, match=r"--hf-config-path: .* is a GGUF file"):
        start(file, "--hf-config-path", str(tmp_path / "other"))


@pytest.mark.option("trust-remote-code")
def test_models_that_bring_code(tiny: Tiny, tmp_path: Path, start: Start) -> None:
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "marker").mkdir()
    own = changed(tiny("llama"), tmp_path / "own", model_type="own", auto_map=code)
    for name in ("configuration_own", "modeling_own"):
        (own / f"{name}.py").write_text(f"open({str(tmp_path / 'marker' / name)!r}, 'w')")
    with pytest.raises(ConfigError, match=r"--trust-remote-code: .*configuration_own\.OwnConfig; give"):
        start(own)
    assert same(start(own, "--trust-remote-code"), start(tiny("llama")))
    assert "code of its own is not run" in resolved(str(own), "--trust-remote-code").notes[-1]
    # Known to us: its own implementation is not needed.
    assert same(start(changed(tiny("llama"), tmp_path / "known", auto_map=code)), start(tiny("llama")))
    strange = changed(own, tmp_path / "strange", architectures=["Own"])
    with pytest.raises(ConfigError, match=r"--model-impl: .*does not know Own"):
        start(strange, "--trust-remote-code", "--model-impl", "vllm")
    assert list((tmp_path / "marker").iterdir()) == []


@pytest.mark.option("disable-sliding-window")
@pytest.mark.parametrize(("name", "window"), [("mistral_window", 7), ("gemma3", 6), ("qwen2_window", 5)])
def test_no_windows(tiny: Tiny, start: Start, name: str, window: int) -> None:
    flag = "--disable-sliding-window"
    assert resolved(str(tiny(name)), flag).engine.max_model_len == window
    model, usual = start(tiny(name), flag), start(tiny(name))
    assert set(model.spec.windows) == {None}
    assert torch.equal(all_logits(model, PROMPT[:window]), all_logits(usual, PROMPT[:window]))
    with pytest.raises(ConfigError, match="--max-model-len"):
        resolved(str(tiny(name)), flag, "--max-model-len", str(window + 1))


@pytest.mark.option("disable-sliding-window")
def test_a_model_without_windows_is_unchanged(tiny: Tiny) -> None:
    path = str(tiny("llama"))
    assert resolved(path, "--disable-sliding-window").engine == resolved(path).engine


@pytest.mark.option("tokenizer-mode")
def test_tokenizer_modes(tiny: Tiny) -> None:
    path = str(tiny("llama"))
    assert resolved(path, "--tokenizer-mode", "hf").serve == resolved(path).serve
    for mode in ("slow", "mistral", "deepseek_v32", "other"):
        with pytest.raises(ConfigError, match=f"--tokenizer-mode: '{mode}' is not supported"):
            resolved(path, "--tokenizer-mode", mode)
