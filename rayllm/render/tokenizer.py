"""Text to token ids and back, on top of the `tokenizers` library; nothing here imports torch.

Decoding works on bytes: every token stands for some bytes (`piece`), and a text is the joined bytes read as UTF-8,
invalid sequences replaced by U+FFFD as the Unicode standard recommends. That makes decoding a plain left-to-right
pass, so the text of a stream is the text of the whole. It agrees with the decoders of `tokenizers` but for invalid
runs of byte-fallback tokens, each byte of which those replace, valid ones included.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from rayllm.errors import ModelError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = {ord(char): byte for byte, char in byte_alphabet().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a model's files say about its special tokens. `ids` are those that decoding can skip."""

    bos_id: int | None = None
    eos_id: int | None = None
    ids: frozenset[int] = frozenset()
    named: Mapping[str, str] = field(default_factory=dict)
    """Texts by Hugging Face's names, such as `bos_token`, for chat templates."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens spell bytes."""

    byte_level: bool
    """Characters of the byte alphabet (GPT-2), else SentencePiece: U+2581 is a space, `<0x0A>` a byte."""
    strip_leading_space: bool = False
    """A text that begins with a space loses it: encoding had put it there."""


class Tokenizer:
    """A tokenizer and what belongs to it: special tokens and chat templates."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_templates: Mapping[str, str],
        source: str = "tokenizer",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`source` names the file in errors; `config` holds settings as in a `tokenizer_config.json`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._source = backend, source
        self.special = special
        self.chat_templates = dict(chat_templates)
        self.config = dict(config or {})
        self._added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        self._decoding = _read_decoder(backend.decoder)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """The tokenizer of a model: a Hugging Face folder, or a GGUF file.

        Raises:
            ModelError: there is none, or its files are damaged.
        """
        # The two loaders know this class; so they are imported here and not above.
        if Path(path).is_file():
            from rayllm.render.tokenizer_gguf import load_gguf_tokenizer

            return load_gguf_tokenizer(path)
        from rayllm.render.tokenizer_hf import load_hf_tokenizer

        return load_hf_tokenizer(path)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model may have more rows than that."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def strips_leading_space(self) -> bool:
        """Whether the space at the very start of a text is not the text's own."""
        return self._decoding_or_refuse().strip_leading_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens in it count as such.

        `add_special_tokens` puts the start (or end) tokens around it that the tokenizer declares.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no encoding can carry.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            check_encodable(text)
            raise

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that stands behind other text, where no space is put in front of it."""
        if not self.strips_leading_space:
            return self.encode(text, add_special_tokens=False)
        newline = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of a sequence of tokens.

        `continues` says that other tokens stand before it, so that a space at its start is its own.
        """
        wanted = [i for i in ids if not (skip_special_tokens and i in self.special.ids)]
        data = b"".join(map(self.piece, wanted))
        if not continues and self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token, which padded vocabularies have."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """A token by itself as text, for logprobs; bytes that are no whole characters as `bytes:\\xe2\\x80`."""
        piece = self.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token written as in the vocabulary, None if there is no such token."""
        return self._backend.token_to_id(token)

    def _spell(self, token_id: int) -> bytes:
        decoding = self._decoding_or_refuse()
        added = self._added.get(token_id)
        token = self._backend.id_to_token(token_id) if added is None else added
        if token is None:
            return b""
        if not decoding.byte_level:
            if added is None and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            return token.replace(_SPACE_MARK, " ").encode()
        if added is None and all(ord(char) in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[ord(char)] for char in token)
        return token.encode()

    def _decoding_or_refuse(self) -> Decoding:
        if self._decoding is None:
            raise ModelError(self._source, "its decoder is not supported, only byte-level BPE and SentencePiece are")
        return self._decoding


def no_tokenizer() -> Tokenizer:
    """A tokenizer without tokens: any text has none, and any token id stands for nothing."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens(), {})


def check_encodable(text: str, param: str | None = None) -> None:
    """Refuse a text with half a surrogate pair.

    Raises:
        RequestError: it has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text holds half of a UTF-16 surrogate pair, which is not a character", param) from None


def _read_decoder(decoder: Any) -> Decoding | None:
    """How a decoder of `tokenizers` spells tokens, None where it is of another kind."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps: Sequence[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Decoding(byte_level=True)
    if "Metaspace" in kinds:
        schemes = {step.get("prepend_scheme") for step in steps if step["type"] == "Metaspace"}
        return Decoding(byte_level=False, strip_leading_space=schemes != {"never"})
    if any(step["type"] == "Replace" and step["content"] == " " for step in steps):
        strips = any(step["type"] == "Strip" and step["content"] == " " and step["start"] for step in steps)
        return Decoding(byte_level=False, strip_leading_space=strips)
    return None
