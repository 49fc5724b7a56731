"""Chat templates: a conversation to the text that the model was trained on.

Templates are Jinja programs out of a model's files, written for the environment that Hugging Face's
`apply_chat_template` gives them: a sandbox with blocks trimmed, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that does not escape HTML, and the tag `generation`, which only marks text for training.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from rayllm.errors import RequestError
from rayllm.render.conversation import normalized

Json = dict[str, Any]

# The space at its end shows whether the template trims contents.
_SENTINEL = "\ue0f1end of the final message\ue0f1 "
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], content_format: str = "auto") -> None:
        """`named_tokens` are the special tokens that templates refer to, such as `bos_token`.

        `content_format` says what the template gets as contents: `string`, `openai` (lists of parts), or `auto`, as
        its own syntax tree tells.

        Raises:
            jinja2.TemplateSyntaxError: `source` is no template.
        """
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._named_tokens = dict(named_tokens)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Names that the template reads from outside."""
        self.arguments = self.variables - _RESERVED - self._named_tokens.keys() - _GLOBALS.keys()
        """Those of them that `kwargs` may hold."""
        wants_parts, takes_text = _content_use(tree)
        self._wants_parts = wants_parts if content_format == "auto" else content_format == "openai"
        self._takes_text = takes_text if content_format == "auto" else content_format == "string"
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Json] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation in OpenAI's format.

        `continue_final_message` leaves the last message open, for the model to go on with it.

        Raises:
            RequestError: a message is wrong, or the template refuses the conversation.
        """
        self._check_variables(documents, kwargs or {})
        conversation = normalized(messages, self._wants_parts, self._takes_text, self._knows_developer)
        if continue_final_message:
            conversation[-1] = _with_sentinel(conversation[-1])
        text = self._run(
            {
                **self._named_tokens,
                **(kwargs or {}),
                "messages": conversation,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_sentinel(text) if continue_final_message else text

    def _check_variables(self, documents: Sequence[Json] | None, kwargs: Mapping[str, Any]) -> None:
        if documents and "documents" not in self.variables:
            raise RequestError("this model's chat template takes no documents; put them into a message", "documents")
        for name in kwargs:
            if name in _RESERVED:
                raise RequestError(f"{name!r} cannot be set here; use the field of its own", "chat_template_kwargs")
            if name not in self.variables:
                known = ", ".join(sorted(self.arguments))
                message = f"this model's chat template has no variable {name!r}; it has {known or 'none'}"
                raise RequestError(message, "chat_template_kwargs")

    def _run(self, variables: Json) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as e:
            raise RequestError(
                f"the chat template refuses these messages: {e.message or 'it gives no reason'}", "messages"
            ) from e
        except Exception as e:
            # A template is a program run on whatever the client sent, so any exception may come out of it; their
            # texts tell about our inside and are left out.
            raise RequestError("the chat template cannot render these messages", "messages") from e


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: its body, unchanged."""

    tags = {"generation"}  # noqa: RUF012 (read by jinja2, never written)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(_GLOBALS)
    return environment


def _content_use(tree: jinja2.nodes.Template) -> tuple[bool, bool]:
    """Whether a template loops over the parts of a content, and whether it asks if a content is a string."""
    names = {"content"}

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        while isinstance(node, jinja2.nodes.Filter):
            node = node.node
        if isinstance(node, jinja2.nodes.Name):
            return node.name in names
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, jinja2.nodes.Getitem):
            return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
        return False

    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    loops = any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
    asks = any(test.name == "string" and is_content(test.node) for test in tree.find_all(jinja2.nodes.Test))
    return loops, asks or not loops


def _with_sentinel(message: Json) -> Json:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _SENTINEL}
    if not content:
        raise RequestError("there is no final message to continue: its content is empty", "continue_final_message")
    last = {**content[-1], "text": content[-1]["text"] + _SENTINEL}
    return {**message, "content": [*content[:-1], last]}


def _cut_at_sentinel(text: str) -> str:
    at = text.rfind(_SENTINEL.rstrip())
    if at < 0:
        raise RequestError("the chat template does not show the final message", "continue_final_message")
    # Where the template trims contents, it would have trimmed the end of the message too.
    return text[:at] if text.startswith(_SENTINEL, at) else text[:at].rstrip()
