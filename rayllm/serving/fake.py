"""An engine without a model, for tests of all that stands in front of an engine.

Each token is a function of all tokens before it, so that a stream that lost, repeated or changed one token ends
differently.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rayllm.errors import EngineDead, Overloaded, RequestError
from rayllm.messages.engine import Add, Command
from rayllm.messages.ingress import EngineStats, Load, RequestOutput

VOCAB = 997


def next_token(token_ids: list[int]) -> int:
    """The token that follows these."""
    total = 7
    for token in token_ids:
        total = (total * 31 + token + 1) % VOCAB
    return total


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeEngine:
    """Steps when `step` is called, or every `interval_s` seconds by itself. Meets `ServedEngine`."""

    def __init__(
        self, interval_s: float | None = None, max_requests: int = 1000, max_prompt: int = 10_000, rank: int = 0
    ) -> None:
        self.adds: list[Add] = []
        """Everything admitted, in order."""
        self.aborted: list[tuple[int, int | None, str]] = []
        """Client, request (None: all of the client), reason."""
        self.commands: list[Command] = []
        """Carried out, in order."""
        self.preparing: dict[tuple[int, int], tuple[Add, Future[None]]] = {}
        """Requests whose form is being compiled."""
        self.stalled = 0.0
        self.dead: str | None = None
        self._rank = rank
        self._interval_s = interval_s
        self._max_requests = max_requests
        self._max_prompt = max_prompt
        self._lock = threading.Lock()
        self._running: dict[tuple[int, int], tuple[Add, list[int]]] = {}
        self._deliver: Callable[[dict[int, list[RequestOutput]], Load], None] = lambda outputs, load: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._generated = 0

    def start(self, deliver: Callable[[dict[int, list[RequestOutput]], Load], None]) -> None:
        """See `Engine.start`."""
        self._deliver = deliver
        if self._interval_s is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def add(self, client: int, add: Add) -> "Future[None] | None":
        """See `Engine.add`. Those with a form wait for `end_preparing`."""
        with self._lock:
            if self.dead is not None:
                raise EngineDead(self.dead)
            if len(add.prompt_token_ids) > self._max_prompt:
                raise RequestError(f"the prompt is longer than {self._max_prompt} tokens", "prompt")
            if len(self._running) >= self._max_requests:
                raise Overloaded("the fake is full")
            if add.sampling.structured_outputs is not None:
                self.preparing[client, add.request_id] = (add, Future())
                return self.preparing[client, add.request_id][1]
            self._admit(client, add)
        return None

    def end_preparing(self, error: Exception | None = None) -> None:
        """Admit all requests with a form, or refuse them."""
        with self._lock:
            preparing, self.preparing = self.preparing, {}
            for (client, _), (add, answer) in preparing.items():
                if error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(None)
                    self._admit(client, add)

    def _admit(self, client: int, add: Add) -> None:
        self.adds.append(add)
        self._running[client, add.request_id] = (add, list(add.output_token_ids))

    def abort(self, client: int, request_id: int, reason: str = "abort") -> None:
        """See `Engine.abort`."""
        with self._lock:
            self.aborted.append((client, request_id, reason))
            self._running.pop((client, request_id), None)
            if preparing := self.preparing.pop((client, request_id), None):
                preparing[1].set_exception(RequestError("aborted"))

    def abort_client(self, client: int) -> None:
        """See `Engine.abort_client`."""
        with self._lock:
            self.aborted.append((client, None, "abort"))
            for key in [key for key in self._running if key[0] == client]:
                del self._running[key]

    def load(self) -> Load:
        """See `Engine.load`."""
        return Load(running=len(self._running))

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(rank=self._rank, load=self.load(), generation_tokens=self._generated)

    def stalled_s(self) -> float:
        """See `Engine.stalled_s`."""
        return self.stalled

    def carry_out(self, command: Command) -> Any:
        """See `Engine.carry_out`; nothing but a note of it."""
        self.commands.append(command)
        return len(self.commands)

    def die(self, reason: str) -> None:
        """End as the engine's loop does on a fault."""
        self.dead = reason
        self._deliver({}, Load())

    def shutdown(self) -> None:
        """Stop stepping."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def step(self) -> None:
        """Give every request its next token."""
        outputs: dict[int, list[RequestOutput]] = {}
        with self._lock:
            for key, (add, output) in list(self._running.items()):
                first = len(output) == len(add.output_token_ids)
                output.append(next_token(add.prompt_token_ids + output))
                self._generated += 1
                done = len(output) >= (add.sampling.max_tokens or 1)
                if done:
                    del self._running[key]
                outputs.setdefault(key[0], []).append(
                    RequestOutput(key[1], [output[-1]], "length" if done else None, cached_tokens=0 if first else None)
                )
            load = Load(running=len(self._running))
        if outputs:
            self._deliver(outputs, load)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.step()
