"""Another Serve application that uses a rayllm engine by handle: no HTTP, no session, plain method calls.

`generate` gives the whole answer, `stream` gives it piece by piece. Both take a text, token ids, or a conversation,
and sampling parameters by name (the fields of `rayllm.messages.sampling.SamplingParams`).
"""

from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve

api = FastAPI()


def _question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Capitals:
    """Answers what the capital of a country is."""

    def __init__(self) -> None:
        # The deployment is always called `engine`; the application's name is the one in the YAML file.
        self._engine = serve.get_deployment_handle("engine", app_name="smollm2")

    @api.get("/")
    async def answer(self, of: str) -> dict[str, str]:
        """The whole answer at once."""
        answer = await self._engine.generate.remote(_question(of), {"temperature": 0.0, "max_tokens": 24})
        return {"answer": answer.text}

    @api.get("/stream")
    async def stream(self, of: str) -> StreamingResponse:
        """The answer as it is generated."""
        return StreamingResponse(self._pieces(of), media_type="text/plain")

    async def _pieces(self, of: str) -> AsyncIterator[str]:
        pieces = self._engine.options(stream=True).stream.remote(_question(of), {"temperature": 0.0, "max_tokens": 24})
        async for piece in pieces:
            yield piece.text


app = Capitals.bind()
