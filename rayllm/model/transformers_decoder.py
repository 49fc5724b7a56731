"""Models that transformers' modelling code runs, over our paged KV cache.

The class computes a step as one sequence without a cache of its own; the attention of every layer comes to `attend`,
which writes keys and values to our cache and attends over it. Nothing else in such a class may look beyond one token.
That is tried at the start: logits of a few tokens, in two steps with another request beside them, must be those of the
class with its own attention. Products run on the compiled kernels where there are any.

Letters of shapes: T tokens of a step, D width, N query heads, G key/value heads, H head size, R rows that need logits,
V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rayllm.errors import ModelError
from rayllm.model.decoder import zeros
from rayllm.model.layers import Embedded
from rayllm.model.spec import CacheSpec
from rayllm_kernels import AttentionBatch, Ops
from rayllm_kernels.native.library import Machine, Packed
from rayllm_kernels.sampling import REFERENCE

ATTENTION = "rayllm_paged"
"""Name of our attention in transformers' registry."""
TRIED = 7
"""Tokens of the trial."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far logits may lie apart in the trial, as a share of the largest; what is wrong is far beyond."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer asks of attention."""

    q_TNH: Tensor
    k_TGH: Tensor
    v_TGH: Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks_N: Tensor | None


class _Step(Protocol):
    """Answers a step's calls, which come layer by layer."""

    def attend(self, call: _Call) -> Tensor:
        """(T, N, H)."""
        ...


_step: ContextVar[_Step] = ContextVar("rllm_step")


class _Record:
    """A step of one token that notes what the layers cache."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(self, call: _Call) -> Tensor:
        self.calls.append(call)
        return call.v_TGH.repeat_interleave(call.q_TNH.shape[1] // call.v_TGH.shape[1], dim=1)


class _Paged:
    """A step over the paged caches."""

    def __init__(self, ops: Ops, batch: AttentionBatch, caches: list[Tensor]) -> None:
        self._ops, self._batch, self._caches = ops, batch, iter(caches)

    def attend(self, call: _Call) -> Tensor:
        cache = next(self._caches)
        k_TGH, v_TGH = call.k_TGH.to(cache.dtype), call.v_TGH.to(cache.dtype)
        self._ops.write_kv(k_TGH, v_TGH, cache, self._batch.slot_mapping)
        return self._ops.paged_attention(
            call.q_TNH, cache, self._batch, call.scale, call.window, call.soft_cap, call.sinks_N
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (1, heads, T, H) to (1, T, N, H), for the step under way.

    Raises:
        NotImplementedError: the layer wants something other than causal attention over all that was, or a window of it.
    """
    if attention_mask is not None:
        raise NotImplementedError("a layer masks tokens by a rule of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotImplementedError("a layer's attention is not causal")
    if value.shape[-1] != query.shape[-1]:
        raise NotImplementedError("values are of another size than keys")
    q_TNH, k_TGH, v_TGH = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out_TNH = _step.get().attend(_Call(q_TNH, k_TGH, v_TGH, scale, sliding_window, softcap, s_aux))
    return out_TNH.unsqueeze(0), None


class TransformersDecoder:
    """Stands in for a `Decoder`: a causal language model of transformers."""

    def __init__(self, model: Any, ops: Ops, machine: Machine | None, file: str) -> None:
        """Take over a model that was made with `ATTENTION`. `file`, its config, is blamed where it does not fit.

        Without `machine` products are torch's.

        Raises:
            ModelError: the model does not attend as ours do, or has other parts than a decoder and a head.
        """
        self._model, self._ops, self._file = model, ops, file
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        self.sampling = REFERENCE if machine is None else machine.sampling()
        with torch.inference_mode():
            self._trunk, self._output, self._cache_specs = self._probe()
            wanted = self._own_logits()
            if machine is not None:
                _pack_products(model, machine)
            self._try(wanted)

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches."""
        return self._cache_specs

    def cache_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return sum(spec.bytes_per_token for spec in self._cache_specs) * block_size

    def new_caches(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Empty caches, one for each layer, to be handed to every call."""
        return [
            zeros(
                self._ops.kv_cache_shape(num_blocks, block_size, spec.kv_heads, spec.head_size, self._dtype),
                self._dtype,
                self._device,
            )
            for spec in self._cache_specs
        ]

    def __call__(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        batch: AttentionBatch,
        caches: list[Tensor],
        embedded: Embedded | None = None,
        hidden_TD: Tensor | None = None,
    ) -> Tensor:
        """Run one step: (T, D), as the class hands it to its head. There are no stages before, and no `hidden_TD`."""
        assert hidden_TD is None
        with _answering(_Paged(self._ops, batch, caches)):
            if embedded is None:
                return _hidden(self._run_trunk(token_ids_T, positions_T))
            x_TD = self._model.get_input_embeddings()(token_ids_T)
            x_TD[embedded.at_N] = embedded.rows_ND.to(x_TD)
            position_ids = positions_T.unsqueeze(0)
            return _hidden(self._trunk(inputs_embeds=x_TD.unsqueeze(0), position_ids=position_ids, use_cache=False))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, (R, V) float32, with what the class does to them."""
        rows = torch.zeros((1, len(hidden_RD)), dtype=torch.int64, device=self._device)
        with _returning(self._trunk, self._output(last_hidden_state=hidden_RD.unsqueeze(0))):
            out = self._model(input_ids=rows, use_cache=False)
        return out.logits[0].float()

    def likeliest(self, hidden_RD: Tensor) -> Tensor:
        """The first of the largest logits of each row, (R) int64."""
        return self.logits(hidden_RD).argmax(dim=-1)

    def _run_trunk(self, token_ids_T: Tensor, positions_T: Tensor) -> Any:
        return self._trunk(input_ids=token_ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False)

    def _probe(self) -> tuple[nn.Module, type[Any], list[CacheSpec]]:
        """(the module that makes the hidden states, the class of its output, what layers cache), as one token shows."""
        from transformers.utils import ModelOutput

        record, parts = _Record(), _Parts(self._model)
        one = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        try:
            with _answering(record), parts.watched():
                self._model(input_ids=one, position_ids=one, use_cache=False)
        except NotImplementedError as error:
            raise self._unfit(str(error)) from None
        layers = self._model.config.get_text_config().num_hidden_layers
        if len(record.calls) != layers:
            raise self._unfit(f"{len(record.calls)} of its {layers} layers attend by the interface of transformers")
        trunk, output = parts.called[0], parts.first_output
        if not isinstance(output, ModelOutput) or "last_hidden_state" not in output:
            raise self._unfit(f"its part {type(trunk).__name__} returns no hidden states")
        self._check_windows([call.window for call in record.calls])
        return (
            trunk,
            type(output),
            [
                CacheSpec(
                    kind="full" if call.window is None else "sliding",
                    window=call.window,
                    kv_heads=call.k_TGH.shape[1],
                    head_size=call.k_TGH.shape[2],
                    dtype=str(self._dtype).removeprefix("torch."),
                )
                for call in record.calls
            ],
        )

    def _check_windows(self, windows: list[int | None]) -> None:
        """Hold what the layers ask for against the config: some classes put windows into masks alone."""
        config = self._model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            if getattr(config, "sliding_window", None) and not any(windows):
                raise self._unfit("its layers do not tell attention of their windows")
            return
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise self._unfit(f"layers of the kind {', '.join(sorted(unknown))}")
        if [kind == "sliding_attention" for kind in kinds] != [window is not None for window in windows]:
            raise self._unfit("its layers do not tell attention of their windows")

    def _own_logits(self) -> Tensor:
        """Logits after the tokens of the trial, with the class's own attention."""
        config = self._model.config
        config._attn_implementation = "eager"
        try:
            return self._model(input_ids=self._trial_tokens().unsqueeze(0), use_cache=False).logits[0].float()
        finally:
            config._attn_implementation = ATTENTION

    def _trial_tokens(self) -> Tensor:
        size = self._model.config.get_text_config().vocab_size
        return torch.arange(1, TRIED + 1, device=self._device) * (size - 1) // (TRIED + 1)

    def _try(self, wanted_TV: Tensor) -> None:
        """Compute the tokens of the trial in two steps, beside others, and hold the logits against `wanted_TV`."""
        tokens_T, size = self._trial_tokens(), 16
        caches, cut = self.new_caches(4, size), TRIED // 2
        got = []
        for begin, end in ((0, cut), (cut, TRIED)):
            # A request of two tokens stands before the one that is tried.
            counts = np.array([0, 2, 2 + end - begin], np.int32)
            place = np.arange(begin, end)
            batch = AttentionBatch.from_numpy(
                counts, np.array([2, end], np.int32), np.array([[3], [1]], np.int32),
                np.concatenate((3 * size + np.arange(2), size + place)), self._device,
            )  # fmt: skip
            ids = torch.cat((tokens_T[-2:], tokens_T[begin:end]))
            positions = torch.from_numpy(np.concatenate((np.arange(2), place))).to(self._device)
            got.append(self.logits(self(ids, positions, batch, caches)[2:]))
        # Of most tokens: in 16 bits rounding may send a single one to other experts.
        off = (torch.cat(got) - wanted_TV).abs().amax(1).median() / wanted_TV.abs().max().clamp(min=1e-6)
        if not off <= TOLERANCE[self._dtype]:
            raise self._unfit(f"over a paged cache its logits come out otherwise (by {off:.1%} of the largest)")

    def _unfit(self, reason: str) -> ModelError:
        return ModelError(
            self._file, f"{type(self._model).__name__} of transformers cannot be run over a paged cache: {reason}"
        )


class _Parts:
    """Notes which modules a model itself calls, not those that its parts call, and what the first returns."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._depth = model, 0
        self.called: list[nn.Module] = []
        self.first_output: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it runs once."""
        hooks = []
        for module in self._model.modules():
            if module is not self._model:
                hooks += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._depth == 0:
            self.called.append(module)
        self._depth += 1

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and len(self.called) == 1:
            self.first_output = output


@contextmanager
def _answering(step: _Step) -> Iterator[None]:
    """Have `step` answer the calls of attention."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


@contextmanager
def _returning(module: nn.Module, out: Any) -> Iterator[None]:
    """Have a module return this and compute nothing."""
    forward: Callable[..., Any] = module.forward
    module.forward = lambda *_, **__: out
    try:
        yield
    finally:
        module.forward = forward


def _hidden(out: Any) -> Tensor:
    states: Tensor = out[0]
    return states[0]


class _Product(nn.Module):
    """A linear layer whose matrix the kernels hold packed: a row's products depend on no other row."""

    def __init__(self, machine: Machine, weight_ED: Tensor, bias_E: Tensor | None) -> None:
        super().__init__()
        self._machine = machine
        self._packed: Packed = machine.pack(weight_ED.detach())
        self._bias = None if bias_E is None else bias_E.detach().float().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        return self._machine.linear(rows, self._packed, self._bias).view(*x.shape[:-1], -1).to(x.dtype)


def _pack_products(model: nn.Module, machine: Machine) -> None:
    """Put packed products in the place of linear layers, whose weights are freed."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                setattr(parent, name, _Product(machine, module.weight, module.bias))
            elif type(module) is Conv1D:
                setattr(parent, name, _Product(machine, module.weight.T, module.bias))
