"""`POST /tokenize` and `POST /detokenize`."""

from rayllm.api.call import Call
from rayllm.api.conversation import render
from rayllm.api.front import Front
from rayllm.api.parse import parse_request
from rayllm.api.wire import DetokenizeRequest, TokenizeRequest
from rayllm.errors import RequestError
from rayllm.messages.validate import check_ids


class Tokens:
    """Answers questions about tokens."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def tokenize(self, call: Call) -> None:
        """The token ids of a text or a conversation."""
        front = self._front
        request = parse_request(TokenizeRequest, await call.body(front.settings.max_body_bytes))
        front.check_model(request)
        if request.return_token_strs and front.settings.tokens_only:
            raise RequestError("this server makes no text of tokens; leave return_token_strs out", "return_token_strs")
        ids = await call.while_connected(self._ids(request))
        strings = [front.renderer.tokenizer.token_text(i) for i in ids] if request.return_token_strs else None
        limit = front.limits.max_model_len
        await call.json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, call: Call) -> None:
        """The text of token ids."""
        front = self._front
        request = parse_request(DetokenizeRequest, await call.body(front.settings.max_body_bytes))
        front.check_model(request)
        check_ids(request.tokens, "tokens", front.limits)
        await call.json({"prompt": front.renderer.detokenize(request.tokens)})

    async def _ids(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if request.prompt is None:
            return await render(self._front, request, bool(request.add_special_tokens))
        return await self._front.service.tokenize(request.prompt, request.add_special_tokens is not False)
