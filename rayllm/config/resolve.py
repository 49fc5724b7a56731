"""From option values, the model's facts and the machine to the frozen settings of engines and service. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from rayllm.config.data_parallel import data_parallel_notes, resolve_data_parallel
from rayllm.config.engine import EngineConfig
from rayllm.config.files import Files
from rayllm.config.hardware import Hardware
from rayllm.config.kernel_choice import (
    check_moe_backend,
    kernel_notes,
    resolve_attention_backend,
    resolve_op_priority,
)
from rayllm.config.kv_cache import KvCacheSettings, head_bytes, kv_cache_notes, resolve_kv_cache
from rayllm.config.model_facts import ModelFacts
from rayllm.config.model_impl import TRANSFORMERS, resolve_model_impl
from rayllm.config.observability import (
    kv_metrics_sample,
    observability_notes,
    profiler_settings,
)
from rayllm.config.parallel import parallel_notes, resolve_parallel
from rayllm.config.registry import Values
from rayllm.config.resolve_serve import resolve_serve
from rayllm.config.serve import ServeSettings
from rayllm.config.structured import structured_settings
from rayllm.config.weights import resolve_weights, weight_notes
from rayllm.errors import ConfigError
from rayllm.kv.layout import KVLayout, group_layers
from rayllm.model.families import FAMILIES, spec_of

DTYPE_NAMES = {"half": "float16", "float": "float32"}
DEFAULT_BLOCK_SIZE = 16
DEFAULT_STEPS = {"interactivity": (128, 64), "balanced": (512, 256), "throughput": (2048, 1024)}
"""Tokens and requests of a step on a CPU, by --performance-mode.

Every request waits for the whole step, whose time grows with its tokens: 512 keep it below a second or so, and products
are near their best speed; a quarter keeps others waiting a quarter as long, at the price of reading the weights four
times as often for a long prompt; four times as many read them least.
"""
LONG_SHARE = 0.04
"""Of --max-model-len: a longer prompt is long, where --long-prefill-token-threshold does not say otherwise."""
AUTO_MARGIN = 0.8
"""What --max-model-len auto counts on of the memory free now: Ray and the service come up before the engine."""
CPU_MEMORY_SHARE = 0.4
"""Share of a host's free memory that goes to KV at the default --gpu-memory-utilization; other values scale it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A service, ready to be started."""

    engine: EngineConfig
    serve: ServeSettings
    notes: tuple[str, ...] = ()
    """What the user should know: options without effect, or that are about to go."""
    plan: tuple[str, ...] = ()
    """What was decided and why, in words."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What a KV cache may take, and what it is made of."""

    free: int
    """Bytes."""
    block_size: int
    dtype: str
    kv_cache: KvCacheSettings
    layout: KVLayout


def resolve(
    values: Values,
    facts: ModelFacts,
    hardware: Hardware,
    files: Files,
    api_key: str | None = None,
    dev_mode: bool = False,
) -> Resolved:
    """Decide everything that options leave open.

    `api_key` is one more key beside those of `--api-key`; `dev_mode` is that of `FrontendSettings`.

    Raises:
        ConfigError: options contradict one another, the model or the machine.
    """
    engine = resolve_engine(values, facts, hardware, files)
    serve = resolve_serve(values, facts, engine, files, api_key, dev_mode)
    notes = (*weight_notes(values, engine), *kernel_notes(values, facts), *_notes(values, engine))
    return Resolved(engine=engine, serve=serve, notes=notes)


def resolve_engine(values: Values, facts: ModelFacts, hardware: Hardware, files: Files | None = None) -> EngineConfig:
    """The settings of each engine.

    Raises:
        ConfigError: options contradict one another, the model or the machine.
    """
    files = files or Files()
    check_moe_backend(values["moe-backend"])
    group = resolve_data_parallel(values)
    engines = group.engines_on_host
    parallel = resolve_parallel(values, hardware)
    dtype = _dtype(values["dtype"], facts)
    block_size = values["block-size"] or DEFAULT_BLOCK_SIZE
    if DEFAULT_BLOCK_SIZE % block_size and block_size % DEFAULT_BLOCK_SIZE:
        raise ConfigError("--block-size", f"{block_size} is no divisor and no multiple of 16", "choose 16 or 32")
    share = CPU_MEMORY_SHARE * values["gpu-memory-utilization"] / 0.92
    blocks = values["num-gpu-blocks-override"]
    # With no size given, weights and KV come out of the same free memory.
    kv_free = int(AUTO_MARGIN * share * max(0, hardware.memory / engines - files.weight_bytes))
    kv_cache = resolve_kv_cache(values, facts)
    model_impl = resolve_model_impl(values, facts)
    layout = KVLayout() if model_impl == TRANSFORMERS else _kv_layout(values, facts, kv_cache)
    room = _Room(kv_free, block_size, dtype, kv_cache, layout)
    max_model_len = _max_model_len(values, facts, room)
    step_tokens = _batched_tokens(values, max_model_len)
    if blocks is not None:
        fits = layout.longest(blocks, step_tokens, block_size, max_model_len)
        if fits < max_model_len:
            raise ConfigError(
                "--num-gpu-blocks-override",
                f"{blocks} blocks of {block_size} tokens cannot hold a request of {max_model_len} tokens",
                f"raise it, or lower --max-model-len to {fits}",
            )
    return EngineConfig(
        model=facts,
        model_impl=model_impl,
        code=files.code,
        dtype=dtype,
        device="cpu",
        attention_backend=resolve_attention_backend(values),
        cascade_attention=_cascade_attention(values, facts),
        op_priority=resolve_op_priority(values),
        weights=resolve_weights(values, facts, hardware, files),
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        max_num_seqs=values["max-num-seqs"] or DEFAULT_STEPS[values["performance-mode"]][1],
        max_num_batched_tokens=step_tokens,
        block_size=block_size,
        kv_layout=layout,
        kv_cache_memory_bytes=values["kv-cache-memory-bytes"],
        num_blocks=blocks,
        memory_share=min(share, 0.9),
        memory_share_given="gpu-memory-utilization" in values.given,
        engines_on_host=engines,
        enable_prefix_caching=values["enable-prefix-caching"] is not False,
        prompt_embeds=_prompt_embeds(values, facts),
        scheduling_policy=values["scheduling-policy"],
        async_scheduling=values["async-scheduling"] is not False,
        threads=max(1, hardware.cpus // engines),
        parallel=parallel,
        logits_processors=tuple(_class_path("--logits-processors", name) for name in values["logits-processors"] or ()),
        data_parallel_size=group.size,
        data_parallel_rank=group.first,
        seed=values["seed"],
        kv_metrics_sample=kv_metrics_sample(values),
        estimate_work=values["enable-mfu-metrics"],
        weight_bytes=files.weight_bytes,
        profiler=profiler_settings(values),
        log_iterations=values["enable-logging-iteration-details"],
        chunked_prefill=values["enable-chunked-prefill"] is not False,
        max_partial_prefills=values["max-num-partial-prefills"],
        max_long_partial_prefills=values["max-long-partial-prefills"],
        long_prefill_tokens=_long_prefill_tokens(values, max_model_len),
        reserve_whole_prompt=values["scheduler-reserve-full-isl"],
        prefix_hash=values["prefix-caching-hash-algo"],
        worker_cls=None if values["worker-cls"] == "auto" else _class_path("--worker-cls", values["worker-cls"]),
        worker_extension_cls=_optional_class("--worker-extension-cls", values["worker-extension-cls"]),
        logprobs_mode=values["logprobs-mode"],
        stream_interval=values["stream-interval"],
        tokenizer=None if values["skip-tokenizer-init"] else files.tokenizer or facts.path,
        structured=structured_settings(values),
        scheduler_cls=_optional_class("--scheduler-cls", values["scheduler-cls"]),
    )


def _batched_tokens(values: Values, max_model_len: int) -> int:
    wanted, usual = values["max-num-batched-tokens"], DEFAULT_STEPS[values["performance-mode"]][0]
    if values["enable-chunked-prefill"] is not False:
        return wanted or usual
    if wanted is not None and wanted < max_model_len:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{wanted} tokens in a step do not hold a request of {max_model_len} tokens, and "
            "--no-enable-chunked-prefill forbids to cut it",
            f"raise it, lower --max-model-len to {wanted}, or allow chunks",
        )
    return wanted or max(usual, max_model_len)


def _long_prefill_tokens(values: Values, max_model_len: int) -> int:
    """From how many tokens on a prompt is long, after the limits on prompts in pieces were checked."""
    partial, long = values["max-num-partial-prefills"], values["long-prefill-token-threshold"]
    if partial > 1 and values["enable-chunked-prefill"] is False:
        raise ConfigError(
            "--max-num-partial-prefills", "prompts in pieces need chunked prefill", "drop --no-enable-chunked-prefill"
        )
    if values["max-long-partial-prefills"] > partial:
        raise ConfigError(
            "--max-long-partial-prefills",
            f"{values['max-long-partial-prefills']} is more than --max-num-partial-prefills, {partial}",
            "lower it, or raise the other",
        )
    if long > max_model_len:
        raise ConfigError(
            "--long-prefill-token-threshold", f"{long} is more than --max-model-len, {max_model_len}", "lower it"
        )
    return long or int(LONG_SHARE * max_model_len)


def _has_windows(facts: ModelFacts) -> bool:
    """Whether layers may have windows: else the model's own description need not be read."""
    return facts.windows and bool(facts.config.get("sliding_window"))


def _kv_layout(values: Values, facts: ModelFacts, kv_cache: KvCacheSettings) -> KVLayout:
    """How layers share KV blocks: alike, unless some have a window that is smaller than the context."""
    if values["disable-hybrid-kv-cache-manager"] or not _has_windows(facts) or kv_cache.mixes_types:
        return KVLayout()
    wanted = values["max-model-len"]
    return group_layers(spec_of(facts).windows, wanted if wanted and wanted > 0 else facts.max_model_len)


def _prompt_embeds(values: Values, facts: ModelFacts) -> bool:
    if values["enable-prompt-embeds"] and not isinstance(facts.config.get("hidden_size"), int):
        raise ConfigError(
            "--enable-prompt-embeds", "needs hidden_size, which this model's config does not have", "leave it out"
        )
    return bool(values["enable-prompt-embeds"])


def _cascade_attention(values: Values, facts: ModelFacts) -> bool:
    if values["disable-cascade-attn"]:
        return False
    if _has_windows(facts) and None not in spec_of(facts).windows:
        raise ConfigError(
            "--no-disable-cascade-attn", "every layer of the model has a window, and sees no prefix", "leave it out"
        )
    if resolve_attention_backend(values) == "torch":
        option = "--attention-backend torch" if values["attention-backend"] else "-O0"
        raise ConfigError("--no-disable-cascade-attn", f"{option} computes each request by itself", "drop one of them")
    if values["ir-op-priority"]["rms_norm"][:1] == ["torch"]:
        raise ConfigError(
            "--no-disable-cascade-attn", "with norms by torch each request is computed by itself", "drop one of them"
        )
    return True


def _notes(values: Values, engine: EngineConfig) -> Iterator[str]:
    yield from observability_notes(values)
    yield from kv_cache_notes(values)
    yield from parallel_notes(values)
    yield from data_parallel_notes(values)
    yield from _without_effect(values)
    if values["long-prefill-token-threshold"] and values["max-num-partial-prefills"] == 1:
        yield (
            "--long-prefill-token-threshold has no effect: only one prompt at a time is computed in pieces; "
            "raise --max-num-partial-prefills"
        )
    if engine.cascade_attention and not engine.enable_prefix_caching:
        yield "--no-disable-cascade-attn has no effect: without prefix caching requests share no blocks"
    if engine.kv_cache.mixes_types and _has_windows(engine.model) and not values["disable-hybrid-kv-cache-manager"]:
        yield (
            "--kv-cache-dtype-skip-layers makes layers with a window keep all tokens: layers of different types share "
            "no blocks"
        )
    elif values["disable-hybrid-kv-cache-manager"] is False and not engine.kv_layout.sliding:
        yield (
            "--no-disable-hybrid-kv-cache-manager has no effect: no layer has a window that is smaller than the "
            "context, so that all of them keep all tokens"
        )


def _without_effect(values: Values) -> Iterator[str]:
    """Notes about options that the others leave nothing to do."""
    for option, without in (
        ("max-log-len", "enable-log-requests"),
        ("enable-log-deltas", "enable-log-outputs"),
        ("tool-call-parser", "enable-auto-tool-choice"),
        ("tool-parser-plugin", "tool-call-parser"),
        ("reasoning-parser-plugin", "reasoning-parser"),
    ):
        if option in values.given and not values[without]:
            yield f"--{option} has no effect without --{without}"
    for option, winner in (
        ("host", "uds"),
        ("port", "uds"),
        ("disable-access-log-for-endpoints", "disable-uvicorn-access-log"),
        ("kv-cache-memory-bytes", "num-gpu-blocks-override"),
        ("gpu-memory-utilization", "num-gpu-blocks-override"),
        ("gpu-memory-utilization", "kv-cache-memory-bytes"),
    ):
        if option in values.given and values[winner]:
            yield f"--{option} has no effect with --{winner}"
    if "prefix-caching-hash-algo" in values.given and values["enable-prefix-caching"] is False:
        yield "--prefix-caching-hash-algo has no effect with --no-enable-prefix-caching"
    if values["aggregate-engine-logging"] and values["disable-log-stats"]:
        yield "--aggregate-engine-logging has no effect with --disable-log-stats"


def _dtype(wanted: str, facts: ModelFacts) -> str:
    if wanted != "auto":
        return DTYPE_NAMES.get(wanted, wanted)
    # A CPU has bfloat16 products and hardly any for float16; the range of bfloat16 covers that of float16.
    return "bfloat16" if facts.dtype == "float16" else facts.dtype


def _max_model_len(values: Values, facts: ModelFacts, room: _Room) -> int:
    wanted = values["max-model-len"]
    if wanted is None:
        return facts.max_model_len
    if wanted > facts.max_model_len:
        raise ConfigError(
            "--max-model-len",
            f"{wanted} is more than the {facts.max_model_len} tokens that the model's positions allow",
            "lower it",
        )
    if wanted != -1:
        return int(wanted)
    blocks = values["num-gpu-blocks-override"]
    if blocks is None:
        if not facts.config.keys() >= {"num_attention_heads", "hidden_size", "num_hidden_layers"}:
            raise ConfigError("--max-model-len", f"{facts.config_file} does not state all sizes", "give a number")
        layers = int(facts.config["num_hidden_layers"])
        share = kv_bytes_per_token(facts, room.dtype, room.kv_cache) * len(room.layout.largest(layers)) // layers
        blocks = (values["kv-cache-memory-bytes"] or room.free) // (share * room.block_size)
    whole = values["enable-chunked-prefill"] is False
    step_tokens = facts.max_model_len if whole else _batched_tokens(values, 0)
    fits = room.layout.longest(blocks, step_tokens, room.block_size, facts.max_model_len)
    if fits < 1:
        raise ConfigError("--max-model-len", "no length fits into the KV cache", "give --kv-cache-memory-bytes")
    return fits


def kv_bytes_per_token(facts: ModelFacts, dtype: str, kv_cache: KvCacheSettings) -> int:
    """Bytes of keys and values of one token over all layers, where each keeps it."""
    config = facts.config
    if "kv_lora_rank" in config and facts.architecture in FAMILIES and (spec := spec_of(facts)).mla is not None:
        return sum(head_bytes(kv_cache.of_layer(i, None, dtype), spec.head_size) for i in range(spec.num_layers))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    window = 1 if _has_windows(facts) else None  # any layer may have one, and keep the model's dtype for that
    stored = (kv_cache.of_layer(i, window, dtype) for i in range(int(config["num_hidden_layers"])))
    return 2 * int(heads) * sum(head_bytes(name, int(head_size)) for name in stored)


def _class_path(option: str, name: str) -> str:
    """`package.module:Class` for either spelling of a qualified name."""
    if ":" in name:
        return name
    module, dot, cls = name.rpartition(".")
    if not dot:
        raise ConfigError(option, f"{name!r} names no module", "write module:Class")
    return f"{module}:{cls}"


def _optional_class(option: str, name: str | None) -> str | None:
    return _class_path(option, name) if name else None
