"""What turns a request into token ids. Plain Python: the ingress holds one, and so does the renderer deployment."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from rayllm.errors import ConfigError, RequestError
from rayllm.render.chat import ChatTemplate
from rayllm.render.tokenizer import Tokenizer, check_encodable

Json = dict[str, Any]

_MOST_REQUEST_TEMPLATES = 16


class Renderer:
    """A tokenizer with its chat templates."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        """`chat_template` (the text) replaces those of the model.

        Raises:
            ConfigError: a template is malformed.
        """
        self.tokenizer = tokenizer
        sources = tokenizer.chat_templates if chat_template is None else {"default": chat_template}
        self._templates = {name: self._compile(source) for name, source in sources.items()}
        self._of_requests: dict[str, ChatTemplate] = {}

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: the text is no sound Unicode.
        """
        return self.tokenizer.encode(text, add_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def render_chat(self, messages: list[Json], tools: list[Json] | None, options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation.

        `options` may hold, with these defaults: `add_generation_prompt` True, `continue_final_message` False,
        `documents` None, `chat_template` None (a template's text), `chat_template_kwargs` None,
        `add_special_tokens` False (templates write the start token themselves).

        Raises:
            RequestError: the model has no chat template, or it refuses the conversation.
        """
        return self._encode(self.render_text(messages, tools, options), bool(options.get("add_special_tokens")))

    def render_text(self, messages: list[Json], tools: list[Json] | None, options: Mapping[str, Any]) -> str:
        """The text that `render_chat` encodes."""
        template = self._template(options.get("chat_template"), with_tools=bool(tools))
        return template.render(
            messages,
            tools,
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            documents=options.get("documents"),
            kwargs=options.get("chat_template_kwargs"),
        )

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the start of a word and inside one."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                found[tuple(self.tokenizer.encode_inside(text))] = None
        return tuple(ids for ids in found if ids)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        check_encodable(text, "messages")
        return self.tokenizer.encode(text, add_special_tokens)

    def _template(self, source: str | None, with_tools: bool) -> ChatTemplate:
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
        if source not in self._of_requests:
            if len(self._of_requests) >= _MOST_REQUEST_TEMPLATES:
                self._of_requests.pop(next(iter(self._of_requests)))
            try:
                self._of_requests[source] = ChatTemplate(source, self.tokenizer.special.named)
            except (jinja2.TemplateError, RecursionError) as e:
                raise RequestError(f"not a chat template: {e}", "chat_template") from e
        return self._of_requests[source]

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self.tokenizer.special.named)
        except (jinja2.TemplateError, RecursionError) as e:
            raise ConfigError("chat-template", f"the chat template is malformed: {e}", "give a sound one") from e
