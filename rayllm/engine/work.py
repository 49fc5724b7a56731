"""An estimate of the arithmetic and the memory traffic of steps, from the model's sizes and the steps' plans.

    D width, F inner width, N query heads, G key/value heads, H head size, V vocabulary, L layers, of these L_w with
    window w; a step computes tokens T of several rows, each of which sees c tokens (its own included, at most w), and
    takes logits of R positions

    FLOPs    2 T L D H (2 N + 2 G) + 6 T L D F     projections and MLP: two operations for each weight and token
             + 4 N H  sum over layers and tokens of c          scores, and the weighted sum of values
             + 2 R D V                                         logits

    read     bytes of all weights once a step, those of the output head only where R > 0
             + keys and values that the tokens of a row see, once for each row and layer
    written  keys and values of the T tokens

    With latent attention (q, l, p, r, v its widths in the order of `MlaSpec`, q = 0 without):
             2 T L (D q + (q or D) N (p + r) + D (l + r) + N l (p + v) + N v D)      for the projections above
             + 2 N (2 l + r)  sum over layers and tokens of c                        for scores and the weighted sum

    Where a layer has experts (E of them with inner width I, K for each token, and an MLP of width S for all): 2 T D E +
    6 T D (K I + S) in the place of 6 T D F; weights of at most T K experts are read.

Norms, rotations, biases, sampling and what passes from one product to the next are left out: they are small, or stay
in caches.
"""

from collections import Counter

from rayllm.config.engine import EngineConfig
from rayllm.config.kv_cache import ITEM_BYTES, head_bytes
from rayllm.engine.scheduler import PlannedStep
from rayllm.model.families import spec_of
from rayllm.model.spec import DecoderSpec

FLOPS, READ, WRITTEN = "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu"


class Work:
    """Adds up what the steps of one engine come to, for each of its workers."""

    def __init__(self, config: EngineConfig) -> None:
        """Take the sizes from the model's config.

        Raises:
            ModelError: the model is of no known family.
        """
        spec = spec_of(config.model)
        self.totals = {FLOPS: 0.0, READ: 0.0, WRITTEN: 0.0}
        """By metric name without prefix."""
        width = spec.hidden_size
        projections, self._attention = _of_attention(spec)
        self._layers = spec.num_layers * projections
        """Weights of all layers that each token is multiplied with, but for experts."""
        self._chosen, self._held, self._expert = 0, 0, 0
        """Experts of a token, and of a layer; weights of one, added up over layers."""
        for layer in range(spec.num_layers):
            if spec.moe is None or not spec.has_experts(layer):
                self._layers += 3 * width * spec.intermediate_size
                continue
            moe = spec.moe
            self._layers += width * (moe.num_experts + 3 * moe.shared_size + moe.shared_gate)
            self._chosen, self._held = moe.experts_per_token, moe.num_experts
            self._expert += 3 * width * moe.intermediate_size
        self._head = width * spec.vocab_size
        stored = [config.kv_cache.of_layer(i, window, config.dtype) for i, window in enumerate(spec.windows)]
        parts = (1 if spec.mla is not None else 2) * spec.num_kv_heads
        sizes = [parts * head_bytes(dtype, spec.head_size) for dtype in stored]
        self._caches = Counter(zip(spec.windows, sizes, strict=True))
        """Layers by window, and by the bytes of a token's keys and values."""
        value = ITEM_BYTES[config.dtype]
        weights = self._layers + self._held * self._expert + self._head * (1 if spec.tied else 2)
        # A GGUF file's weights stay as they are stored.
        self._weight_bytes = config.weight_bytes / weights if config.model.format == "gguf" else value
        self._workers = config.parallel.tensor

    def add(self, step: PlannedStep) -> None:
        """Count a step. To be called right after it was planned."""
        tokens, seen, kept_bytes, logits = 0, 0, 0, len(step.sampling)
        for request, count in zip(step.requests, step.plan.counts, strict=True):
            start = request.computed - count
            tokens += count
            for (window, size), layers in self._caches.items():
                seen += layers * tokens_seen(start, count, window)
                kept_bytes += layers * tokens_kept(start, count, window) * size
            if request.prompt_logprobs is not None:
                logits += max(0, min(request.computed, request.num_prompt - 1) - start)
        active = self._layers + self._chosen * self._expert
        flops = 2 * tokens * active + self._attention * seen + 2 * logits * self._head
        weights = self._layers + min(tokens * self._chosen, self._held) * self._expert
        read = (weights + (self._head if logits else 0)) * self._weight_bytes + kept_bytes
        self.totals[FLOPS] += flops / self._workers
        self.totals[READ] += read / self._workers
        written = sum(size * layers for (_, size), layers in self._caches.items())
        self.totals[WRITTEN] += tokens * written / self._workers


def _of_attention(spec: DecoderSpec) -> tuple[int, int]:
    """Of one layer: weights that a token is multiplied with, and operations for each token that it sees."""
    width, heads, mla = spec.hidden_size, spec.num_heads, spec.mla
    if mla is None:
        return 2 * width * (heads + spec.num_kv_heads) * spec.head_size, 4 * heads * spec.head_size
    latent, low = mla.kv_lora_rank, mla.q_lora_rank or 0
    query = width * low + (low or width) * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    projections = heads * latent * (mla.qk_nope_head_dim + mla.v_head_dim) + heads * mla.v_head_dim * width
    return query + width * spec.head_size + projections, 2 * heads * (spec.head_size + latent)


def tokens_seen(start: int, count: int, window: int | None) -> int:
    """Tokens that the `count` tokens from position `start` see in one layer, their own included, added up."""
    widening = count if window is None else max(0, min(count, window - start))
    return widening * start + widening * (widening + 1) // 2 + (count - widening) * (window or 0)


def tokens_kept(start: int, count: int, window: int | None) -> int:
    """Different tokens among those."""
    return start + count if window is None else min(start + count, window + count - 1)
