"""Models by their names on the Hugging Face hub: fetched the first time, found in the cache from then on.

`huggingface_hub` reads the usual variables: `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_TOKEN`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayllm.config.registry import Values
from rayllm.config.weight_files import weight_names
from rayllm.errors import ConfigError

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONFIGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""What belongs to a model beside its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where on this machine the things lie that options name."""

    model: str
    """A folder or a GGUF file."""
    config: str | None = None
    """The folder of config.json, where it is another."""
    tokenizer: str | None = None
    """The folder of the tokenizer, where it is another."""
    code: str | None = None
    """The folder of modelling code of the model's own, where it may be run."""
    asked_hub: bool = False
    """Whether anything of it is on the hub."""


def is_hub_name(name: str) -> bool:
    """Whether this is a name such as `Qwen/Qwen3-0.6B`, and no file or folder here."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def locate(values: Values) -> Places:
    """Find what options name, and fetch what is named by its name on the hub.

    Raises:
        ConfigError: it is on neither side, or the hub cannot be reached or refuses.
    """
    model, tokenizer, config = values["model"], values["tokenizer"], values["hf-config-path"]
    remote = is_hub_name(model)
    if values["revision"] is not None and not remote:
        raise ConfigError("--revision", f"{model} is no name on the hub, and has no revisions", "leave it out")
    tokenizer_revision = values["tokenizer-revision"]
    if tokenizer_revision is not None and not is_hub_name(tokenizer or model):
        raise ConfigError(
            "--tokenizer-revision", f"{tokenizer or model} is no name on the hub, and has no revisions", "leave it out"
        )
    hub = _Hub(values)
    if tokenizer is not None and is_hub_name(tokenizer):
        tokenizer = hub.fetch(tokenizer, tokenizer_revision, "--tokenizer", "--tokenizer-revision")
    elif tokenizer is None and tokenizer_revision is not None:
        tokenizer = hub.fetch(model, tokenizer_revision, "--model", "--tokenizer-revision")
    if config is not None and is_hub_name(config):
        config = hub.fetch(config, None, "--hf-config-path", "--hf-config-path")
    if remote:
        reads_files = values["load-format"] != "dummy" and "tensorizer_uri" not in values["model-loader-extra-config"]
        if reads_files:
            model = hub.fetch_model(model, values["revision"], values["load-format"])
        else:
            model = hub.fetch(model, values["revision"], "--model", "--revision")
    place = Path(config or model)
    code = _code(values, hub, place.parent if place.is_file() else place)
    return Places(model=model, config=config, tokenizer=tokenizer, code=code, asked_hub=hub.asked)


def _code(values: Values, hub: "_Hub", folder: Path) -> str | None:
    """Where the code lies that the config in `folder` names, fetched if it is on the hub; None if none may be run."""
    name, revision = values["model"], values["code-revision"]
    places = {place for place, _, _ in (named.rpartition("--") for named in code_of(folder).values())}
    if not values["trust-remote-code"] or not places:
        if revision is not None:
            why = f"{name} names no code of its own" if values["trust-remote-code"] else "a model's code is not run"
            cure = "leave it out" if values["trust-remote-code"] else "give --trust-remote-code if you trust it"
            raise ConfigError("--code-revision", why, cure)
        return None
    if len(places) > 1:
        raise ConfigError(
            "--trust-remote-code", f"the code of {name} lies in several places, which is not supported", "leave it out"
        )
    place = places.pop() or name
    if is_hub_name(place):
        own = place == name
        option = "--revision" if own and revision is None else "--code-revision"
        of_weights = values["revision"] if own else None
        return hub.fetch(place, revision or of_weights, "--trust-remote-code", option, ("*.py",))
    if revision is not None:
        raise ConfigError("--code-revision", f"{place} is no name on the hub, and has no revisions", "leave it out")
    return str(folder)


def code_of(folder: Path) -> dict[str, str]:
    """The classes of its own that a config names for a language model, as `module.Class` or `owner/name--module.Class`.

    None where there is no config, or it cannot be read, which is told when it is needed.
    """
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"]
        return {kind: str(named[kind]) for kind in ("AutoConfig", "AutoModelForCausalLM") if named.get(kind)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


class _Hub:
    """The hub, as the options about it say."""

    def __init__(self, values: Values) -> None:
        self._ignored = [
            form for pattern in values["ignore-patterns"] for form in (pattern, pattern.replace("**/", ""))
        ]
        self._folder, self._token = values["download-dir"], values["hf-token"]
        self.asked = False
        """Whether anything was fetched, or found in the hub's cache."""

    def fetch_model(self, name: str, revision: str | None, load_format: str) -> str:
        """A model with its weights: the folder, or the GGUF file that it is."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        folder = self.fetch(name, revision, "--model", "--revision")
        commit = Path(folder).name
        try:
            tree = get_cached_repo_tree(name, revision=commit, cache_dir=self._folder)
        except CachedRepoTreeNotFoundError:
            return folder  # Put into the cache by an older library, as a whole.
        names = [file.path for file in tree]
        format_, wanted = weight_names(names, load_format, self._ignored)
        if not wanted and load_format == "auto":
            format_, wanted = weight_names(names, "gguf", self._ignored)
        if not wanted:
            raise ConfigError("--model", f"{name} holds no weights that --load-format {load_format} can read")
        if format_ == "gguf" and len(wanted) > 1:
            raise ConfigError("--model", f"{name} holds {len(wanted)} GGUF files", "fetch one, and give its path")
        folder = self.fetch(name, commit, "--model", "--revision", [*_CONFIGS, *wanted])
        return str(Path(folder) / wanted[0]) if format_ == "gguf" else folder

    def fetch(
        self, name: str, revision: str | None, option: str, revision_option: str, patterns: Sequence[str] = _CONFIGS
    ) -> str:
        """The folder of the files that fit `patterns`."""
        self.asked = True
        from httpx2 import HTTPError
        from huggingface_hub import snapshot_download

        wanted: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": self._ignored}
        try:
            folder = snapshot_download(name, revision=revision, cache_dir=self._folder, token=self._token, **wanted)
        except (HTTPError, OSError, ValueError) as error:
            raise _refusal(error, name, revision, option, revision_option) from None
        return str(folder)


def _refusal(error: Exception, name: str, revision: str | None, option: str, revision_option: str) -> ConfigError:
    """The hub client's error as one of ours."""
    from huggingface_hub import errors

    match error:
        case errors.RevisionNotFoundError():
            return ConfigError(revision_option, f"{name} has no revision {revision!r}", "give a branch, tag or commit")
        case errors.GatedRepoError():
            return ConfigError(option, f"access to {name} has to be asked for", "give --hf-token of who has it")
        case errors.RepositoryNotFoundError():
            reason = f"{name} is neither a file or folder here nor on the hub"
            return ConfigError(option, reason, "check the name; a private one needs --hf-token")
        case errors.LocalTokenNotFoundError():
            return ConfigError("--hf-token", "no token is stored on this machine", "run `hf auth login`, or give one")
        case errors.LocalEntryNotFoundError():
            at = f" at revision {revision}" if revision else ""
            cause = _first_line(error.__cause__ or error)
            reason = (
                f"{name}{at} is neither a file or folder here nor in the cache, and the hub does not give it ({cause})"
            )
            return ConfigError(option, reason, "go online (unset HF_HUB_OFFLINE), or give the path of a folder")
    return ConfigError(option, f"{name} cannot be fetched ({_first_line(error)})")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
