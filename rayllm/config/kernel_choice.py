"""Which implementations of operations are tried, in which order. Pure."""

from collections.abc import Iterator, Mapping

from rayllm.config.model_facts import ModelFacts
from rayllm.config.registry import Values
from rayllm.errors import ConfigError

CPU_DEFAULTS = ("native", "torch")
"""Of operations on a CPU: the compiled kernels where there is a compiler, else torch."""
ELSEWHERE = {"triton": "a CUDA GPU", "flash": "a CUDA GPU"}
"""Implementations that a CPU cannot run, by what they need."""
MOE_NEEDS = {
    "aiter": "an AMD GPU and AITER",
    "cutlass": "a CUDA GPU and CUTLASS",
    "deep_gemm": "a CUDA GPU and DeepGEMM",
    "deep_gemm_mega_moe": "a CUDA GPU and DeepGEMM",
    "flashinfer_cutedsl": "a CUDA GPU and FlashInfer",
    "flashinfer_cutlass": "a CUDA GPU and FlashInfer",
    "flashinfer_trtllm": "a CUDA GPU and FlashInfer",
    "marlin": "a CUDA GPU",
    "triton": "a GPU",
}
"""By --moe-backend; the others run on a CPU."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def resolve_attention_backend(values: Values) -> str:
    """`auto`, or `torch`, with which nothing is compiled: as the option says, else by --optimization-level."""
    return values["attention-backend"] or ("torch" if values["optimization-level"] == 0 else "auto")


def resolve_op_priority(values: Values) -> Mapping[str, tuple[str, ...]]:
    """For each operation that has a choice the implementations to try, the user's first.

    Raises:
        ConfigError: there is no such implementation, or a CPU cannot run it.
    """
    option, given = "--ir-op-priority.rms_norm", values["ir-op-priority"]["rms_norm"]
    for name in given:
        if isinstance(name, str) and name in ELSEWHERE:
            raise ConfigError(option, f"{name} needs {ELSEWHERE[name]}, and models run on the CPU", "leave it out")
        if name not in CPU_DEFAULTS:
            raise ConfigError(option, f"{name!r} is no implementation", f"these are: {', '.join(CPU_DEFAULTS)}")
    defaults = ("torch",) if resolve_attention_backend(values) == "torch" else CPU_DEFAULTS
    return {"rms_norm": tuple(dict.fromkeys((*given, *defaults)))}


def check_moe_backend(backend: str) -> None:
    """Refuse kernels of experts that a CPU cannot run.

    Raises:
        ConfigError: as it says.
    """
    if backend in MOE_NEEDS:
        raise ConfigError(
            "--moe-backend", f"{backend} needs {MOE_NEEDS[backend]}, and models run on the CPU", "leave it at auto"
        )


def kernel_notes(values: Values, facts: ModelFacts) -> Iterator[str]:
    """What the user should know about the choice of kernels."""
    if values["moe-backend"] != "auto" and not any(facts.config.get(name) for name in _EXPERTS):
        yield "--moe-backend has no effect: the model has no experts"
    plain = resolve_attention_backend(values) == "torch"
    if plain and values["attention-backend"] is None and facts.format == "gguf":
        yield "-O0: without compiled kernels a GGUF file's weights are turned back at the start; -O1 starts sooner"
    if values["ir-op-priority"]["rms_norm"][:1] == ["torch"] and not plain:
        yield (
            "--ir-op-priority: with norms by torch no step is one compiled program; products and attention are torch's "
            "too, and many times slower"
        )
