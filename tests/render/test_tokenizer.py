"""Tokenizers: the ids and texts of the `tokenizers` library, special tokens, loading from folders and GGUF files."""

import json
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayllm.errors import ModelError, RequestError
from rayllm.render.tokenizer import Tokenizer

from .samples import (
    CHAT_TEMPLATE,
    ODD_TEXTS,
    byte_level,
    byte_level_backend,
    sentencepiece,
    sentencepiece_backend,
    write_folder,
)

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
BACKEND = byte_level_backend()


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_encode_and_decode_agree_with_the_library(text):
    for tokenizer, backend in ((BYTE_LEVEL, byte_level_backend()), (SENTENCEPIECE, sentencepiece_backend())):
        for add in (True, False):
            ids = tokenizer.encode(text, add)
            assert ids == backend.encode(text, add_special_tokens=add).ids
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 350), max_size=20))
def test_decoding_any_byte_level_tokens_agrees_with_the_library(ids):
    assert BYTE_LEVEL.decode(ids) == BACKEND.decode(ids)


def test_start_token_is_added_where_asked():
    assert SENTENCEPIECE.encode("the")[0] == 1
    assert 1 not in SENTENCEPIECE.encode("the", add_special_tokens=False)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="surrogate"):
        BYTE_LEVEL.encode("bad \ud83d tail")


def test_bytes_of_tokens():
    ids = BYTE_LEVEL.encode("é🫡", add_special_tokens=False)
    assert b"".join(map(BYTE_LEVEL.piece, ids)) == "é🫡".encode()
    assert SENTENCEPIECE.piece(3 + 0xE9) == b"\xe9"
    assert SENTENCEPIECE.piece(SENTENCEPIECE.token_to_id("\u2581the")) == b" the"
    assert BYTE_LEVEL.piece(10**6) == b""


def test_text_of_a_token_names_bytes_that_are_no_character():
    assert SENTENCEPIECE.token_text(3 + 0xE9) == "bytes:\\xe9"
    assert SENTENCEPIECE.token_text(SENTENCEPIECE.token_to_id("\u2581the")) == " the"


class TestFolder:
    def test_special_tokens_and_template(self, tmp_path):
        config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|new|>", "extra_special_tokens": ["<|user|>"]}
        tokenizer = Tokenizer.load(str(write_folder(tmp_path, byte_level_backend(), config, CHAT_TEMPLATE)))
        assert (tokenizer.special.eos_id, tokenizer.special.bos_id) == (0, byte_level_backend().get_vocab_size())
        assert tokenizer.special.named == {"eos_token": "<|end|>", "bos_token": "<|new|>"}
        assert tokenizer.decode(tokenizer.encode("a<|new|><|user|>b")) == "ab"
        assert tokenizer.chat_templates == {"default": CHAT_TEMPLATE}

    def test_templates_in_the_configuration(self, tmp_path):
        named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        for value, wanted in (("A", {"default": "A"}), (named, {"default": "A", "tool_use": "B"})):
            folder = write_folder(tmp_path, byte_level_backend(), {"chat_template": value})
            assert Tokenizer.load(str(folder)).chat_templates == wanted
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
        assert Tokenizer.load(str(tmp_path)).chat_templates["default"] == "C"

    def test_truncation_in_the_file_is_off(self, tmp_path):
        backend = byte_level_backend()
        backend.enable_truncation(2)
        tokenizer = Tokenizer.load(str(write_folder(tmp_path, backend, {})))
        assert len(tokenizer.encode("a b c d e f")) > 2

    def test_missing_and_damaged_files_are_named(self, tmp_path):
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer.load(str(tmp_path))
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer.load(str(tmp_path))


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    items = b"".join(gguf_value(item)[4:] for item in value)
    return struct.pack("<I", 9) + gguf_value(value[0])[:4] + struct.pack("<Q", len(value)) + items


def write_gguf(path, pairs: dict) -> str:
    body = b"".join(gguf_string(key) + gguf_value(value) for key, value in pairs.items())
    tensor = gguf_string("t") + struct.pack("<IQIQ", 1, 1, 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + body + tensor + bytes(64))
    return str(path)


def vocabulary(backend) -> list[str]:
    return [backend.id_to_token(i) for i in range(backend.get_vocab_size())]


class TestGguf:
    def byte_level_pairs(self) -> dict:
        backend = byte_level_backend()
        merges = json.loads(backend.to_str())["model"]["merges"]
        return {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": vocabulary(backend),
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (backend.get_vocab_size() - 3),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }

    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_byte_level(self, tmp_path, text):
        tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", self.byte_level_pairs()))
        assert tokenizer.encode(text) == BYTE_LEVEL.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == BYTE_LEVEL.decode(BYTE_LEVEL.encode(text))
        assert tokenizer.special.ids == {0, 1, 2}
        assert tokenizer.special.named == {"eos_token": "<|end|>"}
        assert tokenizer.chat_templates == {"default": CHAT_TEMPLATE}

    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_sentencepiece(self, tmp_path, text):
        backend = sentencepiece_backend()
        tokens = vocabulary(backend)
        scores = [0.0] * len(tokens)
        for rank, token in enumerate(["th", "the", "\u2581the", "\u2581H"]):
            scores[tokens.index(token)] = -float(rank)
        scores = [score if score or token == "th" else -1e9 for score, token in zip(scores, tokens, strict=True)]
        pairs = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))
        assert tokenizer.encode(text) == SENTENCEPIECE.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == SENTENCEPIECE.decode(SENTENCEPIECE.encode(text))

    @pytest.mark.parametrize(
        ("pre", "cut"),
        [("llama-bpe", ["I", "'m", " ", " ", "123", "45"]), ("qwen2", ["I", "'m", " ", " ", *"12345"])],
    )
    def test_kinds_of_cutting(self, tmp_path, pre, cut):
        tokens = sorted({*vocabulary(byte_level_backend()), "123", "45", "'m"})
        pairs = {**self.byte_level_pairs(), "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens}
        pairs["tokenizer.ggml.token_type"] = [1] * len(tokens)
        pairs["tokenizer.ggml.merges"] = ["1 2", "12 3", "4 5", "' m"]
        pairs["tokenizer.ggml.tokens"] = tokens = [*tokens, "12"]
        pairs["tokenizer.ggml.token_type"].append(1)
        tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))
        assert [tokenizer.token_text(i) for i in tokenizer.encode("I'm  12345", False)] == cut

    def test_what_is_not_supported_is_refused_by_name(self, tmp_path):
        for key, value in (("tokenizer.ggml.model", "rwkv"), ("tokenizer.ggml.pre", "unheard-of")):
            path = write_gguf(tmp_path / "m.gguf", {**self.byte_level_pairs(), key: value})
            with pytest.raises(ModelError, match=value):
                Tokenizer.load(path)

    def test_a_damaged_file_is_refused_by_name(self, tmp_path):
        path = tmp_path / "m.gguf"
        write_gguf(path, self.byte_level_pairs())
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(ModelError, match=r"m\.gguf"):
            Tokenizer.load(str(path))

    def test_a_file_without_vocabulary_is_refused(self, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"})
        with pytest.raises(ModelError, match="vocabulary"):
            Tokenizer.load(path)

    def test_a_file_without_merges_is_refused(self, tmp_path):
        pairs = self.byte_level_pairs()
        del pairs["tokenizer.ggml.merges"]
        with pytest.raises(ModelError, match="merges"):
            Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))


@pytest.mark.smollm2
class TestSmolLM2:
    PATH = "models/SmolLM2-135M-Instruct.Q4_1.gguf"

    def test_loads_quickly(self):
        start = time.perf_counter()
        tokenizer = Tokenizer.load(self.PATH)
        assert time.perf_counter() - start < 1.5
        assert (tokenizer.vocab_size, tokenizer.special.bos_id, tokenizer.special.eos_id) == (49152, 1, 2)
        assert "im_start" in tokenizer.chat_templates["default"]

    @pytest.mark.slow
    def test_ids_equal_those_of_transformers(self):
        import random

        from transformers import AutoTokenizer

        folder, _, name = self.PATH.rpartition("/")
        theirs = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        ours = Tokenizer.load(self.PATH)
        rng = random.Random(0)
        alphabet = "abc 12\n\t  éü龜🫠한\u200b\xa0\u3000<|im_end|>'sThe don't"
        texts = ODD_TEXTS + ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(1000)]
        texts += ["".join(chr(rng.choice([rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000)]))
                          for _ in range(20)) for _ in range(200)]  # fmt: skip
        for text in texts:
            ids = ours.encode(text)
            assert ids == theirs.encode(text), text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids[: len(ids) // 2], False) == theirs.decode(ids[: len(ids) // 2])
