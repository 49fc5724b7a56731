"""One rank: the model, its KV cache, the state of the batch, and the step that brings them together."""

import logging
import os
import time
from typing import Any

import numpy as np
import torch

from rayllm.config.engine import EngineConfig
from rayllm.errors import ConfigError
from rayllm.messages.ingress import TokenLogprobs
from rayllm.messages.worker import StepPlan, StepResult
from rayllm.model.compiled import KEPT_KINDS, CompiledDecoder
from rayllm.model.decoder import Decoder
from rayllm.model.division import check_undivided
from rayllm.model.loader import load_model, needs_of
from rayllm.model.transformers_decoder import TransformersDecoder
from rayllm.parallel.meeting import Place
from rayllm.parallel.ranks import Ranks
from rayllm.structured.grammar import Vocabulary
from rayllm.structured.store import Grammars
from rayllm.worker.batch import Batch, Rows, RowState, StepInputs
from rayllm.worker.memory import available_memory, default_kv_bytes, populate
from rayllm.worker.processors import load_processors, used_by_all
from rayllm.worker.profile import Profile
from rayllm.worker.sampler import Sampled, Sampler, can_wait, forbidden
from rayllm_kernels import choose, explain
from rayllm_kernels.native.library import library
from rayllm_kernels.native.program import LayerCache

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SLICE = 128
"""Rows of logits that are held at one time for prompt log-probabilities."""


class Worker:
    """Carries out steps, in order, all on the thread that made it."""

    def __init__(self, config: EngineConfig, place: Place | None = None) -> None:
        """Load the model, or the share of it that belongs to `place`.

        Raises:
            ModelError: its files cannot be used.
            ConfigError: a logits processor cannot be loaded, there cannot be a folder for profiles, or cascade
                attention needs kernels that cannot be had here.
        """
        place = place or Place()
        self._config, self._ranks, self._pipeline = config, place.ranks, place.pipeline
        self._leads = self._ranks.last and self._ranks.tensor.rank == 0
        torch.set_num_threads(thread_count(config))
        self._device = torch.device(config.device)
        self._processors = load_processors(config.logits_processors, config.model)
        self._model = build_model(config, self._device, self._ranks)
        self.grammars = Grammars(
            config.structured, config.model.eos_token_ids, lambda: Vocabulary.load(config.tokenizer, config.model)
        )
        """Of structured outputs; may be used from any thread."""
        try:
            self._batch = Batch(
                rows=config.max_num_seqs, max_tokens=config.max_model_len, block_size=config.block_size,
                vocab_size=config.model.vocab_size, end_tokens=config.model.eos_token_ids,
                edits_all=bool(used_by_all(self._processors)), groups=config.kv_layout.width,
                cascade_groups=config.kv_layout.width - config.kv_layout.sliding if config.cascade_attention else 0,
                follow=self.grammars.follow if self._leads else lambda sampling: None,
            )  # fmt: skip
        except MemoryError as error:
            rows, tokens = config.max_num_seqs, config.max_model_len
            reason = f"there is no room for {rows} requests of --max-model-len {tokens} tokens ({error})"
            raise ConfigError("--max-num-seqs", reason, "lower one of them") from None
        self._sampler = Sampler(self._processors, self._model.sampling, config.logprobs_mode)
        self._caches: list[Any] = []
        self._profile = Profile(config.profiler) if config.profiler is not None else None

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block over all layers of a group."""
        return self._model.cache_bytes(self._config.block_size)

    def available_kv_bytes(self) -> int:
        """The share of free memory that one engine may take for its cache, on this host."""
        return default_kv_bytes(self._config, available_memory(), self.kv_bytes_per_block())

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache for `num_blocks` blocks."""
        self._caches = self._model.new_caches(num_blocks, self._config.block_size)
        if self._device.type == "cpu":
            parts = {tensor.data_ptr(): tensor for cache in self._caches for tensor in parts_of(cache)}
            populate(parts.values())  # groups of layers share them

    def logits_processor_names(self) -> frozenset[str]:
        """Names of the loaded logits processors."""
        return frozenset(self._processors)

    def profile(self, begin: bool) -> None:
        """Begin a profile, or end it and write its trace.

        Raises:
            OSError: it cannot be written.
        """
        assert self._profile is not None, "not configured"
        if begin:
            self._profile.start()
        else:
            self._profile.stop()

    def shutdown(self) -> None:
        """End the threads that compile grammars."""
        self.grammars.shutdown()

    def note_sampled(self, rows: list[int], token_ids: list[int]) -> None:
        """Append tokens that the last stage sampled to their rows, on a stage before it."""
        if rows and not self._ranks.last:
            self._batch.append(np.array(rows), token_ids)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step and append the sampled tokens to their rows. None on ranks that do not choose tokens."""
        if self._profile is None:
            return self._execute(plan)
        return self._profile.step(sum(plan.counts), lambda: self._execute(plan))

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult | None:
        began = time.perf_counter()
        self._batch.apply(plan)
        inputs = self._batch.inputs(plan, self._device)
        ready = time.perf_counter()
        incoming_TD = None
        if self._pipeline is not None and not self._ranks.first:
            incoming_TD = self._pipeline.receive(len(inputs.token_ids), self._model.spec.hidden_size)
        hidden_TD = self._model(
            inputs.token_ids, inputs.positions, inputs.attention, self._caches, inputs.embedded, incoming_TD
        )
        model_s = time.perf_counter() - ready
        if self._pipeline is not None and not self._ranks.last:
            self._pipeline.send(hidden_TD)
            self._batch.advance(inputs)
            return None
        prompt = self._prompt_logprobs(inputs, hidden_TD)
        self._batch.advance(inputs)
        cascade = inputs.attention.shared is not None
        sampled = Sampled([])
        if len(inputs.sampled_rows):
            every = len(inputs.sampled_rows) == len(hidden_TD)
            sampled = self._sample(inputs.sampled_rows, hidden_TD if every else hidden_TD[inputs.sampled_positions])
            self._batch.append(inputs.sampled_rows, sampled.token_ids)
        if not self._leads:
            return None
        rows: list[int] = inputs.sampled_rows.tolist()
        return StepResult(
            rows, sampled.token_ids, {rows[i]: entry for i, entry in sampled.logprobs.items()}, prompt,
            {rows[i]: why for i, why in sampled.failed.items()}, (model_s, time.perf_counter() - began),
            cascade,
        )  # fmt: skip

    def _sample(self, rows: Rows, hidden_RD: torch.Tensor) -> Sampled:
        """Choose tokens, the same on all ranks: the likeliest by themselves, others as the first rank has it."""
        held = self._batch.held_to_forms(rows)
        # Ranks that share a model have to ask it for the same, and the first alone knows what forms allow.
        told = not held or (self._ranks.tensor.size == 1 and all(can_wait(state) for _, state in held))
        if told and self._batch.all_plain(rows):
            return self._likeliest(rows, hidden_RD, held)
        logits_RV = self._model.logits(hidden_RD)
        sampled = Sampled([])
        if self._leads:
            sampled = self._sampler.sample(logits_RV, self._batch.sample_ask(rows))
        if self._ranks.tensor.size > 1:
            chosen = sampled.token_ids if self._leads else [0] * len(rows)
            sampled.token_ids = self._ranks.tensor.broadcast(torch.tensor(chosen)).tolist()
        return sampled

    def _likeliest(self, rows: Rows, hidden_RD: torch.Tensor, held: list[tuple[int, RowState]]) -> Sampled:
        """The likeliest tokens; logits only of rows that are held to forms which forbid theirs."""
        sampled = Sampled(self._model.likeliest(hidden_RD).tolist())
        if held and (wrong := forbidden(held, sampled.token_ids)):
            again = self._sampler.sample(self._model.logits(hidden_RD[wrong]), self._batch.sample_ask(rows[wrong]))
            for i, token in zip(wrong, again.token_ids, strict=True):
                sampled.token_ids[i] = token
            sampled.failed = {wrong[i]: why for i, why in again.failed.items()}
        return sampled

    def _prompt_logprobs(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow those computed in this step, where asked for."""
        out: dict[int, list[TokenLogprobs]] = {}
        for ask in self._batch.prompt_logprobs_wanted(inputs):
            entries: list[TokenLogprobs] = []
            for begin in range(0, len(ask.next_tokens), SLICE):
                tokens = ask.next_tokens[begin : begin + SLICE]
                at = ask.offset + begin
                logits = self._model.logits(hidden_TD[at : at + len(tokens)])
                if not self._leads:
                    continue
                wanted = None
                if self._sampler.processed:
                    wanted = self._batch.prompt_ask(ask.row, ask.position + begin, len(tokens))
                entries += self._sampler.read(logits, tokens, ask.alternatives, wanted)
            out[ask.row] = entries
        return out


Model = Decoder | CompiledDecoder | TransformersDecoder


def build_model(config: EngineConfig, device: torch.device, place: Ranks | None = None) -> Model:
    """Load the model, or the share of it that belongs to `place`, in the fastest form that this device has.

    Raises:
        ModelError: its files cannot be used.
        ConfigError: cascade attention needs kernels that cannot be had here, or the model cannot be divided so.
    """
    place = place or Ranks()
    check_undivided(config)
    norms = config.op_priority["rms_norm"]
    wanted = config.attention_backend != "torch" and norms[0] == "native"
    compiled = device.type == "cpu" and wanted and library() is not None
    if config.cascade_attention and not compiled:
        raise ConfigError(
            "--no-disable-cascade-attn", "needs the compiled CPU kernels", "install g++, or leave the option out"
        )
    if config.model_impl == "transformers":
        return _build_transformers(config, device, compiled)
    log.info("model implementation: rayllm's own, for %s", config.model.architecture)
    first = {"rms_norm": norms, "add_rms_norm": norms}
    decoder = load_model(
        config.model, DTYPES[config.dtype], device, place, weights=config.weights,
        max_model_len=config.max_model_len, keeps=KEPT_KINDS if compiled else frozenset(),
        seed=config.seed, layout=config.kv_layout, kv_cache=config.kv_cache, first=first,
    )  # fmt: skip
    if not compiled:
        choices = choose(device.type, needs_of(decoder.spec, decoder.place.dtype, config.kv_cache), first=first)
        log.info("operations for %s: %s", device.type, explain(choices))
        taken = next(choice.taken.name for choice in choices if choice.operation == "rms_norm")
        log.info("rms_norm: %s, of %s", taken, ", ".join(norms))
        return decoder
    log.info("operations for cpu: compiled kernels, attention among them; rms_norm: native, of %s", ", ".join(norms))
    # The kernels have threads of their own; torch, which does the rest, must not keep others spinning.
    torch.set_num_threads(1)
    return CompiledDecoder(decoder, thread_count(config), config.max_num_batched_tokens)


def _build_transformers(config: EngineConfig, device: torch.device, compiled: bool) -> TransformersDecoder:
    from rayllm.model.transformers_loader import load_transformers  # loads transformers, which takes seconds

    model = load_transformers(config, DTYPES[config.dtype], device, thread_count(config), compiled)
    if compiled:
        torch.set_num_threads(1)
    return model


def parts_of(cache: torch.Tensor | LayerCache) -> tuple[torch.Tensor, ...]:
    """The tensors of one layer's cache."""
    return cache.parts() if isinstance(cache, LayerCache) else (cache,)


def thread_count(config: EngineConfig) -> int:
    """Threads for products: what is set, else this machine's cores divided among its engines."""
    if config.threads is not None:
        return config.threads
    return max(1, len(os.sched_getaffinity(0)) // config.engines_on_host)
