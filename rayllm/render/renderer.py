"""What turns a request into token ids. Plain Python: the ingress holds one, and so does the renderer deployment."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from rayllm.config.serve import FrontendSettings
from rayllm.errors import ConfigError, RequestError
from rayllm.render.chat import ChatTemplate
from rayllm.render.embeds import encode_around
from rayllm.render.tokenizer import Tokenizer, check_encodable, no_tokenizer

Json = dict[str, Any]

_MOST_REQUEST_TEMPLATES = 16
_SWITCHES = ("enable_thinking", "thinking")
"""Names by which templates let reasoning be switched off."""


class Renderer:
    """A tokenizer with its chat templates. Rendering may run in several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        *,
        template_name: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        tokens_only: bool = False,
    ) -> None:
        """`chat_template` (the text), or the model's own of the name `template_name`, replaces those of the model.

        `template_kwargs` are arguments of templates for conversations that bring none; `content_format` is that of
        `ChatTemplate`; with `tokens_only` no text is to be made of outputs.

        Raises:
            ConfigError: a template is malformed or has no such argument, or the model has none of this name.
        """
        self.tokenizer = tokenizer
        self.speller = no_tokenizer() if tokens_only else tokenizer
        """The tokenizer that spells outputs; with `tokens_only` it spells every token as nothing."""
        self._has_tokenizer = tokenizer.vocab_size > 0
        self.tokens_only = tokens_only
        self._content_format = content_format
        self._kwargs = dict(template_kwargs or {})
        if template_name is not None:
            chat_template = _named(template_name, tokenizer.chat_templates)
        self._sources = tokenizer.chat_templates if chat_template is None else {"default": chat_template}
        self._templates = {name: self._compile(source) for name, source in self._sources.items()}
        self._of_requests: dict[str, ChatTemplate] = {}
        self._lock = threading.Lock()
        self._check_kwargs()

    @classmethod
    def load(cls, settings: FrontendSettings) -> "Renderer":
        """The renderer that the settings describe.

        Raises:
            ModelError: the tokenizer's files are missing or damaged.
            ConfigError: a chat template cannot be used.
        """
        path = settings.tokenizer_path
        return cls(
            no_tokenizer() if path is None else Tokenizer.load(path),
            settings.chat_template,
            template_name=settings.chat_template_name,
            template_kwargs=settings.chat_template_kwargs,
            content_format=settings.content_format,
            tokens_only=settings.tokens_only,
        )

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: the text is no sound Unicode, or there is no tokenizer.
        """
        self._check_tokenizer("prompt")
        return self.tokenizer.encode(text, add_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Raises:
            RequestError: this server makes no text of tokens.
        """
        if self.tokens_only:
            raise RequestError("this server makes no text of tokens (--tokens-only or --skip-tokenizer-init)", "tokens")
        return self.tokenizer.decode(ids, skip_special_tokens)

    def render_chat(self, messages: list[Json], tools: list[Json] | None, options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation.

        `options` may hold, with these defaults: `add_generation_prompt` True, `continue_final_message` False,
        `documents` None, `chat_template` None (a template's text), `chat_template_kwargs` None,
        `add_special_tokens` False (templates write the start token themselves), `reasoning_effort` None, and `embeds`
        (), how many holes are to stand in place of each mark in the contents; see `rayllm.render.embeds`.

        Raises:
            RequestError: the model has no chat template, or it refuses the conversation or knows no such effort.
        """
        text, special = self.render_text(messages, tools, options), bool(options.get("add_special_tokens"))
        check_encodable(text, "messages")
        encode = self.tokenizer.encode
        if not (embeds := options.get("embeds")):
            return encode(text, special)
        inside = self.tokenizer.encode_inside
        return encode_around(text, embeds, lambda part, first: encode(part, special) if first else inside(part))

    def render_text(self, messages: list[Json], tools: list[Json] | None, options: Mapping[str, Any]) -> str:
        """The text that `render_chat` encodes."""
        template = self._template(options.get("chat_template"), with_tools=bool(tools))
        return template.render(
            messages,
            tools,
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            documents=options.get("documents"),
            kwargs=self._arguments(template, options),
        )

    def has_variable(self, name: str) -> bool:
        """Whether one of the chat templates reads a variable of that name."""
        return any(name in template.arguments for template in self._templates.values())

    def describe(self) -> Json:
        """The tokenizer's settings and its chat template, as in a Hugging Face `tokenizer_config.json`."""
        template: Any = self._sources
        if set(template) <= {"default"}:
            template = template.get("default")
        else:
            template = [{"name": name, "template": source} for name, source in template.items()]
        return {**self.tokenizer.config, "chat_template": template}

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the start of a word and inside one.

        Raises:
            RequestError: there is no tokenizer.
        """
        if words:
            self._check_tokenizer("bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                found[tuple(self.tokenizer.encode_inside(text))] = None
        return tuple(ids for ids in found if ids)

    def _check_tokenizer(self, param: str) -> None:
        if not self._has_tokenizer:
            message = f"{param} needs a tokenizer, and this server has none (--skip-tokenizer-init); send token ids"
            raise RequestError(message, param)

    def _arguments(self, template: ChatTemplate, options: Mapping[str, Any]) -> Json:
        """The arguments of a template: those given go over the defaults, of which it gets what it knows."""
        defaults = {name: value for name, value in self._kwargs.items() if name in template.arguments}
        effort = options.get("reasoning_effort")
        asked = {} if effort is None else _effort_arguments(template, effort)
        return {**defaults, **asked, **(options.get("chat_template_kwargs") or {})}

    def _check_kwargs(self) -> None:
        known = frozenset[str]().union(*(template.arguments for template in self._templates.values()))
        if self._templates and (unknown := self._kwargs.keys() - known):
            reason = f"the chat template has no variable {min(unknown)!r}; it has {', '.join(sorted(known)) or 'none'}"
            raise ConfigError("--default-chat-template-kwargs", reason, "leave it out")

    def _template(self, source: str | None, with_tools: bool) -> ChatTemplate:
        self._check_tokenizer("messages")
        if source is not None:
            return self._request_template(source)
        if not self._templates:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                "messages",
            )
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise RequestError(f"this model has no default chat template, only {known}", "messages")
        return self._templates["default"]

    def _request_template(self, source: str) -> ChatTemplate:
        """A template that came with a request; the last few are kept compiled."""
        with self._lock:
            template = self._of_requests.get(source)
        if template is None:
            try:
                template = self._new_template(source)
            except (jinja2.TemplateError, RecursionError) as e:
                raise RequestError(f"not a chat template: {e}", "chat_template") from e
            with self._lock:
                if len(self._of_requests) >= _MOST_REQUEST_TEMPLATES:
                    self._of_requests.pop(next(iter(self._of_requests)))
                self._of_requests[source] = template
        return template

    def _new_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.tokenizer.special.named, self._content_format)

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return self._new_template(source)
        except (jinja2.TemplateError, RecursionError) as e:
            raise ConfigError("--chat-template", f"the chat template is malformed: {e}", "give a sound one") from e


def _named(name: str, templates: Mapping[str, str]) -> str:
    if name not in templates:
        known = f"are {', '.join(sorted(templates))}" if templates else "are none"
        reason = f"{name!r} is neither a file nor a template of the model, of which there {known}"
        raise ConfigError("--chat-template", reason, "give the path of a file, or the template itself")
    return templates[name]


def _effort_arguments(template: ChatTemplate, effort: str) -> Json:
    """What a template calls an effort of reasoning. Where it knows no efforts, it may know how to do without any."""
    known = template.arguments
    arguments: Json = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    if effort == "none":
        arguments |= {name: False for name in _SWITCHES if name in known}
    if not arguments:
        message = f"this model's chat template knows no reasoning_effort {effort!r}; leave it out"
        raise RequestError(message, "reasoning_effort")
    return arguments
