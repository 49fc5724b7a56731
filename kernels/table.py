"""The table of operations, the versions there are of each, and the choice among them.

`Ops` declares every operation once; the docstring of its reference is its contract. An `Implementation` is one more
version of some of them. `choose` takes for each operation the version of the highest priority that runs on the platform
and does what the model needs; `select` loads what was chosen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rayllm_kernels import attention, reference
from rayllm_kernels import experts as moe

PLATFORMS = ("cpu", "cuda", "native")
"""`native` is the compiled CPU kernels one at a time; a decoder runs them as a program, if all of them are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One version of every operation; by default the reference, whose docstring is the contract of all versions."""

    rms_norm: Callable[..., Tensor] = reference.rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = reference.add_rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = reference.rotary
    silu_and_mul: Callable[[Tensor], Tensor] = reference.silu_and_mul
    gelu_tanh_and_mul: Callable[[Tensor], Tensor] = reference.gelu_tanh_and_mul
    linear: Callable[..., Tensor] = reference.linear
    embedding: Callable[[Tensor, Tensor], Tensor] = reference.embedding
    experts: Callable[..., Tensor] = moe.experts
    kv_cache_shape: Callable[..., tuple[int, ...]] = attention.kv_cache_shape
    write_kv: Callable[..., None] = attention.write_kv
    paged_attention: Callable[..., Tensor] = attention.paged_attention
    latent_cache_shape: Callable[..., tuple[int, ...]] = attention.latent_cache_shape
    write_latent: Callable[..., None] = attention.write_latent
    latent_attention: Callable[..., Tensor] = attention.latent_attention


REFERENCE = Ops()
ALL = tuple(field.name for field in fields(Ops))
ROWS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "gelu_tanh_and_mul")
CACHE = ("kv_cache_shape", "write_kv", "paged_attention")
LATENT = ("latent_cache_shape", "write_latent", "latent_attention")
"""These share the cache's layout, so they come from one implementation; and so do these."""
TRITON_TRIED = False
"""Interpreted they pass the tests, and they compile, but no GPU has run them: none was at hand. Set it when one has."""
FLASH_TRIED = False
"""The same of vllm-flash-attn, of which the tests know the interface only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model asks of its operations. `None` is anything."""

    dtype: torch.dtype | None = None
    head_size: int | None = None
    block_size: int | None = None
    soft_cap: bool = False
    sinks: bool = False
    cache_of_its_own: bool = False
    """Whether keys and values of some layer are stored in another dtype than the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A version of some operations."""

    name: str
    operations: tuple[str, ...]
    platforms: tuple[str, ...]
    priority: int
    load: Callable[[], Any]
    """Imports or compiles it, and returns what has the operations as attributes. Called only if it was chosen."""
    why_not: Callable[[Needs], str | None] = lambda needs: None
    """Why it cannot be had on this machine or cannot do what is needed; `None` if it can. Imports nothing heavy."""

    def __post_init__(self) -> None:
        assert set(self.operations) <= set(ALL), self.operations
        for together in (CACHE, LATENT):
            assert len(set(together) & set(self.operations)) in (0, len(together)), self.operations


@dataclass(frozen=True, slots=True)
class Choice:
    """The version taken for an operation, and why those of higher priority were not."""

    operation: str
    taken: Implementation
    refused: tuple[tuple[str, str], ...]
    """(name, reason)."""


def implementations() -> tuple[Implementation, ...]:
    """Every version there is, on whatever machine."""
    return (
        Implementation(
            name="torch", operations=ALL, platforms=PLATFORMS, priority=0, load=lambda: REFERENCE,
        ),
        Implementation(
            name="widened", operations=("linear",), platforms=("cpu",), priority=10, load=_widened,
            why_not=_not_widened,
        ),
        Implementation(
            name="native", operations=ALL, platforms=("native",), priority=10, load=_native, why_not=_not_native,
        ),
        Implementation(
            name="triton", operations=(*ROWS, *CACHE, "experts"), platforms=("cuda",), priority=10, load=_triton,
            why_not=_not_triton,
        ),
        Implementation(
            name="flash", operations=CACHE, platforms=("cuda",), priority=5, load=_flash, why_not=_not_flash,
        ),
    )  # fmt: skip


def choose(
    platform: str,
    needs: Needs | None = None,
    among: Iterable[Implementation] | None = None,
    first: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Choice, ...]:
    """A version for every operation, in the order of `Ops`.

    `first` names, for some operations, the implementations to try before all others; `native` may be named for a CPU.

    Raises:
        ValueError: no such platform.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform {platform!r}: must be one of {', '.join(PLATFORMS)}")
    needs = needs or Needs()
    hosts = {platform, "native"} if platform == "cpu" else {platform}
    able = [one for one in among or implementations() if hosts & set(one.platforms)]
    usual = sorted((one for one in able if platform in one.platforms), key=lambda one: -one.priority)
    reasons: dict[str, str | None] = {}
    choices = []
    for operation in ALL:
        refused = []
        named = [one for name in (first or {}).get(operation, ()) for one in able if one.name == name]
        for one in [*named, *(one for one in usual if one not in named)]:
            if operation not in one.operations:
                continue
            if one.name not in reasons:
                reasons[one.name] = one.why_not(needs)  # may compile it, so only where it might be taken
            reason = reasons[one.name]
            if reason is None:
                choices.append(Choice(operation, one, tuple(refused)))
                break
            refused.append((one.name, reason))
    return tuple(choices)


def explain(choices: Iterable[Choice]) -> str:
    """Choices in one line: operations by version, then what was refused."""
    taken: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for choice in choices:
        taken.setdefault(choice.taken.name, []).append(choice.operation)
        refused.update(choice.refused)
    lines = [f"{name}: {', '.join(operations)}" for name, operations in taken.items()]
    return "; ".join([*lines, *(f"not {name}: {reason}" for name, reason in refused.items())])


def select(
    platform: str,
    needs: Needs | None = None,
    among: Iterable[Implementation] | None = None,
    first: Mapping[str, Sequence[str]] | None = None,
) -> Ops:
    """The table of what `choose` takes.

    Raises:
        ValueError: no such platform.
    """
    choices = choose(platform, needs, among, first)
    loaded = {one.name: one.load() for one in {choice.taken.name: choice.taken for choice in choices}.values()}
    return Ops(**{choice.operation: getattr(loaded[choice.taken.name], choice.operation) for choice in choices})


def _widened() -> Any:
    from rayllm_kernels import cpu

    return cpu


def _not_widened(needs: Needs) -> str | None:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "torch multiplies 16-bit numbers well on this CPU" if wide else None


def _triton() -> Any:
    from rayllm_kernels import triton

    return triton


def _not_triton(needs: Needs) -> str | None:
    if find_spec("triton") is None:
        return "not installed"
    if not TRITON_TRIED:
        return "not yet run on a GPU"
    if needs.head_size is not None and needs.head_size > 256:
        return f"heads of {needs.head_size}"
    return "a cache in another dtype than the model's" if needs.cache_of_its_own else None


def _flash() -> Any:
    from rayllm_kernels import flash

    return flash


def _not_flash(needs: Needs) -> str | None:
    if find_spec("vllm_flash_attn") is None:
        return "not installed"
    if not FLASH_TRIED:
        return "not yet run on a GPU"
    if needs.dtype not in (None, torch.float16, torch.bfloat16):
        return f"{needs.dtype}"
    if needs.head_size is not None and (needs.head_size > 256 or needs.head_size % 8):
        return f"heads of {needs.head_size}"
    if needs.block_size is not None and needs.block_size % 16:
        return f"blocks of {needs.block_size} tokens"
    if needs.cache_of_its_own:
        return "a cache in another dtype than the model's"
    return "attention sinks" if needs.sinks else None


def _native() -> Any:
    from rayllm_kernels.native.ops import NativeOps

    return NativeOps()


def _not_native(needs: Needs) -> str | None:
    from rayllm_kernels.native.library import library
    from rayllm_kernels.native.program import fits

    if library() is None:
        return "not compiled"
    if needs.block_size is not None and not fits(needs.block_size):
        return f"blocks of {needs.block_size} tokens"
    return None
