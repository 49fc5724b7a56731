"""Tokenizers of Hugging Face folders: `tokenizer.json`, with special tokens and chat templates beside it."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from rayllm.errors import ModelError
from rayllm.render.tokenizer import SpecialTokens, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_hf_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a folder.

    Start and end tokens are added to a text as the post-processor of `tokenizer.json` says.

    Raises:
        ModelError: `tokenizer.json` is missing, or a file is damaged.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(str(path), "missing; the folder of a model needs a tokenizer in this form")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(str(path), f"not a readable tokenizer: {e}") from e
    config = _read_json(Path(folder) / "tokenizer_config.json")
    named = _named_tokens(Path(folder), config)
    _add_missing(backend, config, named)
    added = backend.get_added_tokens_decoder()
    special = SpecialTokens(
        bos_id=_id_of(backend, named.get("bos_token")),
        eos_id=_id_of(backend, named.get("eos_token")),
        ids=frozenset(id_ for id_, token in added.items() if token.special),
        named=named,
    )
    return Tokenizer(backend, special, _chat_templates(Path(folder), config), str(path), config)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(str(path), f"not readable JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(str(path), "not a JSON object")
    return value


def _content(token: Any) -> str | None:
    """The text of a token, written as a string or as an object with a `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    older = _read_json(folder / "special_tokens_map.json")
    found = {name: _content(config.get(name)) or _content(older.get(name)) for name in _NAMED}
    return {name: text for name, text in found.items() if text}


def _add_missing(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Register tokens that only `tokenizer_config.json` declares, and mark the named ones as special."""
    present = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _content(token)
        if text and text not in present:
            keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
            options = {key: bool(token[key]) for key in keys if key in token}
            backend.add_tokens([tokenizers.AddedToken(text, **options)])
            present[text] = bool(options.get("special"))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = list(extra.values()) if isinstance(extra, dict) else extra
    wanted = [*named.values(), *filter(None, map(_content, listed))]
    missing = [text for text in dict.fromkeys(wanted) if not present.get(text)]
    if missing:
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: files beside the tokenizer win over those in its configuration."""
    templates = _listed(config.get("chat_template"), folder / "tokenizer_config.json")
    in_json = folder / "chat_template.json"
    templates |= _listed(_read_json(in_json).get("chat_template"), in_json)
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    templates.update({name: path.read_text(encoding="utf-8") for name, path in files.items()})
    return templates


def _listed(given: Any, file: Path) -> dict[str, str]:
    """Templates by name, of one text, an object, or a list of objects with `name` and `template`."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    if not isinstance(given, dict) or not all(isinstance(part, str) for item in given.items() for part in item):
        raise ModelError(str(file), "chat_template: neither a text nor texts by name")
    return given
