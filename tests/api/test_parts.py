"""Parts of answers, from chunks of chat completions."""

from rayllm.api.parts import Parts

from .chunks import chunk, chunks, whole

KINDS = [("reasoning", "Let me see."), ("text", "I look it up."), ("tool_call", '{"a": 1}'), ("tool_call", "{}")]


def test_streamed_and_whole_agree():
    streamed, at_once = Parts(), Parts()
    changes = [change for events in chunks() for change in streamed.read(events)]
    at_once.read_whole(whole())
    for parts in (streamed, at_once):
        assert [(part.kind, part.text) for part in parts.all] == KINDS
        assert [part.index for part in parts.all] == [0, 1, 2, 3]
        assert [(part.call_id, part.name) for part in parts.all[2:]] == [("c0", "add"), ("c1", "now")]
        assert parts.finish_reason == "tool_calls"
    for i, (_, text) in enumerate(KINDS):
        own = [change for change in changes if change.part.index == i]
        assert [change.what for change in own] == ["begin", *["more"] * (len(own) - 2), "end"]
        assert "".join(change.text for change in own) == text
    assert [change.part.index for change in changes] == sorted(change.part.index for change in changes)


def test_text_after_a_call_is_a_part_of_its_own():
    parts = Parts()
    for delta in ({"content": "a"}, {"reasoning_content": "b"}, {"content": "c"}):
        list(parts.read(chunk(delta)))
    list(parts.read(chunk({}, "stop")))
    assert [part.kind for part in parts.all] == ["text", "reasoning", "text"]


def test_an_empty_answer_has_no_parts():
    parts = Parts()
    assert list(parts.read(chunk({"role": "assistant", "content": ""}) + chunk({}, "stop") + b"data: [DONE]\n\n")) == []
    assert (parts.all, parts.finish_reason) == ([], "stop")
