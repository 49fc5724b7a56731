"""One model in every format of weights: each gives the same tokens. And what the options about reading them do."""

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rayllm.config.files
from rayllm.config.files import read_files
from rayllm.config.hardware import Hardware
from rayllm.config.load import load
from rayllm.config.model_facts import read_model_facts
from rayllm.config.parallel import ParallelSettings
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import resolve_engine
from rayllm.config.weights import WeightsConfig
from rayllm.errors import ConfigError, ModelError
from rayllm.model.decoder import Decoder
from rayllm.model.loader import load_model
from rayllm.model.sharded_state import Share, save_sharded_state
from rayllm.model.sharded_state import main as write_sharded_state
from rayllm.parallel.ranks import Ranks
from tests.model.gguf_writer import write_gguf
from tests.model.runner import all_logits, greedy
from tests.models import make_tiny

Start = Callable[..., Decoder]
Tiny = Callable[[str], Path]
PROMPT = [1, 7, 30, 4, 55]
COUNT = 12
VICTIM = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral, which every format can hold."""
    return make_tiny("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def text(folder: Path, start: Start) -> list[int]:
    """What it says, read as safetensors."""
    return greedy(start(folder), PROMPT, COUNT)


@pytest.fixture
def bare(folder: Path, tmp_path: Path) -> Path:
    """A folder with its config and no weights."""
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    return tmp_path


@pytest.fixture
def pt(bare: Path, tensors: dict[str, Tensor]) -> Path:
    """The same in two files of torch.save."""
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        torch.save({name: tensors[name] for name in part}, bare / f"pytorch_model-{number}.bin")
    return bare


def mistral_tensors(tensors: dict[str, Tensor], head: int) -> dict[str, Tensor]:
    """The tensors under Mistral's names, rotated entries in pairs."""
    names = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output",
    }  # fmt: skip
    out = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.reshape(-1, 2, head // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        out[name] = tensor.contiguous()
    return out


def write_params(folder: Path, source: Path, **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "head_dim": 8, "hidden_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"], "vocab_size": config["vocab_size"], "rope_theta": 10000.0,
        "max_position_embeddings": 256, "use_biases": False, **changes,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))


@pytest.mark.option("load-format")
def test_safetensors_and_pt(folder: Path, pt: Path, start: Start, text: list[int]) -> None:
    assert greedy(start(folder, "--load-format", "safetensors"), PROMPT, COUNT) == text
    assert greedy(start(pt, "--load-format", "pt"), PROMPT, COUNT) == text
    assert greedy(start(pt), PROMPT, COUNT) == text


@pytest.mark.option("load-format", "quantization")
def test_gguf(folder: Path, tmp_path: Path, start: Start, text: list[int]) -> None:
    whole = write_gguf(folder, tmp_path / "whole.gguf", "llama")
    wide = make_tiny("llama", tmp_path / "wide", hidden_size=64, num_attention_heads=4, intermediate_size=96)
    quantized = write_gguf(wide, tmp_path / "q.gguf", "llama", "Q8_0")
    assert greedy(start(whole, "--load-format", "gguf"), PROMPT, COUNT) == text
    plain = greedy(start(quantized), PROMPT, COUNT)
    assert greedy(start(quantized, "-q", "gguf"), PROMPT, COUNT) == plain


@pytest.mark.option("load-format")
def test_sharded_state(folder: Path, tmp_path: Path, start: Start, text: list[int], capsys: Any) -> None:
    assert write_sharded_state([str(folder), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert "model-rank-0-part-0.safetensors" in capsys.readouterr().out
    assert not (tmp_path / "out/model.safetensors").exists()
    assert greedy(start(tmp_path / "out", "--load-format", "sharded_state"), PROMPT, COUNT) == text
    with pytest.raises(ModelError, match="model-rank-0"):
        start(folder, "--load-format", "sharded_state")


@pytest.mark.option("model-loader-extra-config")
def test_files_of_sharded_state_may_have_other_names(folder: Path, tmp_path: Path, start: Start, text: Any) -> None:
    pattern = ("--model-loader-extra-config.pattern", "r{rank}p{part}.safetensors")
    flags = ("--load-format", "safetensors", "--dtype", "float32")
    assert write_sharded_state([str(folder), str(tmp_path / "out"), *flags]) == 0
    (tmp_path / "out/model-rank-0-part-0.safetensors").rename(tmp_path / "out/r0p0.safetensors")
    assert greedy(start(tmp_path / "out", "--load-format", "sharded_state", *pattern), PROMPT, COUNT) == text


def test_sharded_state_of_two_ranks(folder: Path, tmp_path: Path) -> None:
    engine = resolve_engine(
        parse_arguments([str(folder)], registry()), read_model_facts(str(folder)), Hardware(cpus=1, memory=2**30)
    )
    written = save_sharded_state(replace(engine, parallel=ParallelSettings(tensor=2)), tmp_path)
    assert [file.name for file in written] == [f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1)]
    for rank in (0, 1):
        share, kind = Ranks(Share(rank, 2)), WeightsConfig(format="sharded_state")
        loads = [
            load_model(read_model_facts(str(path)), torch.float32, torch.device("cpu"), share, weights)
            for path, weights in ((folder, None), (tmp_path, kind))
        ]
        assert all(map(torch.equal, *(model.state_dict().values() for model in loads)))
    written[1].unlink()
    with pytest.raises(ModelError, match=r"model-rank-1-.* fewer ranks"):
        load_model(read_model_facts(str(tmp_path)), torch.float32, torch.device("cpu"), share, kind)


@pytest.mark.option("load-format")
def test_npcache(pt: Path, tensors: dict[str, Tensor], start: Start, text: list[int]) -> None:
    flags = ("--load-format", "npcache")
    assert greedy(start(pt, *flags), PROMPT, COUNT) == text
    [index] = pt.glob("np/index.json")
    before = index.stat().st_mtime_ns
    assert greedy(start(pt, *flags), PROMPT, COUNT) == text
    assert index.stat().st_mtime_ns == before
    # Other files of torch.save make the cache old.
    for file in pt.glob("*.bin"):
        loaded = torch.load(file, weights_only=True)
        torch.save({name: tensor.bfloat16() for name, tensor in loaded.items()}, file)
    again = start(pt, *flags)
    assert torch.equal(again.embed.weight, tensors["model.embed_tokens.weight"].bfloat16().float())


@pytest.mark.option("load-format", "config-format")
def test_mistral(folder: Path, tensors: dict[str, Tensor], tmp_path: Path, start: Start, text: list[int]) -> None:
    save_file(mistral_tensors(tensors, 8), tmp_path / "consolidated.safetensors")
    write_params(tmp_path, folder)
    for flags in ([], ["--config-format", "mistral", "--load-format", "mistral"]):
        assert greedy(start(tmp_path, *flags), PROMPT, COUNT) == text
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        start(tmp_path, "--config-format", "hf")
    write_params(tmp_path, folder, moe={"num_experts": 8})
    with pytest.raises(ModelError, match=r"params\.json: moe: .* is not supported"):
        start(tmp_path)


@pytest.mark.option("load-format")
def test_dummy_needs_no_weights(bare: Path, start: Start) -> None:
    one, other = (start(bare, "--load-format", "dummy", "--seed", seed) for seed in ("1", "2"))
    assert not torch.equal(one.embed.weight, other.embed.weight)


@pytest.mark.option("load-format", "model-loader-extra-config")
def test_tensorizer(bare: Path, folder: Path, start: Start, text: list[int]) -> None:
    serialization = pytest.importorskip("tensorizer")
    from transformers import AutoModelForCausalLM

    serializer = serialization.TensorSerializer(str(bare / "model.tensors"))
    serializer.write_module(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    serializer.close()
    assert greedy(start(bare, "--load-format", "tensorizer"), PROMPT, COUNT) == text
    (bare / "model.tensors").rename(bare.parent / "elsewhere")
    place = ("--model-loader-extra-config.tensorizer_uri", str(bare.parent / "elsewhere"))
    assert greedy(start(bare, "--load-format", "tensorizer", *place), PROMPT, COUNT) == text


@pytest.mark.option("load-format", "model-loader-extra-config")
def test_runai_streamer(folder: Path, tmp_path: Path, start: Start, text: list[int], monkeypatch: Any) -> None:
    pytest.importorskip("runai_model_streamer")
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "1")  # set by us; put back after the test
    flags = ("--model-loader-extra-config.concurrency", "2")
    assert greedy(start(folder, "--load-format", "runai_streamer", *flags), PROMPT, COUNT) == text
    assert write_sharded_state([str(folder), str(tmp_path), "--dtype", "float32"]) == 0
    assert greedy(start(tmp_path, "--load-format", "runai_streamer_sharded"), PROMPT, COUNT) == text


@pytest.mark.option("load-format")
@pytest.mark.parametrize(
    ("format_", "words"),
    [
        ("instanttensor", "package instanttensor .* CUDA GPUs"),
        ("bitsandbytes", "package bitsandbytes"),
        ("tensorizer", "needs the package tensorizer; pip install tensorizer"),
        ("runai_streamer", "needs the package runai-model-streamer; pip install"),
        ("gguf", "not a GGUF file"),
        ("pickle", "'pickle' is not one of"),
    ],
)
def test_a_format_that_cannot_be_read(folder: Path, start: Start, monkeypatch: Any, format_: str, words: str) -> None:
    monkeypatch.setattr(rayllm.config.files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"--load-format: .*{words}"):
        start(folder, "--load-format", format_)


class Code:
    """What a pickle must not bring."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


def test_a_pickle_that_holds_code_is_not_run(bare: Path, start: Start, capfd: Any) -> None:
    torch.save({"model.norm.weight": Code()}, bare / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: holds more than tensors"):
        start(bare)
    (bare / "pytorch_model.bin").write_bytes(pickle.dumps(Code(), protocol=2))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: "):
        start(bare)
    assert "code ran" not in capfd.readouterr().out


@pytest.mark.option("pt-load-map-location")
def test_map_location(pt: Path, folder: Path, start: Start, monkeypatch: Any) -> None:
    seen, real = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: (seen.append(k["map_location"]), real(*a, **k))[1])
    start(pt)
    start(pt, "--pt-load-map-location", '{"cuda:1": "cpu"}')
    start(pt, "--pt-load-map-location", '{"": "cpu"}')
    assert seen == ["cpu"] * 2 + [{"cuda:1": "cpu"}] * 2 + ["cpu"] * 2
    with pytest.raises(ConfigError, match=r"--pt-load-map-location: .*safetensors"):
        start(folder, "--pt-load-map-location", "cuda")
    start(folder, "--pt-load-map-location", "cpu")
    for wrong in ('{"a": 1}', '{"": "cpu", "cuda": "cpu"}', "3"):
        with pytest.raises(ConfigError, match="--pt-load-map-location"):
            start(pt, "--pt-load-map-location", wrong)


@pytest.mark.option("safetensors-load-strategy")
@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch"])
def test_strategies(folder: Path, start: Start, caplog: Any, strategy: str) -> None:
    with caplog.at_level(logging.INFO):
        model = start(folder, "--safetensors-load-strategy", strategy)
    assert f"of safetensors with strategy {strategy} in" in caplog.text
    assert all(map(torch.equal, model.state_dict().values(), start(folder).state_dict().values()))


@pytest.mark.option("safetensors-load-strategy")
def test_strategies_that_cannot_be(folder: Path, pt: Path, start: Start) -> None:
    with pytest.raises(ConfigError, match=r"--safetensors-load-strategy: .*torchao"):
        start(folder, "--safetensors-load-strategy", "torchao")
    with pytest.raises(ConfigError, match=r"--safetensors-load-strategy: .*pt"):
        start(pt, "--safetensors-load-strategy", "eager")


@pytest.mark.option("safetensors-load-strategy")
def test_a_network_file_system_turns_prefetch_on(folder: Path, tmp_path: Path, caplog: Any) -> None:
    mounts = tmp_path / "mounts"
    facts, values = read_model_facts(str(folder)), parse_arguments([str(folder)], registry())

    def strategy(table: str, memory: int = 2**30) -> str:
        mounts.write_text(table)
        files = read_files(values, facts, mounts=mounts)
        weights = resolve_engine(values, facts, Hardware(cpus=1, memory=memory), files).weights
        with caplog.at_level(logging.INFO):
            load_model(facts, torch.float32, torch.device("cpu"), weights=weights)
        return caplog.messages[-1]

    share = f"server:/x {folder.resolve()} nfs4 rw 0 0\n"
    assert "strategy prefetch (turned on because they lie on a network file system, nfs4)" in strategy(
        f"/dev/vda / ext4 rw 0 0\n{share}"
    )
    assert "strategy lazy in" in strategy(f"server:/x / nfs4 rw 0 0\n/dev/vda {folder.resolve()} ext4 rw 0 0\n")
    assert "strategy lazy in" in strategy(share, memory=1000)


@pytest.mark.option("model-loader-extra-config")
def test_settings_of_the_loader(folder: Path, pt: Path, start: Start, caplog: Any, text: list[int]) -> None:
    key = "--model-loader-extra-config"
    with caplog.at_level(logging.INFO):
        model = start(folder, f"{key}.num_threads", "3")
        start(pt, f"{key}.enable_multithread_load", "true")
    assert greedy(model, PROMPT, COUNT) == text
    assert ", 3 threads in" in caplog.text
    assert "of pt with 8 threads in" in caplog.text
    for setting, value, words in [
        ("num_thread", "3", "no setting of the loader of safetensors; its keys are enable_multithread_load"),
        ("num_threads", "0", "not a positive integer"),
        ("num_threads", "true", "not a positive integer"),
        ("concurrency", "3", "no setting"),
    ]:
        with pytest.raises(ConfigError, match=rf"{key}\.{setting}: .*{words}"):
            start(folder, f"{key}.{setting}", value)
    with pytest.raises(ConfigError, match="it has none"):
        start(folder, "--load-format", "dummy", f"{key}.num_threads", "3")
    with pytest.raises(ConfigError, match="contradicts"):
        start(folder, f"{key}.num_threads", "3", f"{key}.enable_multithread_load", "false")


@pytest.mark.option("ignore-patterns")
def test_ignored_files(folder: Path, bare: Path, tensors: dict[str, Tensor], start: Start, text: list[int]) -> None:
    save_file(tensors, bare / "part.safetensors")
    (bare / "broken.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(ModelError, match=r"broken\.safetensors"):
        start(bare)
    assert greedy(start(bare, "--ignore-patterns", "broken*", "other"), PROMPT, COUNT) == text
    (bare / "broken.safetensors").unlink()
    (bare / "original").mkdir()
    (bare / "original/model.safetensors").write_bytes(b"\xff" * 99)
    assert greedy(start(bare), PROMPT, COUNT) == text


@pytest.mark.option("use-tqdm-on-load")
def test_progress_bar(pt: Path, start: Start, capfd: Any) -> None:
    start(pt)
    assert "Loading weights" not in capfd.readouterr().err
    start(pt, "--use-tqdm-on-load")
    err = capfd.readouterr().err
    assert "Loading weights: 100%" in err
    assert "2/2" in err


@pytest.mark.option("dtype")
def test_dtype(folder: Path, start: Start) -> None:
    logits = {}
    for name, dtype in [
        ("bfloat16", torch.bfloat16), ("half", torch.float16), ("float16", torch.float16), ("float", torch.float32),
        ("float32", torch.float32), ("auto", torch.float32),
    ]:  # fmt: skip
        model = start(folder, "--dtype", name)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        logits[name] = all_logits(model, PROMPT)
    assert torch.equal(logits["half"], logits["float16"])
    assert not torch.equal(logits["half"], logits["bfloat16"])


@pytest.mark.option("allow-deprecated-quantization", "quantization")
@pytest.mark.parametrize("strategy", ["lazy", "eager"])
def test_a_deprecated_quantization(tiny: Tiny, start: Start, tmp_path: Path, strategy: str) -> None:
    """Refused, or with the option turned back to what its 8-bit numbers and their scales stand for, and warned of."""
    folder, plain = tmp_path / "fp8", tmp_path / "plain"
    shutil.copytree(tiny("llama"), folder)
    shutil.copytree(tiny("llama"), plain)
    stored, wanted = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        wanted[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            stored[name], stored[f"{name}_scale"] = (tensor / scale).to(torch.float8_e4m3fn), scale
            wanted[name] = stored[name].float() * scale
    save_file(wanted, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def quantized(method: str) -> None:
        config["quantization_config"] = {"quant_method": method, "activation_scale_ub": 1200.0}
        (folder / "config.json").write_text(json.dumps(config))

    allow: tuple[str, ...] = ("--allow-deprecated-quantization", "--safetensors-load-strategy", strategy)
    quantized("fbgemm_fp8")
    with pytest.raises(ConfigError, match=r"--allow-deprecated-quantization: .*by fbgemm_fp8, which is deprecated"):
        start(folder)
    answer = greedy(start(plain), PROMPT, COUNT)
    assert greedy(start(folder, *allow), PROMPT, COUNT) == answer
    assert greedy(start(folder, *allow, "-q", "fbgemm_fp8"), PROMPT, COUNT) == answer
    assert "fbgemm_fp8, which is deprecated" in load(parse_arguments([str(folder), *allow], registry())).notes[-1]
    with pytest.raises(ConfigError, match="--load-format"):
        start(folder, *allow[:1], "--load-format", "runai_streamer")
    quantized("tpu_int8")
    with pytest.raises(ConfigError, match=r"--quantization: .*by tpu_int8, which is deprecated and runs on no CPU"):
        start(folder, *allow)
    quantized("fbgemm_fp8")
    save_file({k: v for k, v in stored.items() if "_scale" not in k}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor .*_scale: missing"):
        start(folder, *allow)


@pytest.mark.option("quantization")
def test_a_method_that_contradicts_the_files(folder: Path, bare: Path, start: Start) -> None:
    with pytest.raises(ConfigError, match=r"--quantization: is awq, but the weights of .* are not quantized"):
        start(folder, "-q", "awq")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"--quantization: is gguf, but the weights of .* are quantized by fp8"):
        start(bare, "-q", "gguf")
    with pytest.raises(ConfigError, match="--quantization: fp8 is not supported"):
        start(bare, "-q", "fp8")
