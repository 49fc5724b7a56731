"""`LLM`: one model in this process, without Ray or HTTP."""

import io
import itertools
import logging
import operator
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, SupportsIndex, cast

import msgspec

from rayllm.api.choice import ChoiceText, Piece
from rayllm.config.load import load
from rayllm.config.parser import parse_mapping
from rayllm.config.registry import Values, registry
from rayllm.engine.engine import Engine, Outputs
from rayllm.errors import ConfigError, EngineDead, GenerationFailed, RequestError
from rayllm.messages.embeds import FIELD, saved_shape
from rayllm.messages.engine import Add, Profile
from rayllm.messages.ingress import EngineStats, FinishReason, Load, RequestOutput, TokenLogprobs
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import Limits, check_sampling, output_room
from rayllm.render.renderer import Renderer
from rayllm.render.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CLIENT = 0
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of them under the name `prompt` or `prompt_token_ids`.

Or, under the name `prompt_embeds`, what the model's input embeddings give for tokens in transformers: a tensor of torch
(tokens, width of the model). That needs `enable_prompt_embeds=True`.
"""
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice. `stop_reason` is the stop string or the stop token that ended it, None for an end token."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one prompt gave."""

    prompt_token_ids: list[int]
    """Zeros where embeddings stood in their place."""
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""


OF_SERVERS = frozenset({
    "served-model-name", "data-parallel-size", "show-hidden-metrics-for-version", "otlp-traces-endpoint",
    "collect-detailed-traces", "kv-cache-metrics", "kv-cache-metrics-sample", "enable-mfu-metrics",
    "reasoning-parser", "reasoning-parser-plugin",
})  # fmt: skip
"""Options without effect in `LLM`, beside those of the sections general and frontend."""
OF_RENDERERS = frozenset(
    {"chat-template", "chat-template-content-format", "default-chat-template-kwargs", "tokens-only"}
)
"""Options of the section frontend that have one."""


class LLM:
    """Runs a model and answers whole batches. Close it (`shutdown`, or a `with` block) to free its memory.

    `LLM(model, **options)` takes the options of `rayllm serve` with underscores, such as `dtype="float32"` or
    `max_model_len=2048`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load the model: a Hugging Face folder, a GGUF file, or a name on the hub.

        Raises:
            ConfigError: an option cannot be honoured.
            ModelError: the model's files cannot be used.
        """
        values = registry().values(parse_mapping({"model": model, **options}, registry()))
        _refuse_options_of_servers(values)
        resolved = load(values)
        for note in resolved.notes:
            log.warning(note)
        frontend = resolved.serve.frontend
        self.config = resolved.engine
        self._defaults = frontend.generation_defaults
        self._limits = Limits(
            vocab_size=frontend.vocab_size,
            max_model_len=frontend.max_model_len,
            max_logprobs=frontend.max_logprobs,
            takes_stops=not frontend.tokens_only,
        )
        self._renderer = Renderer.load(frontend)
        self._engine = Engine.build(self.config)
        self._ids = itertools.count()
        self._seeds = random.Random(frontend.seed)
        self._changed = threading.Condition()
        self._open: dict[int, _Choice] = {}
        self._engine.start(self._deliver)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Complete one prompt or several, each a text, token ids or a mapping with either; results in order.

        Without `sampling`, the model's own generation config holds.

        Raises:
            RequestError: a prompt or a parameter cannot be served; nothing was run.
            GenerationFailed: the engine could not go on with one, such as by a fault in a logits processor.
            EngineDead: the engine failed.
        """
        many = _as_list(prompts)
        return self._run([self._read(prompt) for prompt in many], self._sampling_of(sampling, len(many)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **template: Any,
    ) -> list[Result]:
        """Answer one conversation or several, in OpenAI's message format; results in order.

        `template` are options of the chat template, such as `add_generation_prompt`.

        Raises:
            RequestError: a conversation or a parameter cannot be served; nothing was run.
            GenerationFailed: the engine could not go on with one.
            EngineDead: the engine failed.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        read = [_Read(self._renderer.render_chat(list(one), tools, template)) for one in many]  # type: ignore[arg-type]
        return self._run(read, self._sampling_of(sampling, len(read)))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._renderer.tokenizer

    def stats(self) -> EngineStats:
        """The engine's metrics."""
        return self._engine.stats()

    def start_profile(self) -> None:
        """Begin a profile.

        Raises:
            RequestError: the option `profiler_config` names no profiler.
        """
        self._engine.carry_out(Profile(True))

    def stop_profile(self) -> None:
        """End it and write its trace."""
        self._engine.carry_out(Profile(False))

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, such as one that `worker_extension_cls` brought; one result a worker.

        Raises:
            AttributeError: workers have no such method.
            Exception: what the method raises.
        """
        return self._engine.collective_rpc(method, *args, **kwargs)

    def shutdown(self) -> None:
        """End the engine and free the model. Idempotent."""
        self._engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _read(self, prompt: Prompt) -> "_Read":
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids", FIELD}:
                fields = ", ".join(map(repr, prompt)) or "nothing"
                wanted = f"'prompt', 'prompt_token_ids' or {FIELD!r}"
                raise RequestError(f"a prompt holds {fields}: give one of {wanted}", "prompts")
            ((name, prompt),) = prompt.items()
            if name == FIELD:
                return self._read_embeds(prompt)
        if isinstance(prompt, str):
            return _Read(self._renderer.tokenize(prompt))
        try:
            return _Read([operator.index(token) for token in cast(Sequence[int], prompt)])
        except TypeError:
            raise RequestError(f"a prompt is {prompt!r:.80}: give a text or token ids", "prompts") from None

    def _read_embeds(self, embeds: Any) -> "_Read":
        import torch  # which the engine has loaded

        if not isinstance(embeds, torch.Tensor):
            raise RequestError(f"{FIELD} must be a tensor, not {type(embeds).__name__}", FIELD)
        if embeds.layout is not torch.strided or embeds.device.type == "meta":
            raise RequestError(f"{FIELD} must be a dense tensor", FIELD)
        file = io.BytesIO()
        torch.save(embeds.detach().cpu().clone(), file)
        saved = file.getvalue()
        tokens, _ = saved_shape(saved)
        output_room(tokens, None, self._limits)
        return _Read([0] * tokens, saved)

    def _sampling_of(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling is None:
            sampling = SamplingParams(**self._defaults)
        if isinstance(sampling, SamplingParams):
            return [sampling] * count
        if len(sampling) != count:
            raise ValueError(f"{len(sampling)} sampling parameters for {count} prompts")
        return list(sampling)

    def _run(self, prompts: "list[_Read]", samplings: list[SamplingParams]) -> list[Result]:
        groups = [self._choices(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
        every = [choice for group in groups for choice in group]
        with self._changed:
            self._open.update((choice.add.request_id, choice) for choice in every)
        try:
            pending = [self._engine.add(CLIENT, choice.add) for choice in every]
            for compiled in pending:
                if compiled is not None:
                    compiled.result()
            with self._changed:
                self._changed.wait_for(lambda: all(choice.done for choice in every))
        finally:
            for choice in every:
                if self._open.pop(choice.add.request_id, None) and not choice.done:
                    self._engine.abort(CLIENT, choice.add.request_id)
        if reason := self._engine.dead:
            raise EngineDead(reason)
        return [
            Result(prompt.ids, [c.completion() for c in group], group[0].whole.prompt_logprobs, group[0].cached_tokens)
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _choices(self, prompt: "_Read", sampling: SamplingParams) -> list["_Choice"]:
        check_sampling(sampling, self._limits)
        room = output_room(len(prompt.ids), sampling.max_tokens, self._limits)
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        one = msgspec.structs.replace(
            sampling, n=1, seed=seed, max_tokens=room, bad_words_ids=self._renderer.bad_words_ids(sampling.bad_words)
        )
        now = time.time()
        adds = (
            Add(
                request_id=next(self._ids), prompt_token_ids=prompt.ids, prompt_embeds=prompt.embeds,
                sampling=one, choice_index=index, arrival_time=now,
            )
            for index in range(sampling.n)
        )  # fmt: skip
        return [_Choice(add, self._renderer.speller, self._abort) for add in adds]

    def _deliver(self, outputs: Outputs, load: Load) -> None:
        with self._changed:
            for output in outputs.get(CLIENT, ()):
                choice = self._open.get(output.request_id)
                if choice is not None:
                    choice.take(output)
            self._changed.notify_all()

    def _abort(self, request_id: int, reason: str) -> None:
        self._engine.abort(CLIENT, request_id, reason)


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt as the engine takes it."""

    ids: list[int]
    embeds: bytes | None = None


class _Choice:
    """One choice while it is generated."""

    def __init__(self, add: Add, tokenizer: Tokenizer, abort: Callable[[int, str], None]) -> None:
        self.add = add
        self._text = ChoiceText(lambda reason: abort(add.request_id, reason), add.sampling, tokenizer)
        self.whole = Piece()
        self.error: GenerationFailed | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.whole.finish_reason is not None or self.error is not None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held."""
        return self._text.cached_tokens

    def take(self, output: RequestOutput) -> None:
        """Take in what a step produced."""
        if not self.done:
            try:
                self.whole.extend(self._text.take(output))
            except GenerationFailed as error:
                self.error = error

    def completion(self) -> Completion:
        """The finished choice.

        Raises:
            GenerationFailed: the engine could not go on with it.
        """
        if self.error is not None:
            raise self.error
        whole = self.whole
        logprobs = cast(list[TokenLogprobs], whole.logprobs) if self.add.sampling.logprobs is not None else None
        reason = cast(FinishReason, whole.finish_reason)
        return Completion(self.add.choice_index, whole.text, whole.token_ids, reason, whole.stop_reason, logprobs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, (str, Mapping)) or (len(prompts) and isinstance(prompts[0], SupportsIndex)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _refuse_options_of_servers(values: Values) -> None:
    for name in sorted(values.given - OF_RENDERERS):
        if name in OF_SERVERS or registry()[name].section in ("general", "frontend"):
            cure = "leave it out, or use rayllm serve"
            raise ConfigError(f"--{name}", "has no effect in LLM, which is no server", cure)
