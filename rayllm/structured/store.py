"""Compiles grammars away from the step loop, and keeps those that may be asked for again."""

import functools
import json
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from rayllm.config.engine import StructuredSettings
from rayllm.config.structured import PACKAGES, installed
from rayllm.errors import Overloaded, RequestError
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import Backend, Grammar, GrammarError, Vocabulary
from rayllm.structured.row import RowGrammar
from rayllm.structured.schemas import refuse_loops

log = logging.getLogger(__name__)

THREADS = 2
NICENESS = 10
"""Of the threads that compile, beside the process's own, on Linux: steps go first."""
MOST_KEPT = 128
MOST_KEPT_TEXT = 8 << 20
"""Characters of the grammars that are kept."""
MOST_PENDING = 128
LONGEST_S = 0.8
"""Seconds after which a grammar that is still being compiled is refused."""


class Grammars:
    """The grammars of one engine. Thread-safe.

    A grammar that an output follows stays known as long as someone holds it; beside those, the last ones are kept.
    """

    def __init__(self, settings: StructuredSettings, ends: tuple[int, ...], load: Callable[[], Vocabulary]) -> None:
        """`ends` are the model's end tokens; `load` reads its vocabulary, at the first request that needs it."""
        self._settings = settings
        self._ends = ends
        self._load = load
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._making = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[bytes, Future[Grammar]] = {}
        self._kept: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()
        self._kept_text = 0
        self._live: weakref.WeakValueDictionary[bytes, Grammar] = weakref.WeakValueDictionary()

    def prepare(self, asked: StructuredOutputs) -> "Future[Grammar]":
        """Compile a grammar, if it is not known. To be held until `get` and as long as `get` may be called again.

        The future raises `RequestError` where the grammar is wrong.

        Raises:
            RequestError: the request's options cannot be had.
            Overloaded: too many grammars are being compiled.
        """
        asked = self._settled(asked)
        key = _key(asked)
        with self._lock:
            known = self._find(key)
            future: Future[Grammar]
            if known is not None:
                future = Future()
                future.set_result(known)
                return future
            if (pending := self._pending.get(key)) is not None:
                return pending
            if len(self._pending) >= MOST_PENDING:
                raise Overloaded(f"{len(self._pending)} grammars are being compiled, which is the limit")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rllm-grammar", initializer=_yield_cpu)
            future = self._pending[key] = Future()
            self._pool.submit(self._answer, key, asked, future)
            return future

    def get(self, asked: StructuredOutputs) -> Grammar:
        """A grammar that was prepared.

        Raises:
            RequestError: it was not, and cannot be compiled now either.
        """
        asked = self._settled(asked)
        key = _key(asked)
        with self._lock:
            known = self._find(key)
        return known if known is not None else self._compile(key, asked, lambda: None)

    def follow(self, sampling: SamplingParams) -> RowGrammar | None:
        """What holds an output to the form that its request asks for, if it asks for any. Call `prepare` before."""
        asked = sampling.structured_outputs
        if asked is None:
            return None
        free = not self._settings.enable_in_reasoning
        return RowGrammar(
            lambda: self.get(asked), asked.after_ids if free else (), self._ends, sampling.stop_token_ids,
            asked.begin_ids if free else (),
        )  # fmt: skip

    @property
    def kept(self) -> int:
        """Grammars kept for requests to come."""
        return len(self._kept)

    def shutdown(self) -> None:
        """End the threads; what is being compiled comes to nothing. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
            pending, self._pending = self._pending, {}
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        for backend in self._backends.values():
            backend.close()
        for future in pending.values():
            future.set_exception(Overloaded("the engine is shutting down"))

    def _find(self, key: bytes) -> Grammar | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._live.get(key)

    def _answer(self, key: bytes, asked: StructuredOutputs, future: "Future[Grammar]") -> None:
        """Compile a grammar for those who wait for it, and let them wait no longer than `LONGEST_S`."""

        def give_up() -> None:
            message = f"{asked.field}: this {asked.form} takes more than {LONGEST_S:g} s to compile; make it smaller"
            self._settle(key, future, RequestError(message, asked.field))

        timer = threading.Timer(LONGEST_S, give_up)
        timer.daemon = True
        try:
            grammar = self._compile(key, asked, timer.start)
        except Exception as error:
            self._settle(key, future, error)
        else:
            self._settle(key, future, grammar)
        finally:
            timer.cancel()

    def _settle(self, key: bytes, future: "Future[Grammar]", answer: Grammar | Exception) -> None:
        with self._lock:
            if self._pending.get(key) is not future:
                return
            del self._pending[key]
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _compile(self, key: bytes, asked: StructuredOutputs, begin: Callable[[], None]) -> Grammar:
        """`begin` is called when the library is there, which takes a second or so for the first grammar."""
        try:
            backend = self._backend(_library(asked))
            began = time.perf_counter()
            begin()
            if asked.form == "json":
                refuse_loops(json.loads(asked.text()))
            grammar = backend.compile(asked)
            self._try_out(grammar)
        except GrammarError as error:
            raise RequestError(f"{asked.field}: this {asked.form} cannot be used: {error}", asked.field) from error
        log.debug("compiled a grammar of form %s in %.3f s", asked.form, time.perf_counter() - began)
        with self._lock:
            self._live[key] = grammar
            if key not in self._kept:
                self._kept[key] = (grammar, len(key))
                self._kept_text += len(key)
            while len(self._kept) > MOST_KEPT or self._kept_text > MOST_KEPT_TEXT:
                self._kept_text -= self._kept.popitem(last=False)[1][1]
        return grammar

    def _try_out(self, grammar: Grammar) -> None:
        """Work a first mask out.

        Raises:
            GrammarError: no output has this form.
        """
        assert self._vocabulary is not None
        bits = np.empty(-(-len(self._vocabulary.pieces) // 32), np.int32)
        RowGrammar(lambda: grammar, (), self._ends, ()).fill(np.empty(0, np.int32), bits)

    def _settled(self, asked: StructuredOutputs) -> StructuredOutputs:
        """The request with all options set, as the server's settings and the form have them."""
        settings = self._settings
        backend = asked.backend or "auto"
        if settings.backend != "auto":
            if backend not in ("auto", settings.backend):
                message = f"{asked.field}: this server uses {settings.backend}, not {backend}; leave backend out"
                raise RequestError(message, asked.field)
            backend = settings.backend  # type: ignore[assignment]
        no_space, no_more = asked.disable_any_whitespace, asked.disable_additional_properties
        settled = msgspec.structs.replace(
            asked, backend=backend, after_ids=(), begin_ids=(),
            disable_any_whitespace=settings.disable_any_whitespace if no_space is None else no_space,
            disable_additional_properties=settings.disable_additional_properties if no_more is None else no_more,
        )  # fmt: skip
        settled = msgspec.structs.replace(settled, backend=_library(settled))
        if not _installed(_library(settled)):
            package = PACKAGES[_library(settled)]
            message = f"{asked.field}: this {asked.form} needs the package {package}, which this server lacks"
            raise RequestError(message, asked.field)
        return settled

    def _backend(self, name: str) -> Backend:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            if name not in self._backends:
                self._backends[name] = build_backend(name, self._vocabulary)
            return self._backends[name]


def build_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """A library with a model's vocabulary. Takes a second or so.

    Raises:
        GrammarError: it cannot read the vocabulary.
    """
    if name == "guidance":
        from rayllm.structured.guidance import Guidance

        return Guidance(vocabulary)
    if name == "xgrammar":
        from rayllm.structured.xgrammar import XGrammar

        return XGrammar(vocabulary)
    from rayllm.structured.outlines import Outlines

    return Outlines(vocabulary)


_installed = functools.cache(installed)


def _library(asked: StructuredOutputs) -> str:
    """The backend of a request; `auto` takes the first that has all it asks for."""
    if asked.backend not in (None, "auto"):
        return str(asked.backend)
    own = asked.structural_tag is not None and "format" in json.loads(asked.text())
    return "xgrammar" if own else "guidance"  # of these notations only one library knows the first


def _key(asked: StructuredOutputs) -> bytes:
    return msgspec.msgpack.encode(asked)


def _yield_cpu() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
