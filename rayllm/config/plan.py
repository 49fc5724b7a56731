"""The resolved plan in words: what will run, and why where options left it open."""

from collections.abc import Iterator

from rayllm.config.hardware import Hardware
from rayllm.config.registry import Values
from rayllm.config.resolve import Resolved


def plan_lines(values: Values, resolved: Resolved, hardware: Hardware) -> Iterator[str]:
    """A line for each part of the plan, for the log."""
    engine, serve = resolved.engine, resolved.serve

    def why(option: str, otherwise: str) -> str:
        return f"as --{option} says" if option in values.given else otherwise

    stored = (
        f"stored as {engine.model.dtype}"
        if engine.dtype == engine.model.dtype
        else (f"stored as {engine.model.dtype}, which has no products on a CPU")
    )
    yield f"model {engine.model.path}: {engine.model.format}, {engine.dtype} ({why('dtype', stored)})"
    tokens = why("max-num-batched-tokens", why("performance-mode", "default on a CPU"))
    yield (
        f"context of {engine.max_model_len} tokens ({why('max-model-len', 'what the model allows')}); at most "
        f"{engine.max_num_seqs} requests ({why('max-num-seqs', why('performance-mode', 'default'))}) and "
        f"{engine.max_num_batched_tokens} tokens ({tokens}) in a step"
    )
    if engine.num_blocks is not None:
        size = f"{engine.num_blocks} blocks (as --num-gpu-blocks-override says)"
    elif engine.kv_cache_memory_bytes is not None:
        size = f"{engine.kv_cache_memory_bytes} bytes (as --kv-cache-memory-bytes says)"
    else:
        size = f"{engine.memory_share:.0%} of the free memory ({why('gpu-memory-utilization', 'default')})"
    caching = "on" if engine.enable_prefix_caching else "off"
    stored = engine.kv_cache.dtype or engine.dtype
    yield f"KV cache: {size} in blocks of {engine.block_size} tokens, as {stored}; prefix caching {caching}"
    layout = engine.kv_layout
    if layout.sliding:
        reason = why("disable-hybrid-kv-cache-manager", "default for windows shorter than the context")
        yield (
            f"KV layers: {layout.width} groups of up to {len(layout.largest(0))}, of which {layout.sliding} keep the "
            f"last {layout.window} tokens of a request ({reason})"
        )
    group = serve.data_parallel
    if not group.alone:
        ranks = f"rank {group.first}" if group.engines == 1 else f"ranks {group.first} to {group.ranks[-1]}"
        where = f", whose servers meet at {group.meeting[0]}:{group.meeting[1]}" if group.meeting else ""
        yield f"{ranks} of {group.size}{where}; {group.balancing} load balancing"
    yield (
        f"engines: {group.engines}, each with {engine.threads} threads ({hardware.cpus} CPUs among them), on "
        f"{'CUDA' if engine.device == 'cuda' else 'the CPU'}; HTTP servers: {serve.http.servers}"
    )
