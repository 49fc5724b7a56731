"""The resolved settings of one engine: plain values, frozen, nothing left to decide but the number of KV blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayllm.config.kv_cache import KvCacheSettings
from rayllm.config.model_facts import ModelFacts
from rayllm.config.parallel import ParallelSettings
from rayllm.config.weights import WeightsConfig
from rayllm.kv.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerSettings:
    """What profiles of the workers hold, and where they go. Iterations are steps of the engine."""

    folder: str
    stack: bool = True
    flops: bool = False
    gzip: bool = True
    shapes: bool = False
    memory: bool = False
    delay_iterations: int = 0
    """Passed over after the start."""
    max_iterations: int = 0
    """After so many a profile ends by itself; 0: it does not."""
    wait_iterations: int = 0
    """With these or the warm-up set: passed over, then recorded and thrown away, then kept."""
    warmup_iterations: int = 0
    active_iterations: int = 5


@dataclass(frozen=True, slots=True)
class StructuredSettings:
    """How outputs are held to a form, where requests do not say."""

    backend: str = "auto"
    """Library: `auto`, `guidance`, `xgrammar` or `outlines`."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    """Whether the form holds for the reasoning too, not just for what follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine and its workers need to know. Made by `rayllm.config.resolve`, never edited."""

    model: ModelFacts
    model_impl: str = "rayllm"
    """Whose implementation runs the model: `rayllm` or `transformers`."""
    code: str | None = None
    """Folder with modelling code of the model's own that may be run; None: none may."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    device: str = "cpu"
    attention_backend: str = "auto"
    cascade_attention: bool = False
    """Whether attention over a prefix that requests share may be computed once for all of them."""
    op_priority: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"rms_norm": ("native", "torch")})
    """For some operations the implementations to try, in order."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    kv_cache: KvCacheSettings = field(default_factory=KvCacheSettings)
    max_model_len: int
    """Prompt and output of one request together, in tokens."""
    max_num_seqs: int = 256
    """Requests in one step."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step."""
    max_waiting: int = 4096
    """Requests that may wait; more are refused."""
    block_size: int = 16
    """Tokens in a KV block."""
    kv_layout: KVLayout = field(default_factory=KVLayout)
    """Which layers share blocks, and which of them keep a window only."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache; None takes a share of the memory that is free."""
    num_blocks: int | None = None
    """KV blocks, whatever memory they take; None derives them from bytes."""
    memory_share: float = 0.4
    """Share of free memory for KV, where no bytes are given, divided among `engines_on_host`."""
    memory_share_given: bool = False
    """Whether the user set the share; else it is cut to what is of use."""
    engines_on_host: int = 1
    enable_prefix_caching: bool = True
    prompt_embeds: bool = False
    """Whether prompts may come as embeddings."""
    scheduling_policy: str = "fcfs"
    """`fcfs` or `priority`."""
    async_scheduling: bool = True
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    threads: int | None = None
    """Threads for products; None takes what the machine has, divided among `engines_on_host`."""
    logits_processors: tuple[str, ...] = ()
    """Classes to load, as `module:Class`."""
    seed: int = 0
    kv_metrics_sample: float = 0.0
    """Share of the KV blocks whose residency is measured."""
    estimate_work: bool = False
    """Whether arithmetic and memory traffic are estimated."""
    weight_bytes: int = 0
    """Size of the weights on disk."""
    profiler: ProfilerSettings | None = None
    """None: workers cannot be profiled."""
    log_iterations: bool = False
    """Whether the engine logs a line for each step."""
    chunked_prefill: bool = True
    """Whether prompts may be computed in pieces; if not, a step holds any request of `max_model_len` tokens."""
    max_partial_prefills: int = 1
    """Prompts that may be computed in part at once."""
    max_long_partial_prefills: int = 1
    """How many of these may be longer than `long_prefill_tokens`."""
    long_prefill_tokens: int = 0
    reserve_whole_prompt: bool = True
    """Whether a request starts only when all its tokens fit into the KV cache, not just its first piece."""
    prefix_hash: str = "sha256"
    """Hash of prefixes: `sha256`, `sha256_cbor`, `xxhash` or `xxhash_cbor`."""
    worker_cls: str | None = None
    """Worker as `module:Class`; None is our own."""
    worker_extension_cls: str | None = None
    """Class whose methods workers get too, as `module:Class`."""
    logprobs_mode: str = "raw_logprobs"
    """`raw` or `processed`, `_logprobs` or `_logits`: what is reported beside tokens."""
    stream_interval: int = 1
    """Tokens between two outputs of a request; the first and the last are sent at once."""
    tokenizer: str | None = None
    """Where the tokenizer is, which only structured outputs need here."""
    structured: StructuredSettings = field(default_factory=StructuredSettings)
    scheduler_cls: str | None = None
    """Scheduler as `module:Class`; None is our own."""
