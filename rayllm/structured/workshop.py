"""A process in which libraries compile that know no limits themselves. Each grammar is made in a fork of it, which is
killed when it takes too long or too much memory, or crashes; only bytes come back.
"""

import importlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import GrammarError, Vocabulary

MAKING_S = 0.4
MOST_MEMORY = 2 << 30
"""Bytes that a fork may take beside what the process had."""
MOST_BYTES = 64 << 20
"""Of a compiled grammar."""
NICENESS = 10
_LENGTH = struct.Struct(">I")


class Spelling(msgspec.Struct, frozen=True):
    """What of a vocabulary a library needs; see `Vocabulary`."""

    pieces: list[bytes]
    special: list[int]
    ends: tuple[int, ...]


class Maker(Protocol):
    """Compiles, in the process."""

    def make(self, asked: StructuredOutputs) -> bytes:
        """A compiled grammar.

        Raises:
            Exception: whatever the library has to say.
        """
        ...


class Workshop:
    """The process as its owner sees it: started by the first grammar, and again after it was lost. Thread-safe."""

    def __init__(self, library: str, vocabulary: Vocabulary) -> None:
        """`library` is a module of this package with a class `Maker`."""
        self._library = library
        self._spelling = Spelling(vocabulary.pieces, sorted(vocabulary.special), vocabulary.ends)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, if it does not run. Takes seconds.

        Raises:
            GrammarError: it cannot be started.
        """
        with self._lock:
            self._running()

    def make(self, asked: StructuredOutputs) -> bytes:
        """A compiled grammar.

        Raises:
            GrammarError: it is wrong, takes too much, or made the library crash.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _write(process.stdin, asked)
                made: bytes | str = msgspec.msgpack.decode(_read(process.stdout))
            except (OSError, EOFError) as error:
                self.close()
                raise GrammarError("the library's process was lost; try again") from error
        if isinstance(made, str):
            raise GrammarError(made)
        return made

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "rayllm.structured.workshop", self._library]
        # Unbuffered, so that nothing is left to be flushed into a pipe that has no reader.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )  # fmt: skip
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, self._spelling)
            _read(process.stdout)
        except (OSError, EOFError) as error:
            self.close()
            raise GrammarError(f"the library {self._library} cannot be started") from error
        return process


def main(library: str) -> None:
    """Serve the owner at the other end of the standard streams, until it closes them."""
    os.nice(NICENESS)
    requests, answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # libraries that print do not disturb
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        spelling = msgspec.msgpack.decode(_read(requests), type=Spelling)
        maker: Maker = importlib.import_module(f"rayllm.structured.{library}").Maker(spelling)
        _write(answers, "ready")
        while True:
            asked = msgspec.msgpack.decode(_read(requests), type=StructuredOutputs)
            _write(answers, in_a_fork(lambda asked=asked: maker.make(asked)))  # type: ignore[misc]
    except (EOFError, BrokenPipeError):
        pass


def in_a_fork(make: Callable[[], bytes]) -> bytes | str:
    """What `make` returns in a fork of this process, or why it returns nothing."""
    here, there = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.close(here)
            with os.fdopen(there, "wb", 0) as pipe:
                _write(pipe, _outcome(make))
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb", 0) as pipe:
        ready, _, _ = select.select([pipe], [], [], MAKING_S)
        try:
            if not ready:
                return f"it takes more than {MAKING_S:g} s to compile; make it smaller"
            made: bytes | str = msgspec.msgpack.decode(_read(pipe))
            return made
        except EOFError:
            return "compiling it takes too much memory, or makes the library crash"
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


def _outcome(make: Callable[[], bytes]) -> bytes | str:
    try:
        made = make()
    except Exception as error:  # the library's own classes of errors, for a grammar that is wrong
        return shown(str(error)) or type(error).__name__
    if len(made) > MOST_BYTES:
        return f"it takes {len(made)} bytes when compiled; the limit is {MOST_BYTES}"
    return made


def shown(text: str) -> str:
    """What a library says, on one line that an error message can show."""
    return " ".join(text.removesuffix("<non-verbose/>").split())[:300]


def _write(pipe: IO[bytes], message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read(pipe: IO[bytes]) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    parts = []
    while count:
        part = pipe.read(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(sys.argv[1])
