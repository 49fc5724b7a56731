"""Angles of the rotary position encoding, with the ways to stretch it.

Sources: RoPE (Su et al., 2021); linear position interpolation (Chen et al., 2023); NTK-aware scaling (bloc97 and
emozilla, 2023), here `dynamic`; YaRN (Peng et al., 2023); LongRoPE (Ding et al., 2024); the frequency bands of
Llama 3.1, here `llama3`.

Frequencies are fixed when a model is loaded, by the longest context that will be served. So keys in the cache never
go stale, and a token's result cannot depend on who shares its batch.
"""

import math

import torch
from torch import Tensor, nn

from rayllm.model.spec import RopeSpec

TABLE_BYTES = 64 << 20
"""Most memory for the angles of all positions, which are looked up instead of computed."""


class Rope(nn.Module):
    """Cosines and sines of one `RopeSpec`."""

    def __init__(self, spec: RopeSpec, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        inverse, self.magnitude = frequencies(spec, max_model_len)
        self.register_buffer("inverse_R", inverse.to(device), persistent=False)
        positions = max_model_len + 1  # a step in flight may pass the end of a request
        small = positions * spec.size * 4 <= TABLE_BYTES
        table = self._compute(torch.arange(positions, device=device)) if small else None
        self.register_buffer("table_PR", table, persistent=False)

    def forward(self, positions_T: Tensor) -> Tensor:
        """(T, R) float32, contiguous: R / 2 cosines, then R / 2 sines, of each position's angles."""
        if self.table_PR is not None:
            return self.table_PR.index_select(0, positions_T)
        return self._compute(positions_T)

    def _compute(self, positions_T: Tensor) -> Tensor:
        angles_TR = positions_T.float().unsqueeze(1) * self.inverse_R
        cos_sin_TR = torch.cat((angles_TR.cos(), angles_TR.sin()), dim=-1)
        return cos_sin_TR if self.magnitude == 1.0 else cos_sin_TR * self.magnitude


def frequencies(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position of each pair of entries, (R / 2) float32, and a factor for cosines and sines."""
    return _KINDS[spec.kind](spec, max_model_len)


def _plain(theta: float, size: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2).float() / size)


def _number(spec: RopeSpec, name: str, default: float | None = None) -> float:
    value = spec.values.get(name)
    value = default if value is None else value
    assert isinstance(value, int | float), (spec.kind, name, value)
    return value


def _default(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(spec.theta, spec.size), 1.0


def _linear(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(spec.theta, spec.size) / _number(spec, "factor"), 1.0


def _factors(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(spec.theta, spec.size) / torch.tensor(spec.values["factors"], dtype=torch.float32), 1.0


def _dynamic(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """A larger base, just large enough for the longest context served; as trained if that is short enough."""
    factor, trained = _number(spec, "factor"), spec.trained_positions
    stretch = factor * max(max_model_len, trained) / trained - (factor - 1)
    return _plain(spec.theta * stretch ** (spec.size / (spec.size - 2)), spec.size), 1.0


def _llama3(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Slow frequencies divided by the factor, fast ones kept, those between blended by turns in the old context."""
    plain = _plain(spec.theta, spec.size)
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    turns = _number(spec, "original_max_position_embeddings") / (2 * math.pi / plain)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / _number(spec, "factor") + kept * plain, 1.0


def _yarn(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Interpolated below one number of turns in the trained context, kept above another, a ramp between."""
    trained = _number(spec, "original_max_position_embeddings")
    factor = _number(spec, "factor", spec.trained_positions / trained)
    plain = _plain(spec.theta, spec.size)

    def index_of(turns: float) -> float:
        return spec.size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = index_of(_number(spec, "beta_fast", 32)), index_of(_number(spec, "beta_slow", 1))
    if spec.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.size - 1)
    width = last - first or 0.001
    interpolated = ((torch.arange(spec.size // 2).float() - first) / width).clamp(0.0, 1.0)
    return plain / factor * interpolated + plain * (1 - interpolated), _yarn_magnitude(spec, factor)


def _yarn_magnitude(spec: RopeSpec, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if spec.values.get("attention_factor") is not None:
        return _number(spec, "attention_factor")
    if spec.values.get("mscale") and spec.values.get("mscale_all_dim"):
        return scale(_number(spec, "mscale")) / scale(_number(spec, "mscale_all_dim"))
    return scale(1.0)


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """A divisor for each frequency: one list for contexts up to the trained one, another for longer ones."""
    trained = _number(spec, "original_max_position_embeddings")
    name = "long_factor" if max_model_len > trained else "short_factor"
    divisors = torch.tensor(spec.values[name], dtype=torch.float32)
    factor = _number(spec, "factor", spec.trained_positions / trained)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return _plain(spec.theta, spec.size) / divisors, _number(spec, "attention_factor", magnitude)


_KINDS = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
KINDS = frozenset(_KINDS)
