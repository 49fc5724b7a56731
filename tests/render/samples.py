"""Small tokenizers and odd texts for the tests."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from rayllm.render.tokenizer import SpecialTokens, Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ODD_TEXTS = [
    "",
    " ",
    "  ",
    "\n\n \t",
    "Hello, world!",
    " leading and trailing ",
    "naïve café — “quotes”",
    "龜🫠é한ñ",
    "👩‍👩‍👧‍👦 family",
    "a\u0301 combining",
    "\u200b\xa0\u3000 odd spaces",
    "tabs\tand\r\nlines",
    "\U0001f600" * 3,
    "don't we'll I'M",
    "x =  12345;",
    "\x00\x7f",
    "<|end|> and <|assistant|>",
]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE over all bytes with a few merges, and three special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog", "Hello, world! café 龜🫠"] * 4, trainer)
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback, a start token, and a space put before a text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for token in ["\u2581", *"abcdefghijklmnopqrstuvwxyzHW,!", "th", "the", "\u2581the", "\u2581H", "é"]:
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "H")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_level(template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """A tokenizer around `byte_level_backend`, with end token `<|end|>`."""
    special = SpecialTokens(eos_id=0, ids=frozenset({0, 1, 2}), named={"eos_token": "<|end|>"})
    return Tokenizer(byte_level_backend(), special, {"default": template} if template else {})


def sentencepiece() -> Tokenizer:
    """A tokenizer around `sentencepiece_backend`."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special = SpecialTokens(bos_id=1, eos_id=2, ids=frozenset({0, 1, 2}), named=named)
    return Tokenizer(sentencepiece_backend(), special, {})


def write_folder(folder: Path, backend: tokenizers.Tokenizer, config: dict, template: str | None = None) -> Path:
    """A model folder with tokenizer files only."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
