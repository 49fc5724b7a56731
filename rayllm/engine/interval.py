"""Fewer, larger outputs: a request's tokens are held back until there are some of them."""

from rayllm.engine.request import Request
from rayllm.messages.ingress import RequestOutput, merge


class StreamInterval:
    """Passes on a request's first output and its last at once, and between them one for every so many tokens."""

    def __init__(self, tokens: int) -> None:
        """`tokens` where a request does not say."""
        self._tokens = tokens

    def take(self, request: Request, output: RequestOutput) -> RequestOutput | None:
        """What is to be sent now, or None to wait for more."""
        tokens = request.add.sampling.stream_interval or self._tokens
        if request.unsent is not None:
            output = merge(request.unsent, output)
        first = output.cached_tokens is not None
        if first or output.finish_reason is not None or len(output.token_ids) >= tokens:
            request.unsent = None
            return output
        request.unsent = output
        return None
