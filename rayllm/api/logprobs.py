"""Log-probabilities in the layouts of the API."""

from collections.abc import Sequence
from typing import Any

from rayllm.messages.ingress import TokenLogprobs
from rayllm.render.detokenize import Detokenizer
from rayllm.render.tokenizer import Tokenizer

Json = dict[str, Any]

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class LogprobsWriter:
    """Writes log-probabilities for one request."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        """`as_ids` names tokens as `token_id:5`."""
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def chat(self, tokens: Sequence[TokenLogprobs | None]) -> Json:
        """The layout of chat completions: an entry a token, with its bytes and alternatives."""
        content = []
        for token in tokens:
            assert token is not None, "a chat echoes no prompt tokens"
            entry = self._entry(token.token_id, token.logprob)
            pairs = zip(token.top_ids, token.top_logprobs, strict=True)
            entry["top_logprobs"] = [self._entry(id_, logprob) for id_, logprob in pairs]
            content.append(entry)
        return {"content": content, "refusal": None}

    def text(self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int], offsets: Sequence[int]) -> Json:
        """The layout of text completions: four lists of equal length. A token without logprobs (the first) has None."""
        return {
            "tokens": [self._name(id_) for id_ in ids],
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": [None if token is None else self._alternatives(token) for token in tokens],
            "text_offset": list(offsets),
        }

    def prompt(self, tokens: Sequence[TokenLogprobs | None]) -> list[Json | None]:
        """The layout of `prompt_logprobs`: for each token an object from ids to logprob, rank and text."""
        return [None if token is None else self._ranked(token) for token in tokens]

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.piece(token_id)),
        }

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        pairs = [*zip(token.top_ids, token.top_logprobs, strict=True), (token.token_id, token.logprob)]
        out: dict[str, float] = {}
        for id_, logprob in pairs:
            out.setdefault(self._name(id_), _finite(logprob))
        return out

    def _ranked(self, token: TokenLogprobs) -> Json:
        out = {
            str(id_): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(id_)}
            for rank, (id_, logprob) in enumerate(zip(token.top_ids, token.top_logprobs, strict=True), 1)
        }
        own = {"logprob": _finite(token.logprob), "rank": token.rank}
        out.setdefault(str(token.token_id), {**own, "decoded_token": self._tokenizer.token_text(token.token_id)})
        return out


def bare(tokens: Sequence[TokenLogprobs | None]) -> Json:
    """The layout for clients that know tokens by their ids: an entry a token, with its alternatives."""
    content = []
    for token in tokens:
        assert token is not None, "no prompt is echoed"
        ranks = token.top_ranks or range(1, len(token.top_ids) + 1)
        found = zip(token.top_ids, token.top_logprobs, ranks, strict=True)
        top = [{"token_id": id_, "logprob": _finite(logprob), "rank": rank} for id_, logprob, rank in found]
        own = {"token_id": token.token_id, "logprob": _finite(token.logprob), "rank": token.rank}
        content.append({**own, "top_logprobs": top})
    return {"content": content}


def offsets_of(ids: Sequence[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> list[int]:
    """For each token of a prompt, the characters of the prompt's text before it."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, continues=False)
    offsets, at = [], 0
    for id_ in ids:
        offsets.append(at)
        at += len(detokenizer.feed((id_,)))
    return offsets


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST) if logprob == logprob else _LEAST
