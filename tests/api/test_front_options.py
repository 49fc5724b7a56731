"""What options of `rayllm serve` change in the API: the app as the command line has it, over a fake engine."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rayllm.api.fake import Script
from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.serve import FrontendSettings
from rayllm.errors import ConfigError, RequestError

from ..render.samples import byte_level_backend, sentencepiece_backend, write_folder
from .conftest import Harness, events, finish, joined, ok, refused

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}{% if loud is defined and loud %}!{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder as the HTTP process reads it, without weights."""
    folder = write_folder(tmp_path / "model", byte_level_backend(), TOKENIZER, TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def serve(model):
    def start(*arguments: str) -> Harness:
        api = Harness.of(str(model), *arguments)
        if api.tokenizer.vocab_size:
            api.script("Hel", "lo")
        return api

    return start


async def chat(api: Harness, **body: Any) -> Any:
    """A chat that names no model."""
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return await api.request("POST", "/v1/chat/completions", json=body)


async def complete(api: Harness, **body: Any) -> Any:
    return await api.request("POST", "/v1/completions", json={"prompt": "hi", **body})


async def prompt_of(api: Harness, **body: Any) -> str:
    """The text that a conversation becomes."""
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    ids = ok(await api.request("POST", "/tokenize", json=body))["tokens"]
    return api.tokenizer.decode(ids, skip_special_tokens=False)


class TestLogs:
    @pytest.fixture(autouse=True)
    def level(self, caplog):
        caplog.set_level(logging.INFO, "rayllm")

    @pytest.mark.option("enable-log-requests", "max-log-len")
    async def test_requests(self, serve, caplog):
        ok(await complete(serve("--no-enable-log-requests"), temperature=0.25))
        assert caplog.text == ""
        api = serve("--enable-log-requests", "--max-log-len", "10")
        id_ = ok(await complete(api, temperature=0.25, n=2))["id"]
        (line,) = caplog.messages
        assert id_ in line
        assert "temperature=0.25" in line
        caplog.set_level(logging.DEBUG, "rayllm")
        ok(await complete(api, prompt="x\n" * 500))
        _, line = caplog.messages[1:]
        shown = "x\n" * 5
        assert f"prompt {shown!r}, token ids {api.ids(shown)}" in line
        assert "Hello" not in caplog.text
        ok(await complete(serve("--enable-log-requests"), prompt="x" * 1000))
        assert "x" * 1000 in caplog.messages[-1]

    @pytest.mark.option("enable-log-outputs", "enable-log-deltas")
    async def test_outputs(self, serve, caplog):
        api = serve("--enable-log-requests", "--enable-log-outputs")
        ok(await complete(api))
        assert [line.endswith("output (length) 'Hello'") for line in caplog.messages] == [False, True]
        caplog.clear()
        events(await chat(api, stream=True))
        _, *deltas, whole = caplog.messages
        assert [line.rpartition("delta ")[2] for line in deltas] == ["'Hel'", "'lo'"]
        assert "'Hello'" in whole
        caplog.clear()
        events(
            await chat(serve("--enable-log-requests", "--enable-log-outputs", "--no-enable-log-deltas"), stream=True)
        )
        _, whole = caplog.messages
        assert "'Hello'" in whole
        caplog.clear()
        api = serve("--enable-log-requests", "--enable-log-outputs", "--tokens-only")
        events(await chat(api, stream=True))
        _, *deltas, whole = caplog.messages
        assert [line.rpartition("delta ")[2] for line in deltas] == [str(api.ids("Hel")), str(api.ids("lo"))]
        assert str(api.ids("Hel") + api.ids("lo")) in whole

    @pytest.mark.option("log-error-stack")
    async def test_errors(self, serve, caplog):
        for failing in ({"temperature": 9}, {"stream": True, "min_tokens": -1}):
            caplog.clear()
            error = refused(await complete(serve(), **failing))
            (line,) = caplog.text.splitlines()
            assert error["message"] in line
            refused(await complete(serve("--log-error-stack"), **failing))
            assert "Traceback" in caplog.text
            assert "RequestError" in caplog.text
        caplog.clear()
        api = serve("--log-error-stack")
        api.scripts(Script([api.ids("a")], failure=RequestError("midway")))
        events(await complete(api, stream=True))
        assert "Traceback" in caplog.text


@pytest.mark.option("enable-server-load-tracking")
async def test_load(serve):
    for flags, counted in ((["--enable-server-load-tracking"], 1), ([], 0)):
        api = serve(*flags)
        api.scripts(Script([[70]], hang=True))
        running = asyncio.ensure_future(complete(api))
        while not api.service.streams:
            await asyncio.sleep(0)
        assert ok(await api.request("GET", "/load")) == {"server_load": counted}
        running.cancel()
        await asyncio.wait([running])
        assert ok(await api.request("GET", "/load")) == {"server_load": 0}


@pytest.mark.option("enable-force-include-usage")
async def test_usage_of_every_stream(serve):
    for ask in (chat, complete):
        assert "usage" not in events(await ask(serve(), stream=True))[-1]
        *others, last = events(await ask(serve("--enable-force-include-usage"), stream=True))
        assert last["usage"]["completion_tokens"] == len(serve().ids("Hel") + serve().ids("lo"))
        assert last["choices"] == []
        assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.option("enable-tokenizer-info-endpoint")
async def test_tokenizer_info(serve):
    refused(await serve().request("GET", "/tokenizer_info"), 404)
    api = serve("--enable-tokenizer-info-endpoint")
    body = ok(await api.request("GET", "/tokenizer_info"))
    assert ok(await api.request("GET", "/get_tokenizer_info")) == body
    assert body == {**TOKENIZER, "chat_template": TEMPLATE}
    assert "/tokenizer_info" in ok(await api.request("GET", "/openapi.json"))["paths"]
    own = serve("--enable-tokenizer-info-endpoint", "--chat-template", "{{ messages }}")
    assert ok(await own.request("GET", "/tokenizer_info"))["chat_template"] == "{{ messages }}"


@pytest.mark.option("response-role")
async def test_response_role(serve):
    api = serve("--response-role", "bot")
    assert ok(await chat(api))["choices"][0]["message"]["role"] == "bot"
    assert events(await chat(api, stream=True))[0]["choices"][0]["delta"]["role"] == "bot"
    kept = ok(await chat(api, add_generation_prompt=False))
    assert kept["choices"][0]["message"]["role"] == "user"
    assert ok(await chat(serve()))["choices"][0]["message"]["role"] == "assistant"


class TestTemplates:
    @pytest.mark.option("chat-template")
    async def test_of_the_option(self, serve, tmp_path):
        source = "MARK {{ messages[0].content }}"
        (tmp_path / "own.jinja").write_text(source)
        for given in (source, str(tmp_path / "own.jinja")):
            assert await prompt_of(serve("--chat-template", given)) == "MARK hi"
        assert await prompt_of(serve()) == "<|user|>hi<|end|><|assistant|>"

    @pytest.mark.option("chat-template")
    async def test_by_name(self, serve, model):
        config = json.loads((model / "tokenizer_config.json").read_text())
        listed = [{"name": "rag", "template": "RAG {{ messages[0].content }}"}, {"name": "tool_use", "template": "T"}]
        (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": listed}))
        (model / "chat_template.json").write_text(json.dumps({"chat_template": {"json": "JSON"}}))
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates/file.jinja").write_text("FILE")
        for name, text in (("rag", "RAG hi"), ("json", "JSON"), ("file", "FILE"), ("tool_use", "T")):
            assert await prompt_of(serve("--chat-template", name)) == text
        assert await prompt_of(serve("--chat-template", "default")) == await prompt_of(serve())
        with pytest.raises(
            ConfigError, match=r"--chat-template: 'rug' .* there are default, file, json, rag, tool_use;"
        ):
            serve("--chat-template", "rug")

    @pytest.mark.option("trust-request-chat-template")
    async def test_of_requests(self, serve):
        body = {"chat_template": "own {{ messages[0].content }}"}
        assert refused(await chat(serve(), **body))["param"] == "chat_template"
        api = serve("--trust-request-chat-template")
        ok(await chat(api, **body))
        assert api.service.adds[0].prompt_token_ids == api.ids("own hi")

    @pytest.mark.option("default-chat-template-kwargs")
    async def test_default_arguments(self, serve):
        api = serve("--default-chat-template-kwargs.loud", "true")
        assert "!" in await prompt_of(api)
        assert "!" not in await prompt_of(api, chat_template_kwargs={"loud": False})
        assert "!" not in await prompt_of(serve())
        with pytest.raises(ConfigError, match=r"--default-chat-template-kwargs: .*'quiet'; it has loud"):
            serve("--default-chat-template-kwargs", '{"quiet": true}')

    @pytest.mark.option("chat-template-content-format")
    async def test_content_format(self, serve):
        kind = "{{ 'text' if messages[0].content is string else 'parts of ' ~ messages[0].content[0].type }}"
        looping = "{% for part in messages[0].content %}({{ part.text }}){% endfor %}"
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        for template, given, seen in (
            (kind, "string", "text"), (kind, "openai", "parts of text"), (kind, "auto", "text"),
            (looping, "auto", "(hi)"), (looping, "openai", "(hi)"), (looping, "string", "()()"),
        ):  # fmt: skip
            api = serve("--chat-template", template, "--chat-template-content-format", given)
            assert await prompt_of(api) == await prompt_of(api, messages=parts) == seen


class TestTokensOnly:
    @pytest.mark.option("tokens-only")
    async def test_the_same_ids_without_text(self, serve):
        usual, api = serve(), serve("--tokens-only")
        for ask, part, logprobs in ((chat, "message", True), (complete, "text", 1)):
            theirs = ok(await ask(usual, return_token_ids=True))["choices"][0]
            ours = ok(await ask(api, logprobs=logprobs))["choices"][0]
            assert ours["token_ids"] == theirs["token_ids"] == api.ids("Hel") + api.ids("lo")
            assert (ours[part]["content"] if part == "message" else ours[part]) == ""
            assert "token_id:" in json.dumps(ours["logprobs"])
            chunks = events(await ask(api, stream=True))
            assert joined(chunks) == ""
            ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
            assert ids == theirs["token_ids"]
            assert finish(chunks) == ["length"]

    async def test_what_needs_text_is_refused(self, serve):
        api = serve("--tokens-only")
        assert refused(await complete(api, stop="x"))["param"] == "stop"
        assert refused(await complete(api, echo=True))["param"] == "echo"
        assert refused(await api.request("POST", "/detokenize", json={"tokens": [5]}))["param"] == "tokens"
        body = {"prompt": "hi", "return_token_strs": True}
        assert refused(await api.request("POST", "/tokenize", json=body))["param"] == "return_token_strs"
        ok(await complete(api, bad_words=["x"], stop_token_ids=[5]))

    @pytest.mark.option("skip-tokenizer-init")
    async def test_without_a_tokenizer(self, serve, model):
        for name in TOKENIZER_FILES:
            (model / name).unlink()
        api = serve("--skip-tokenizer-init")
        api.scripts(Script([[70], [71, 72]]))
        choice = ok(await complete(api, prompt=[5, 6, 7], logprobs=1))["choices"][0]
        assert (choice["token_ids"], choice["text"]) == ([70, 71, 72], "")
        assert choice["logprobs"]["tokens"] == ["token_id:70", "token_id:71", "token_id:72"]
        assert api.service.adds[0].prompt_token_ids == [5, 6, 7]
        assert refused(await complete(api))["param"] == "prompt"
        assert refused(await chat(api))["param"] == "messages"
        assert refused(await complete(api, prompt=[5], bad_words=["x"]))["param"] == "bad_words"
        assert refused(await api.request("POST", "/tokenize", json={"prompt": "hi"}))["param"] == "prompt"
        assert refused(await api.request("POST", "/detokenize", json={"tokens": [5]}))["param"] == "tokens"


@pytest.mark.option("enable-prompt-tokens-details")
async def test_prompt_tokens_details(serve):
    for flags, details in ((["--enable-prompt-tokens-details"], {"cached_tokens": 0}), ([], None)):
        assert ok(await complete(serve(*flags)))["usage"]["prompt_tokens_details"] == details


@pytest.mark.option("tokenizer")
async def test_another_tokenizer(serve, tmp_path):
    other = write_folder(tmp_path / "other", sentencepiece_backend(), {})
    ids = [
        ok(await api.request("POST", "/tokenize", json={"prompt": "the hat"}))["tokens"]
        for api in (serve(), serve("--tokenizer", str(other)))
    ]
    assert ids[0] == byte_level_backend().encode("the hat").ids
    assert ids[1] == sentencepiece_backend().encode("the hat").ids


@pytest.mark.option("return-tokens-as-token-ids")
async def test_tokens_as_ids(serve):
    ids = serve().ids("Hel") + serve().ids("lo")
    reply = ok(await complete(serve("--return-tokens-as-token-ids"), logprobs=0))
    assert reply["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert ok(await complete(serve(), logprobs=0))["choices"][0]["logprobs"]["tokens"][0] != f"token_id:{ids[0]}"


@pytest.mark.option("served-model-name")
async def test_names(serve, model):
    api = serve("--served-model-name", "a", "b")
    for ask in (chat, complete):
        for name in ("a", "b"):
            assert ok(await ask(api, model=name))["model"] == "a"
            assert {chunk["model"] for chunk in events(await ask(api, model=name, stream=True))} == {"a"}
        refused(await ask(api, model="c"), 404)
    assert ok(await chat(serve(), model=str(model)))["model"] == str(model)


@pytest.mark.option("max-model-len")
async def test_lengths(serve):
    async def shown(api: Harness) -> int:
        return ok(await api.request("GET", "/v1/models"))["data"][0]["max_model_len"]

    api = serve("--max-model-len", "64")
    assert await shown(api) == 64
    ok(await complete(api, prompt=[5] * 60, max_tokens=4))
    assert refused(await complete(api, prompt=[5] * 60, max_tokens=5))["code"] == "context_length_exceeded"
    assert await shown(serve("--max-model-len", "1K")) == 1024
    assert await shown(serve()) == 4096
    for auto in ("auto", "-1"):
        assert await shown(serve("--max-model-len", auto, "--kv-cache-memory-bytes", "64K")) < 4096


@pytest.mark.option("max-logprobs")
async def test_logprobs(serve):
    api = serve("--max-logprobs", "5")
    assert refused(await complete(api, logprobs=6))["param"] == "logprobs"
    assert refused(await chat(api, logprobs=True, top_logprobs=6))["param"] == "top_logprobs"
    ok(await complete(api, logprobs=5))
    whole = serve("--max-logprobs", "-1")
    whole.scripts(Script([[0]]))
    top = ok(await complete(whole, logprobs=1000, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert len(top["top_logprobs"][0]) == 1000


class TestDefaults:
    @pytest.mark.option("generation-config")
    async def test_a_limit_of_the_model(self, serve, model, tmp_path):
        (model / "generation_config.json").write_text('{"max_new_tokens": 5, "temperature": 0.5}')
        (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3}')
        for flags, chat_length, temperature in (
            ([], 5, 0.5),
            (["--generation-config", "vllm"], 12, 1.0),
            (["--generation-config", str(tmp_path)], 3, 1.0),
        ):
            api = serve(*flags)
            api.scripts(Script([[70 + i] for i in range(12)]))
            for body in ({}, {"max_tokens": 12}):
                assert ok(await chat(api, **body))["usage"]["completion_tokens"] == chat_length
                assert ok(await complete(api, **body))["usage"]["completion_tokens"] == min(chat_length, 16)
            assert ok(await chat(api, max_tokens=2))["usage"]["completion_tokens"] == 2
            assert api.service.adds[0].sampling.temperature == temperature

    @pytest.mark.option("override-generation-config")
    async def test_overridden(self, serve, model):
        (model / "generation_config.json").write_text('{"top_k": 5, "temperature": 0.5}')
        override = ["--override-generation-config", '{"temperature": 0}']
        for flags, top_k in (([], 5), (["--generation-config", "vllm"], 0)):
            api = serve(*override, *flags)
            ok(await chat(api))
            ok(await chat(api, temperature=0.75))
            assert [add.sampling.temperature for add in api.service.adds] == [0, 0.75]
            assert api.service.adds[0].sampling.top_k == top_k

    @pytest.mark.option("seed")
    async def test_seeds_of_requests(self, serve):
        async def drawn(*flags: str) -> list[int | None]:
            api = serve(*flags)
            for _ in range(3):
                ok(await complete(api))
            return [add.sampling.seed for add in api.service.adds]

        assert await drawn() == await drawn("--seed", "0")
        assert not set(await drawn("--seed", "1")) & set(await drawn())


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL_PLUGIN = """
from rayllm.parsers.parser import ToolParser
from rayllm.parsers.registry import register_tool_parser

@register_tool_parser("my_parser")
class MyParser(ToolParser):
    openers = ("<call>",)

    def calls(self, opener):
        name = []
        yield from self.reader.through(("</call>",), name.append)
        self.start("".join(name))
        self.arguments("{}")
        self.end()
"""
REASONING_PLUGIN = """
from rayllm.parsers.parser import ReasoningParser
from rayllm.parsers.registry import register_reasoning_parser

@register_reasoning_parser("my_thoughts")
class MyThoughts(ReasoningParser):
    def read(self):
        yield from self.reader.through(("#",), self.reasoning)
        self.reader.mark()
        yield from self.reader.rest(self.content)
"""


class TestParsers:
    """What parsers find is tried in `test_parsing.py`."""

    @pytest.mark.option("enable-auto-tool-choice", "tool-call-parser")
    async def test_tool_calls(self, serve):
        api = serve("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        api.script(CALL, finish_reason="stop")
        answer = ok(await chat(api, tools=TOOLS))["choices"][0]
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert answer["finish_reason"] == "tool_calls"
        assert finish(events(await chat(api, tools=TOOLS, stream=True))) == ["tool_calls"]
        assert "--enable-auto-tool-choice" in refused(await chat(serve(), tools=TOOLS))["message"]
        with pytest.raises(ConfigError, match=r"--enable-auto-tool-choice: needs .*; give --tool-call-parser"):
            serve("--enable-auto-tool-choice")
        with pytest.raises(ConfigError, match=r"--tool-call-parser: 'hermez' is no parser; .*hermes, .*xlam"):
            serve("--tool-call-parser", "hermez")

    @pytest.mark.option("exclude-tools-when-tool-choice-none")
    async def test_unused_tools(self, serve, tmp_path):
        template = tmp_path / "tools.jinja"
        template.write_text("{{ tools | tojson if tools else 'none' }}")
        tokens = []
        for more in ([], ["--exclude-tools-when-tool-choice-none"]):
            api = serve("--chat-template", str(template), *more)
            tokens.append(ok(await chat(api, tools=TOOLS, tool_choice="none"))["usage"]["prompt_tokens"])
        assert tokens[1] < tokens[0]

    @pytest.mark.option("reasoning-parser")
    async def test_reasoning(self, serve):
        for arguments in (["--reasoning-parser", "deepseek_r1"],
                          ["--structured-outputs-config.reasoning_parser", "deepseek_r1"]):  # fmt: skip
            api = serve(*arguments)
            api.script("<think>a", "b</thi", "nk>c")
            message = ok(await chat(api))["choices"][0]["message"]
            assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("ab", "ab", "c")
            assert joined(events(await chat(api, stream=True))) == "c"
        with pytest.raises(ConfigError, match=r"--reasoning-parser: 'r1' is no parser; .*deepseek_r1, .*qwen3"):
            serve("--reasoning-parser", "r1")

    @pytest.mark.option("tool-parser-plugin")
    async def test_tool_plugin(self, serve, tmp_path):
        plugin = tmp_path / "mine.py"
        plugin.write_text(TOOL_PLUGIN)
        api = serve("--enable-auto-tool-choice", "--tool-call-parser", "my_parser", "--tool-parser-plugin", str(plugin))
        api.script("ok <call>add</call>", finish_reason="stop")
        message = ok(await chat(api, tools=TOOLS))["choices"][0]["message"]
        assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("ok", "add")
        plugin.with_name("bad.py").write_text("1 / 0")
        for name in ("bad.py", "missing.py", "mine.txt"):
            with pytest.raises(ConfigError, match="--tool-parser-plugin"):
                serve("--tool-parser-plugin", str(plugin.with_name(name)))

    @pytest.mark.option("reasoning-config")
    def test_marks_of_reasoning(self, serve, model) -> None:
        def settings(*arguments: str) -> FrontendSettings:
            return load(parse_arguments((str(model), *arguments), registry())).serve.frontend

        marks = ("--reasoning-config.reasoning_start_str", "[R]", "--reasoning-config.reasoning_end_str", "[/R]")
        assert settings(*marks).reasoning_marks == ("[R]", "[/R]")
        said = ("--reasoning-parser", "qwen3", "--reasoning-config.reasoning_end_str", "Enough.</think>")
        assert settings(*said).reasoning_marks == ("", "Enough.</think>")
        assert settings("--reasoning-config.reasoning_parser", "qwen3").reasoning_parser == "qwen3"
        for wrong, says in (
            (marks[:2], "reasoning_end_str: is missing"),
            (("--reasoning-parser", "qwen3", *marks), "reasoning_start_str: is what"),
            (("--reasoning-config.start", "x"), "start: is unknown"),
            (("--reasoning-config.reasoning_end_str", "3"), "must be a text"),
            (("--reasoning-parser", "qwen3", "--reasoning-config.reasoning_parser", "olmo3"), "give one of them"),
            (
                (
                    "--structured-outputs-config.reasoning_parser",
                    "qwen3",
                    "--reasoning-config.reasoning_parser",
                    "olmo3",
                ),
                "give one of them",
            ),
        ):
            with pytest.raises(ConfigError, match=says):
                serve(*wrong)

    @pytest.mark.option("reasoning-parser-plugin")
    async def test_reasoning_plugin(self, serve, tmp_path):
        plugin = tmp_path / "thoughts.py"
        plugin.write_text(REASONING_PLUGIN)
        api = serve("--reasoning-parser", "my_thoughts", "--reasoning-parser-plugin", str(plugin))
        api.script("abc", "#def")
        message = ok(await chat(api))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("abc", "def")

    async def test_they_need_text(self, serve):
        for arguments in (["--tool-call-parser", "hermes"], ["--reasoning-parser", "qwen3"]):
            with pytest.raises(ConfigError, match="makes none of its answers"):
                serve("--tokens-only", *arguments)
