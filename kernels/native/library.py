"""The compiled kernels as Python sees them: packed weights, a machine with threads, programs.

`program.py` says what the instructions mean. Tensors handed over are float32 and contiguous in their last dimension.
"""

import contextlib
import ctypes
import logging
import subprocess
import sys
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayllm_kernels.experts import ExpertWeights
from rayllm_kernels.native.build import NoCompiler, Variant, build, cache_folder, cpu_features, runnable
from rayllm_kernels.native.memory import Arena
from rayllm_kernels.sampling import Draws, LogProbabilities, Penalties, SamplingOps

log = logging.getLogger(__name__)

LANES = 16
"""Columns of a panel, and tokens of a cache tile."""
CHECK_S = 120.0


class Kind(IntEnum):
    """How numbers are stored. Order as in panel.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q4_K = 6
    Q6_K = 7
    I16 = 8


KIND_OF = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.float16: Kind.F16}
BLOCK = {Kind.Q8_0: (32, 34), Kind.Q4_0: (32, 18), Kind.Q4_1: (32, 20), Kind.Q4_K: (256, 144), Kind.Q6_K: (256, 210)}
"""Entries and bytes of a stored block."""


class Epilogue(IntEnum):
    """What follows a product."""

    PLAIN = 0
    SILU_MUL = 1
    GELU_MUL = 2
    CLAMPED_MUL = 3


EPILOGUES = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL, "clamped": Epilogue.CLAMPED_MUL}
"""By activation. The last is for experts alone."""


class Instruction(ctypes.Structure):
    """As in cpu.cpp."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("op", "kind", "epilogue", "rope", "src", "dst", "other", "integer", "cache_kind", "group")
        ),
        *((name, c_int64) for name in ("n", "k", "heads", "kv_heads", "head", "value_in_key")),
        *((name, c_int64) for name in ("rotated", "block", "window", "offset", "step")),
        *((name, c_void_p) for name in ("weight", "bias", "sinks", "keys", "values", "q_norm", "k_norm", "scales")),
        *((name, c_float) for name in ("f0", "f1")),
    )


class Step(ctypes.Structure):
    """As in cpu.cpp."""

    _fields_ = (
        ("tokens", c_int64), ("requests", c_int64), ("token_ids", c_void_p), ("query_start", c_void_p),
        ("seq_lens", c_void_p), ("block_table", c_void_p), ("table_width", c_int64), ("slots", c_void_p),
        ("angles", POINTER(c_void_p)), ("angle_rows", c_void_p), ("sharers", c_void_p), ("num_sharers", c_int64),
        ("shared", c_int64),
    )  # fmt: skip


class Router(ctypes.Structure):
    """As in experts.h. The fields are those of `MoeSpec` in rayllm/model/spec.py."""

    _fields_ = (
        *((name, c_int64) for name in ("experts", "chosen", "groups", "chosen_groups")),
        *((name, c_int32) for name in ("sigmoid", "two_best", "normalised", "unused")),
        ("correction", c_void_p), ("scale", c_float),
    )  # fmt: skip


class ExpertSet(ctypes.Structure):
    """As in experts.h."""

    _fields_ = (
        *((name, c_int64) for name in ("count", "width", "inner")),
        *(
            (name, c_int32)
            for name in (
                "gate_up_kind", "gate_up_integer", "down_kind", "down_integer", "epilogue", "input_scaled",
            )
        ),
        *((name, c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, c_float) for name in ("alpha", "limit")),
    )  # fmt: skip


@cache
def library() -> Any | None:
    """The compiled kernels for this CPU, or None (with one warning) where they cannot be had."""
    problem = ""
    for variant in runnable(cpu_features()):
        try:
            path = build(variant, cache_folder(), log.info)
            if computes_right(path, variant):
                return load(variant)
            problem = f"those for {variant.name} compute wrong numbers on this machine"
        except (NoCompiler, OSError) as error:  # an old compiler may know the slower variants only
            problem = str(error)
        log.info("not using the CPU kernels for %s: %s", variant.name, problem)
    log.warning("running without compiled kernels, which is many times slower: %s", problem)
    return None


def computes_right(path: Path, variant: Variant) -> bool:
    """Whether a build gives the numbers it should on this CPU: tried once, in a process of its own."""
    passed = path.with_suffix(".checked")
    if passed.is_file():
        return True
    command = [sys.executable, "-m", "rayllm_kernels.native.check", variant.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        log.warning("trying the CPU kernels for %s took more than %.0f s", variant.name, CHECK_S)
        return False
    if done.returncode:
        log.warning("%s", done.stderr.strip()[-2000:])
        return False
    with contextlib.suppress(OSError):  # a cache that others filled: it is tried again next time
        passed.touch()
    return True


@cache
def load(variant: Variant) -> Any:
    """The kernels compiled for a variant.

    Raises:
        NoCompiler: they were not compiled before and cannot be now.
        OSError: they cannot be loaded.
    """
    loaded = ctypes.CDLL(str(build(variant, cache_folder(), log.info)))
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rounds_rows": (c_int32, (c_int32,)),
        "packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
        "pack": (None, (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p)),
        "machine": (c_void_p, (c_int32,)),
        "free_machine": (None, (c_void_p,)),
        "linear": (
            None,
            (
                c_void_p,
                c_int32,
                c_int32,
                c_void_p,
                c_void_p,
                c_int32,
                c_int64,
                c_int64,
                c_void_p,
                c_int64,
                c_int64,
                c_void_p,
                c_int64,
            ),
        ),
        "experts": (
            None,
            (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
        ),
        "argmax": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        "best_columns": (
            None,
            (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p),
        ),
        "choose": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, *(c_void_p,) * 7)),
        "restrict": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
        "penalise": (
            None,
            (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, *(c_void_p,) * 6),
        ),
        "log_probabilities": (
            None,
            (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, *(c_void_p,) * 4),
        ),
        "run": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)),
        "exchange_bytes": (c_int64, (c_int64, c_int64)),
        "exchange_gather": (
            c_uint32,
            (c_void_p, c_int64, c_int64, c_int64, c_uint32, c_void_p, c_int64, c_void_p),
        ),
        "exchange_sum": (c_uint32, (c_void_p, c_int64, c_int64, c_int64, c_uint32, c_void_p, c_int64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, f"rk_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight matrix, (n, k), in panels."""

    kind: Kind
    n: int
    k: int
    data: Tensor
    """uint8."""
    integer: bool = False
    """Whether products are of integers: rows are then rounded to two bytes, 32 (I16: 64) entries to a scale."""

    @property
    def address(self) -> int:
        """Of the first panel."""
        return int(self.data.data_ptr())


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Gated MLPs, each in matrices of panels. The tensors may be overwritten between calls, expert by expert."""

    gate_up: Tensor
    """(experts, bytes) uint8: gate and up taking turns."""
    down: Tensor
    """(experts, bytes) uint8."""
    gate_up_bias: Tensor | None
    """(experts, columns) float32, in the order of the matrix."""
    down_bias: Tensor | None
    fields: ExpertSet
    """Points at these."""


def pair(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of a gate and an up matrix taking turns panel by panel, so that a product can join them at once."""
    n = len(gate)
    padded = -(-n // LANES) * LANES
    both = gate.new_zeros(padded // LANES, 2, LANES, *gate.shape[1:])
    for i, part in enumerate((gate, up)):
        whole = part.new_zeros(padded, *part.shape[1:])
        whole[:n] = part
        both[:, i] = whole.view(-1, LANES, *part.shape[1:])
    return both.view(2 * padded, *gate.shape[1:])


def side_by_side(rows_NEK: Tensor) -> Tensor:
    """The matrices of several heads as one, each filled up to whole panels, for `Program.head_linear`."""
    heads, n, k = rows_NEK.shape
    filled = rows_NEK.new_zeros(heads, -(-n // LANES) * LANES, k)
    filled[:, :n] = rows_NEK
    return filled.flatten(0, 1)


class Machine:
    """Threads for the kernels. Used by one thread at a time."""

    def __init__(self, threads: int, lib: Any | None = None) -> None:
        """`lib` is what `load` gave; without it, `library()`."""
        self._lib = lib or _loaded()
        self.handle = self._lib.rk_machine(threads)
        self._arena = Arena()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.rk_free_machine(self.handle)
            self.handle = None

    def rounds_rows(self, kind: Kind) -> bool:
        """Whether rows are rounded to bfloat16 before they are multiplied with weights of this kind."""
        return bool(self._lib.rk_rounds_rows(kind))

    def pack(self, rows: Tensor, kind: Kind | None = None, k: int | None = None, *, integer: bool = False) -> Packed:
        """Pack a matrix (n, k), or a quantized one given as uint8 rows of blocks with its `kind` and depth `k`.

        One of 16 bits, or a quantized one, may be multiplied in integers (see `Packed`), which is faster and rounds the
        rows. Floats then become whole numbers of 16 bits (I16), rounded finer than the rows; but where the CPU has
        products of bfloat16 themselves, such weights stay as they are.
        """
        return self._pack_all(1, lambda i: rows, kind, k, integer)[1]

    def _pack_all(
        self, count: int, matrix: Callable[[int], Tensor], kind: Kind | None, k: int | None, integer: bool
    ) -> tuple[Tensor, Packed]:
        """Matrices of one shape, (count, bytes), and the first of them. See `pack`."""
        rows = matrix(0)
        if kind is None:
            kind, k = KIND_OF[rows.dtype], rows.shape[1]
        assert k is not None
        assert kind is not Kind.F32 or not integer
        stored, n = kind, rows.shape[0]
        if integer and kind not in BLOCK:
            integer = not self.rounds_rows(kind)
            kind = Kind.I16 if integer else kind
        size = self._lib.rk_packed_bytes(kind, n, k)
        data = self._arena.take(count * size).view(count, size)
        for i in range(count):
            rows = matrix(i).contiguous()
            self._lib.rk_pack(self.handle, kind, stored, rows.data_ptr(), n, k, data[i].data_ptr())
        return data, Packed(kind, n, k, data[0], integer)

    def linear(
        self, x_TK: Tensor, weight: Packed, bias: Tensor | None = None, epilogue: Epilogue = Epilogue.PLAIN
    ) -> Tensor:
        """x @ weight.T + bias, (T, n) float32; or act(gate) * up, (T, n / 2), of a weight that `pair` made."""
        assert x_TK.dtype == torch.float32
        assert x_TK.shape[1] == weight.k
        width = weight.n if epilogue is Epilogue.PLAIN else weight.n // 2
        y = torch.empty(x_TK.shape[0], width)
        self._lib.rk_linear(
            self.handle, weight.kind, weight.integer, weight.address, 0 if bias is None else bias.data_ptr(), epilogue,
            weight.n, weight.k, x_TK.data_ptr(), x_TK.stride(0), x_TK.shape[0], y.data_ptr(), y.stride(0),
        )  # fmt: skip
        return y

    def pack_experts(
        self, weights: ExpertWeights, input_scaled: bool = False, *, integer: bool = False
    ) -> PackedExperts:
        """Pack experts; for `integer` see `pack`."""
        count, width, inner = weights.down_PDI.shape
        integer = integer and weights.down_PDI.dtype != torch.float32
        gate_up, first = self._pack_all(count, lambda i: pair(*weights.gate_up_PFD[i].chunk(2)), None, None, integer)
        down, second = self._pack_all(count, lambda i: weights.down_PDI[i], None, None, integer)
        biases: list[Tensor | None] = [None, None]
        if weights.gate_up_bias_PF is not None and weights.down_bias_PD is not None:
            turns = [
                pair(*(half.unsqueeze(1) for half in row.float().chunk(2)))[:, 0] for row in weights.gate_up_bias_PF
            ]
            biases = [torch.stack(turns), weights.down_bias_PD.to(torch.float32, copy=True)]
        fields = ExpertSet(
            count, width, inner, first.kind, first.integer, second.kind, second.integer,
            EPILOGUES[weights.activation], input_scaled, gate_up.data_ptr(), down.data_ptr(),
            *(None if bias is None else bias.data_ptr() for bias in biases), weights.alpha, weights.limit,
        )  # fmt: skip
        return PackedExperts(gate_up, down, *biases, fields)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: PackedExperts) -> Tensor:
        """See `experts.experts`: (T, D) float32, of float32 rows."""
        assert x_TD.dtype == weights_TK.dtype == torch.float32
        assert ids_TK.dtype == torch.int64
        ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
        y_TD = torch.empty(len(x_TD), packed.fields.width)
        self._lib.rk_experts(
            self.handle, ctypes.byref(packed.fields), x_TD.data_ptr(), x_TD.stride(0), *ids_TK.shape,
            ids_TK.data_ptr(), weights_TK.data_ptr(), y_TD.data_ptr(), y_TD.stride(0),
        )  # fmt: skip
        return y_TD

    def argmax(self, x_RV: Tensor) -> Tensor:
        """The first of the largest entries of each row, (R) int64."""
        assert x_RV.dtype == torch.float32
        out = torch.empty(len(x_RV), dtype=torch.int64)
        self._lib.rk_argmax(self.handle, x_RV.data_ptr(), x_RV.stride(0), x_RV.shape[0], x_RV.shape[1], out.data_ptr())
        return out

    def best_columns(self, x_TK: Tensor, weight: Packed) -> Tensor:
        """For each row, `argmax` of its products with `weight`, which are not kept: (T) int64."""
        assert x_TK.dtype == torch.float32
        out = torch.from_numpy(np.empty(len(x_TK), np.int64))
        self._lib.rk_best_columns(
            self.handle, weight.kind, weight.integer, weight.address, weight.n, weight.k, x_TK.data_ptr(),
            x_TK.stride(0), len(x_TK), out.data_ptr(),
        )  # fmt: skip
        return out

    def choose(self, logits_RV: Tensor, draws: Draws) -> Tensor:
        """See `sampling.choose`."""
        assert logits_RV.dtype == torch.float32
        rows = len(logits_RV) if draws.at is None else len(draws.at)
        out = torch.empty(rows, dtype=torch.int64)
        self._lib.rk_choose(
            self.handle, logits_RV.data_ptr(), logits_RV.stride(0), rows, logits_RV.shape[1],
            0 if draws.at is None else draws.at.ctypes.data, draws.temperature.ctypes.data,
            draws.min_p.ctypes.data, draws.top_k.ctypes.data, draws.top_p.ctypes.data, draws.key.ctypes.data,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def restrict(self, logits_RV: Tensor, at_N: npt.NDArray[np.int64], bits_NW: npt.NDArray[np.int32]) -> None:
        """See `sampling.restrict`."""
        assert logits_RV.dtype == torch.float32
        assert bits_NW.shape == (len(at_N), -(-logits_RV.shape[1] // 32))
        self._lib.rk_restrict(
            self.handle, logits_RV.data_ptr(), logits_RV.stride(0), logits_RV.shape[1], len(at_N), at_N.ctypes.data,
            bits_NW.ctypes.data,
        )  # fmt: skip

    def penalise(self, logits_RV: Tensor, penalties: Penalties) -> None:
        """See `sampling.penalise`."""
        assert logits_RV.dtype == torch.float32
        p = penalties
        self._lib.rk_penalise(
            self.handle, logits_RV.data_ptr(), logits_RV.stride(0), logits_RV.shape[1], len(p.at), p.at.ctypes.data,
            p.tokens.ctypes.data, p.tokens.shape[1], p.held.ctypes.data, p.prompt.ctypes.data, p.length.ctypes.data,
            p.repetition.ctypes.data, p.frequency.ctypes.data, p.presence.ctypes.data,
        )  # fmt: skip

    def log_probabilities(
        self, logits_RV: Tensor, at_N: npt.NDArray[np.int64], tokens_N: npt.NDArray[np.int64], count: int
    ) -> LogProbabilities:
        """See `sampling.log_probabilities`."""
        assert logits_RV.dtype == torch.float32
        rows = len(at_N)
        out = LogProbabilities(
            np.empty(rows, np.float32), np.empty(rows, np.int64), np.empty((rows, count), np.int64),
            np.empty((rows, count), np.float32),
        )  # fmt: skip
        self._lib.rk_log_probabilities(
            self.handle, logits_RV.data_ptr(), logits_RV.stride(0), logits_RV.shape[1], rows, at_N.ctypes.data,
            tokens_N.ctypes.data, count, out.logprobs.ctypes.data, out.ranks.ctypes.data, out.top_ids.ctypes.data,
            out.top_values.ctypes.data,
        )  # fmt: skip
        return out

    def sampling(self) -> SamplingOps:
        """The operations of `sampling`, on these threads."""
        return SamplingOps(self.choose, self.restrict, self.penalise, self.log_probabilities)

    def run(self, program: Any, length: int, buffers: Any, widths: Any, step: Step) -> None:
        """Carry out a program's instructions on a step."""
        self._lib.rk_run(self.handle, program, length, buffers, widths, ctypes.byref(step))


def _loaded() -> Any:
    lib = library()
    assert lib is not None, "ask `library()` first"
    return lib
