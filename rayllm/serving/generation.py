"""Answers plain handle calls: a prompt in, text and tokens out, without an HTTP app."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from rayllm.api.choice import Choice
from rayllm.api.request_log import OutputLog, RequestLog
from rayllm.config.serve import FrontendSettings
from rayllm.errors import RequestError
from rayllm.messages.engine import Add
from rayllm.messages.generation import GeneratedChoice, Generation, Piece, Prompt
from rayllm.messages.ingress import FinishReason
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import Limits, check_ids, check_sampling, output_room
from rayllm.render.renderer import Renderer
from rayllm.serving.fleet import Fleet


class Generator:
    """Renders prompts, submits them to a fleet of engines and puts the text together."""

    def __init__(self, frontend: FrontendSettings, renderer: Renderer, fleet: Fleet) -> None:
        self._defaults = frontend.generation_defaults
        self._renderer = renderer
        self._fleet = fleet
        self._log = None if frontend.request_log is None else RequestLog(frontend.request_log, renderer)
        self._seeds = random.Random(frontend.seed)
        self._limits = Limits(
            vocab_size=frontend.vocab_size,
            max_model_len=frontend.max_model_len,
            max_logprobs=frontend.max_logprobs,
            max_tokens=frontend.max_tokens,
            takes_stops=not frontend.tokens_only,
        )

    async def generate(self, prompt: Prompt, sampling: Mapping[str, Any] | None = None) -> Generation:
        """The whole answer. `sampling` holds fields of `SamplingParams`.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            Overloaded: no engine takes it now.
            GenerationFailed, ReplicaLost: the engine could not go on with it.
        """
        pieces: dict[int, list[Piece]] = {}
        async for piece in self.stream(prompt, sampling):
            pieces.setdefault(piece.index, []).append(piece)
        choices = [_joined(pieces[index]) for index in sorted(pieces)]
        return Generation(prompt_tokens=pieces[0][0].prompt_tokens, choices=choices)

    async def stream(self, prompt: Prompt, sampling: Mapping[str, Any] | None = None) -> AsyncIterator[Piece]:
        """The answer piece by piece, as `generate` raises and takes arguments.

        Leaving the iterator early ends the request.
        """
        params = self._sampling(sampling or {})
        adds = self._adds(self._render(prompt), params)
        if self._log is not None:
            self._log.request(adds[0].external_id, adds, params.n)
        streams = await self._fleet.submit(adds)
        queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        choices = [
            Choice(index, stream, params, self._renderer.speller, log=self._output_log(adds[index]))
            for index, stream in enumerate(streams)
        ]
        readers = [asyncio.create_task(_read(choice, len(adds[0].prompt_token_ids), queue)) for choice in choices]
        open_ = len(readers)
        try:
            while open_:
                piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                open_ -= piece.finish_reason is not None
                yield piece
        finally:
            for reader, choice in zip(readers, choices, strict=True):
                reader.cancel()
                choice.close()

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        fields = {**self._defaults, **given}
        unknown = set(given) - set(SamplingParams.__struct_fields__)
        if unknown:
            raise RequestError(f"unknown sampling parameter {sorted(unknown)[0]!r}", sorted(unknown)[0])
        try:
            params = msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"bad sampling parameters: {error}", "sampling") from None
        check_sampling(params, self._limits)
        return params

    def _render(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._renderer.tokenize(prompt)
        if prompt and isinstance(prompt[0], dict):
            return self._renderer.render_chat([dict(message) for message in prompt], None, {})
        ids: list[int] = list(prompt)  # type: ignore[arg-type]
        check_ids(ids, "prompt", self._limits)
        return ids

    def _adds(self, prompt: list[int], params: SamplingParams) -> list[Add]:
        one = msgspec.structs.replace(
            params,
            n=1,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            max_tokens=output_room(len(prompt), params.max_tokens, self._limits),
            bad_words_ids=self._renderer.bad_words_ids(params.bad_words),
        )
        now, id_ = time.time(), f"handle-{uuid.uuid4().hex}"
        return [
            Add(
                request_id=0,
                prompt_token_ids=prompt,
                sampling=one,
                choice_index=index,
                arrival_time=now,
                external_id=id_,
            )
            for index in range(params.n)
        ]

    def _output_log(self, add: Add) -> OutputLog | None:
        return None if self._log is None else self._log.output(add.external_id, add.choice_index, stream=True)


async def _read(choice: Choice, prompt_tokens: int, queue: "asyncio.Queue[Piece | BaseException]") -> None:
    """Put the pieces of one choice into the queue, or the error that ended it."""
    try:
        async for piece in choice.pieces():
            finish_reason = cast(FinishReason | None, piece.finish_reason)
            queue.put_nowait(
                Piece(choice.index, piece.text, piece.token_ids, finish_reason, piece.stop_reason, prompt_tokens)
            )
    except Exception as error:
        queue.put_nowait(error)


def _joined(pieces: Sequence[Piece]) -> GeneratedChoice:
    last = pieces[-1]
    assert last.finish_reason is not None
    return GeneratedChoice(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
