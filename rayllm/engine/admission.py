"""The engine's door: what is checked before a request may enter the loop, where it could do harm."""

import msgspec

from rayllm.config.engine import EngineConfig
from rayllm.engine.request import Request
from rayllm.errors import ContextTooLong, RequestError
from rayllm.kv.prefix import root_hash
from rayllm.messages.embeds import FIELD, read_saved, saved_shape
from rayllm.messages.engine import Add
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.worker import EmbeddedRows


class Admission:
    """Checks requests against one engine's limits. Callers over HTTP were checked before; others were not."""

    def __init__(self, config: EngineConfig, logits_processors: frozenset[str]) -> None:
        self._config = config
        self._processors = logits_processors
        self._eos = frozenset(config.model.eos_token_ids)

    def check(self, add: Add) -> None:
        """Refuse what this engine cannot serve.

        Raises:
            RequestError: names the field.
        """
        config, sampling = self._config, add.sampling
        if not add.prompt_token_ids:
            raise RequestError("the prompt has no tokens", "prompt")
        ids = (add.prompt_token_ids, add.output_token_ids, sampling.stop_token_ids, sampling.logit_bias or ())
        for name, tokens in zip(("prompt", "output_token_ids", "stop_token_ids", "logit_bias"), ids, strict=True):
            self._check_ids(name, tokens)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_ids("logprob_token_ids", sampling.logprob_token_ids)
        if sampling.thinking is not None:
            self._check_thinking(sampling)
        for word in sampling.bad_words_ids:
            self._check_ids("bad_words", word)
        wanted = 1 if sampling.max_tokens is None else sampling.max_tokens
        length = len(add.prompt_token_ids)
        if length + min(wanted, 1) > config.max_model_len:
            raise ContextTooLong(
                f"the prompt has {length} tokens, and the context of {config.max_model_len} tokens "
                "must hold the prompt and the output", "prompt",
            )  # fmt: skip
        if sampling.n != 1:
            raise RequestError("an engine takes one choice a request; send n requests", "n")
        if sampling.seed is None and not sampling.greedy:
            raise RequestError("an engine needs a seed, drawn where the request enters", "seed")
        unknown = set(sampling.extra_args or ()) - self._processors
        if unknown:
            raise RequestError(
                f"no logits processor is named {sorted(unknown)[0]!r}; load it with --logits-processors", "vllm_xargs"
            )

    def read_embeds(self, add: Add) -> tuple[EmbeddedRows, ...]:
        """What stands in place of tokens of the prompt.

        Raises:
            RequestError: it cannot be used.
        """
        if not add.prompt_embeds:
            return ()
        if not self._config.prompt_embeds:
            raise RequestError("prompt_embeds are taken by servers that --enable-prompt-embeds lets do so", FIELD)
        sampling = add.sampling
        for name, asked in (
            ("prompt_logprobs", sampling.prompt_logprobs is not None),
            ("repetition_penalty", sampling.repetition_penalty != 1.0),
        ):
            if asked:
                raise RequestError(f"{name} needs the tokens of the prompt, which prompt_embeds do not tell", name)
        width, reached, read = self._config.model.config["hidden_size"], 0, []
        for one in add.prompt_embeds:
            tokens, _ = saved_shape(one.saved)
            if one.at < reached or one.at + tokens > len(add.prompt_token_ids):
                raise RequestError(f"{FIELD} do not stand within the prompt one after another", FIELD)
            reached = one.at + tokens
            read.append(EmbeddedRows(one.at, tokens, read_saved(one.saved, tokens, width).tobytes()))
        return tuple(read)

    def make_request(self, client: int, add: Add, now: float, embeds: tuple[EmbeddedRows, ...] = ()) -> Request:
        """The request that the loop works on."""
        sampling = add.sampling
        length, longest = len(add.prompt_token_ids), self._config.max_model_len
        limit = longest if sampling.max_tokens is None else min(longest, length + sampling.max_tokens)
        eos = frozenset() if sampling.ignore_eos else self._eos
        return Request(
            client, add, limit=limit, stop_ids=eos | frozenset(sampling.stop_token_ids),
            root=root_hash(add.cache_salt, embeds=msgspec.msgpack.encode(embeds) if embeds else b""), now=now,
            embeds=embeds,
        )  # fmt: skip

    def _check_thinking(self, sampling: SamplingParams) -> None:
        limit, name = sampling.thinking, "thinking_token_budget"
        assert limit is not None
        if not (limit.mark_ids and limit.end_ids and all((*limit.mark_ids, *limit.begin_ids))):
            raise RequestError("a mark of reasoning has no tokens", name)
        for ids in (*limit.mark_ids, limit.end_ids, *limit.begin_ids):
            self._check_ids(name, ids)
        if sampling.structured_outputs is not None and self._config.structured.enable_in_reasoning:
            raise RequestError(
                "thinking_token_budget cannot be kept where --structured-outputs-config.enable_in_reasoning holds "
                "reasoning to a form; leave one of them out", name,
            )  # fmt: skip

    def _check_ids(self, name: str, tokens: object) -> None:
        assert isinstance(tokens, list | tuple | dict)
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._config.model.vocab_size):
            raise RequestError(f"token ids must be 0 to {self._config.model.vocab_size - 1}", name)
