"""Chat templates and the messages they get."""

import pytest

from rayllm.errors import ConfigError, RequestError
from rayllm.render.chat import ChatTemplate
from rayllm.render.renderer import Renderer
from rayllm.render.tokenizer import Tokenizer

from .samples import CHAT_TEMPLATE, byte_level, byte_level_backend, sentencepiece

USER = {"role": "user", "content": "hi"}
PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}", {})
DUMP = ChatTemplate("{{ messages | tojson }}", {})
PARTS = ChatTemplate("{% for m in messages %}{% for p in m['content'] %}({{ p.text }}){% endfor %}{% endfor %}", {})
EITHER = ChatTemplate(
    "{% for m in messages %}{% set c = m.content %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}({{ p['text'] }}){% endfor %}{% endif %}{% endfor %}",
    {},
)


class TestEnvironment:
    def test_blocks_are_trimmed(self):
        template = ChatTemplate(
            "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}", {}
        )
        assert template.render([USER]) == "hi\n"

    def test_tojson_does_not_escape_html_or_letters(self):
        assert ChatTemplate("{{ tools | tojson }}", {}).render([USER], [{"a": "<é>&'"}]) == '[{"a": "<é>&\'"}]'
        assert ChatTemplate("{{ tools | tojson(indent=1) }}", {}).render([USER], [1]) == "[\n 1\n]"

    def test_loop_controls_and_generation_tag(self):
        source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        assert ChatTemplate(source, {}).render([USER, USER]) == "hi"

    def test_named_tokens_and_date(self):
        assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render([USER]) == "<s>"
        assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([USER]).startswith("2")

    def test_the_template_can_refuse(self):
        with pytest.raises(RequestError, match="roles must alternate"):
            ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([USER])

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[0].content + 1 }}",
            "{{ nothing.at.all }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ 1 // 0 }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_any_failure_is_the_request_s(self, source):
        with pytest.raises(RequestError) as caught:
            ChatTemplate(source, {}).render([USER])
        assert caught.value.param == "messages"
        assert "Error" not in caught.value.message


class TestContents:
    def test_text_stays_text(self):
        for template in (PLAIN, EITHER):
            assert "hi" in template.render([USER])
        assert EITHER.render([USER]) == "hi"

    def test_parts_are_joined_for_a_template_of_texts(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert PLAIN.render([{"role": "user", "content": parts}]) == "[user:a\nb]"

    def test_parts_stay_parts_where_the_template_loops_over_them(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for template in (PARTS, EITHER):
            assert template.render([{"role": "user", "content": parts}]) == "(a)(b)"

    def test_text_becomes_a_part_where_the_template_only_takes_parts(self):
        assert PARTS.render([USER]) == "(hi)"

    @pytest.mark.parametrize(
        ("message", "place"),
        [
            ("hi", "messages[0]"),
            ({"content": "hi"}, "messages[0].role"),
            ({"role": "a b", "content": "hi"}, "messages[0].role"),
            ({"role": "user"}, "messages[0].content"),
            ({"role": "user", "content": 3}, "messages[0].content"),
            ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
            ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
            ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
            ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ],
    )
    def test_malformed_messages_are_named(self, message, place):
        with pytest.raises(RequestError) as caught:
            PLAIN.render([message])
        assert caught.value.param == place

    def test_no_messages(self):
        with pytest.raises(RequestError, match="empty"):
            PLAIN.render([])

    def test_developer_is_system_unless_the_template_knows_it(self):
        message = {"role": "developer", "content": "x"}
        assert PLAIN.render([message]) == "[system:x]"
        knows = ChatTemplate("{% if messages[0].role == 'developer' %}yes{% endif %}", {})
        assert knows.render([message]) == "yes"


class TestToolCalls:
    @pytest.mark.parametrize(
        ("arguments", "shown"),
        [
            ('{"a": 1}', {"a": 1}),
            ({"a": 1}, {"a": 1}),
            ("", {}),
            (None, {}),
            ('{"a": 1, "b": ', '{"a": 1, "b": '),
            ('"text"', '"text"'),
            ("null", "null"),
            ("[" * 100_000, "[" * 100_000),
        ],
    )
    def test_arguments_become_objects_where_they_are_sound(self, arguments, shown):
        import json

        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        text = DUMP.render([{"role": "assistant", "content": None, "tool_calls": [call]}])
        message = json.loads(text)[0]
        assert message["tool_calls"][0]["function"]["arguments"] == shown
        assert message["content"] == ""

    def test_no_calls_are_no_field(self):
        assert "tool_calls" not in DUMP.render([{"role": "assistant", "content": "x", "tool_calls": []}])

    def test_the_client_s_messages_are_not_changed(self):
        call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
        message = {"role": "assistant", "tool_calls": [call]}
        DUMP.render([message])
        assert message == {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        }


class TestOptions:
    def test_continue_final_message(self):
        source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        messages = [USER, {"role": "assistant", "content": "Sure "}]
        text = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text == "<user>hi</><assistant>Sure "
        trims = ChatTemplate(source.replace("m.content", "m.content | trim"), {})
        text = trims.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text == "<user>hi</><assistant>Sure"

    def test_continue_needs_the_final_message_in_the_text(self):
        with pytest.raises(RequestError):
            ChatTemplate("x", {}).render([USER], continue_final_message=True)

    def test_documents_and_variables_must_be_known_to_the_template(self):
        template = ChatTemplate("{{ documents | length }}{{ thinking }}", {})
        assert template.render([USER], documents=[{"text": "d"}], kwargs={"thinking": 5}) == "15"
        with pytest.raises(RequestError, match="thinking"):
            PLAIN.render([USER], kwargs={"thinking": True})
        with pytest.raises(RequestError, match="documents"):
            PLAIN.render([USER], documents=[{"text": "d"}])
        with pytest.raises(RequestError, match="messages"):
            template.render([USER], kwargs={"messages": []})


class TestRenderer:
    def test_chat_to_ids(self):
        renderer = Renderer(byte_level())
        ids = renderer.render_chat([USER], None, {})
        assert renderer.detokenize(ids) == "<|user|>hi<|end|><|assistant|>"
        assert renderer.detokenize(renderer.render_chat([USER], None, {"add_generation_prompt": False})).endswith(
            "<|end|>"
        )

    def test_no_template(self):
        with pytest.raises(RequestError, match="template"):
            Renderer(byte_level(template=None)).render_chat([USER], None, {})

    def test_tool_template(self):
        tokenizer = byte_level()
        tokenizer.chat_templates["tool_use"] = "tools"
        renderer = Renderer(tokenizer)
        assert renderer.render_text([USER], [{"type": "function"}], {}) == "tools"
        assert renderer.render_text([USER], None, {}) != "tools"

    def test_template_of_the_request(self):
        renderer = Renderer(byte_level())
        for i in range(40):
            assert renderer.render_text([USER], None, {"chat_template": f"{i}"}) == str(i)
        with pytest.raises(RequestError, match="template"):
            renderer.render_text([USER], None, {"chat_template": "{% if %}"})

    def test_template_of_the_option(self):
        with pytest.raises(ConfigError, match="template"):
            Renderer(byte_level(), "{% if %}")

    def test_description(self):
        one, special = byte_level(), byte_level().special
        assert Renderer(one).describe() == {"chat_template": CHAT_TEMPLATE}
        assert Renderer(one, "T").describe() == {"chat_template": "T"}
        config = {"tokenizer_class": "C"}
        several = Tokenizer(byte_level_backend(), special, {"default": "D", "tool_use": "T"}, config=config)
        listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        assert Renderer(several).describe() == {**config, "chat_template": listed}
        assert Renderer(byte_level(template=None)).describe() == {"chat_template": None}

    def test_default_arguments_go_to_templates_that_know_them(self):
        templates = {"default": "{{ a }}", "tool_use": "{{ b }}"}
        tokenizer = Tokenizer(byte_level_backend(), byte_level().special, templates)
        renderer = Renderer(tokenizer, template_kwargs={"a": 1, "b": 2})
        assert renderer.render_text([USER], None, {}) == "1"
        assert renderer.render_text([USER], [{"type": "function"}], {}) == "2"
        assert renderer.render_text([USER], None, {"chat_template": "{{ b }}"}) == "2"
        with pytest.raises(ConfigError, match="'messages'"):
            Renderer(tokenizer, template_kwargs={"messages": 1})
        Renderer(byte_level(template=None), template_kwargs={"a": 1})

    def test_half_a_surrogate_pair(self):
        with pytest.raises(RequestError):
            Renderer(byte_level()).render_chat([{"role": "user", "content": "\ud83d"}], None, {})

    def test_bad_words_are_spelled_with_and_without_a_space(self):
        for tokenizer in (byte_level(), sentencepiece()):
            texts = {tokenizer.decode(ids, continues=True) for ids in Renderer(tokenizer).bad_words_ids(["the"])}
            assert texts == {"the", " the"}

    @pytest.mark.smollm2
    def test_smollm2_equals_transformers(self):
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = Tokenizer.load("models/SmolLM2-135M-Instruct.Q4_1.gguf")
        messages = [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "é\n"}]
        for conversation in (messages, [{"role": "system", "content": "s"}, *messages]):
            for generation in (True, False):
                theirs, _ = render_jinja_template(
                    [conversation],
                    chat_template=tokenizer.chat_templates["default"],
                    add_generation_prompt=generation,
                    **tokenizer.special.named,
                )
                options = {"add_generation_prompt": generation}
                assert Renderer(tokenizer).render_text(conversation, None, options) == theirs[0]


def test_sample_template_is_plain():
    assert ChatTemplate(CHAT_TEMPLATE, {}).render([USER], add_generation_prompt=False) == "<|user|>hi<|end|>"
