"""Tokenizers out of GGUF files: vocabulary, merges and special tokens from the keys `tokenizer.ggml.*`."""

from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from rayllm.config.gguf_file import read_gguf
from rayllm.errors import ModelError
from rayllm.render.tokenizer import SpecialTokens, Tokenizer, byte_alphabet

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: matched whole in a text; a control token is also skipped in decoding."""

_CLASSES = {"gpt2": "GPT2Tokenizer", "llama": "LlamaTokenizer"}
"""Hugging Face's classes of these kinds."""

_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    # The reference tokenizers of these two also cut off every digit. No merge of SmolLM's has a digit, so that
    # changes only how spaces before a number are joined; Hugging Face's reading of these files leaves it out,
    # and ours gives the same ids.
    "smollm": None,
    "refact": None,
    "mpt": None,
    "olmo": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""How a text is cut before merging, by `tokenizer.ggml.pre`; None is GPT-2's own pattern."""


def load_gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Its ids are those that Hugging Face's conversion of the file gives, but for two things which that leaves out and
    models were trained with: Qwen's normalization to NFC, and files that say no space is put before a text.

    Raises:
        ModelError: the file is damaged, or its kind of tokenizer is not supported.
    """
    meta = read_gguf(path).metadata
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items() if key.startswith("tokenizer.")}
    kind, tokens = keys.get("model"), keys.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(path, "it holds no vocabulary (tokenizer.ggml.tokens)")
    try:
        if kind == "gpt2":
            backend = _byte_level(keys, path)
        elif kind == "llama":
            backend = _sentencepiece(keys, str(meta.get("general.architecture")))
        else:
            raise ModelError(path, f"tokenizer.ggml.model {kind!r} is not supported, only gpt2 and llama are")
        special = _special_tokens(backend, keys)
    except ModelError:
        raise
    except Exception as e:  # the library raises bare Exception
        raise ModelError(path, f"its tokenizer is damaged: {e}") from e
    prefix = "tokenizer.chat_template."
    templates = {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}
    if isinstance(meta.get("tokenizer.chat_template"), str):
        templates["default"] = meta["tokenizer.chat_template"]
    config: dict[str, Any] = {"tokenizer_class": _CLASSES[kind], **special.named}
    config |= {name: bool(keys[name]) for name in ("add_bos_token", "add_eos_token") if name in keys}
    return Tokenizer(backend, special, templates, path, config)


def _byte_level(keys: dict[str, Any], path: str) -> tokenizers.Tokenizer:
    pre = keys.get("pre", "default")
    if pre not in _SPLITS:
        raise ModelError(path, f"tokenizer.ggml.pre {pre!r} is not supported, only {', '.join(_SPLITS)} are")
    added = set(_of_type(keys, _CONTROL, _USER_DEFINED))
    alphabet = byte_alphabet()
    known = set(alphabet.values())
    vocab = {}
    for i, token in enumerate(keys["tokens"]):
        plain = i in added or known.issuperset(token)
        vocab[token if plain else "".join(alphabet[byte] for byte in token.encode(errors="surrogateescape"))] = i
    ignore_merges = _SPLITS[pre] is _LLAMA3
    model = models.BPE(vocab=vocab, merges=_merges(keys["merges"]), ignore_merges=ignore_merges)
    backend = tokenizers.Tokenizer(model)
    pattern = _SPLITS[pre]
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(keys.get("add_space_prefix")))
    else:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if pattern is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    keys.setdefault("add_bos_token", pattern is _LLAMA3)
    return backend


def _sentencepiece(keys: dict[str, Any], architecture: str) -> tokenizers.Tokenizer:
    tokens: list[str] = keys["tokens"]
    gemma = architecture.startswith("gemma")
    if gemma:  # its files spell tokens of spaces with real spaces
        tokens = ["\u2581" * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    if "merges" in keys:
        merges = _merges(keys["merges"])
    else:
        # Gemma's scores do not follow the order of its merges; the order of the vocabulary does.
        ranks = [-float(i) for i in range(len(tokens))] if gemma else keys["scores"]
        merges = _merges_from_scores(vocab, ranks)
    unknown = tokens[keys.get("unknown_token_id", 0)]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = bool(keys.get("add_space_prefix", not gemma))
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if architecture == "phi3" or gemma:
        replace = normalizers.Replace(" ", "\u2581")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    keys.setdefault("add_bos_token", True)
    return backend


def _merges(lines: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for line in lines:
        left, _, right = line.partition(" ")
        pairs.append((left, right))
    return pairs


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that make a SentencePiece vocabulary: every way to cut a token in two, best-scored tokens first."""
    found = []
    for token, id_ in vocab.items():
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.append((scores[id_], pairs))
    found.sort(key=lambda entry: -entry[0])
    return [pair for _, pairs in found for pair in pairs]


def _of_type(keys: dict[str, Any], *types: int) -> list[int]:
    return [i for i, kind in enumerate(keys.get("token_type") or ()) if kind in types]


def _special_tokens(backend: tokenizers.Tokenizer, keys: dict[str, Any]) -> SpecialTokens:
    tokens: list[str] = keys["tokens"]
    control = [AddedToken(tokens[i], normalized=False, special=True) for i in _of_type(keys, _CONTROL)]
    user_defined = [AddedToken(tokens[i], normalized=False, special=False) for i in _of_type(keys, _USER_DEFINED)]
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)
    ids = {name: keys.get(f"{key}_token_id") for name, key in _NAMES.items()}
    named = {name: tokens[id_] for name, id_ in ids.items() if id_ is not None and id_ < len(tokens)}
    bos = [named["bos_token"]] if keys.get("add_bos_token") and "bos_token" in named else []
    eos = [named["eos_token"]] if keys.get("add_eos_token") and "eos_token" in named else []
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], special_tokens=[(text, backend.token_to_id(text)) for text in {*bos, *eos}]
        )
    added = backend.get_added_tokens_decoder()
    return SpecialTokens(
        bos_id=ids["bos_token"] if "bos_token" in named else None,
        eos_id=ids["eos_token"] if "eos_token" in named else None,
        ids=frozenset(i for i, token in added.items() if token.special),
        named=named,
    )
