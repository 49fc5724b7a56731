"""What an engine holds back while it is paused, and how its requests are called from outside."""

import re
from concurrent.futures import Future

from rayllm.engine.request import Request
from rayllm.messages.engine import PauseMode

_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)?(?P<own>(?P<wished>.+)-[0-9a-f]{12}|.+)", re.DOTALL)


class Paused:
    """The state of an engine's pauses. Belongs to its loop."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        """None while the engine is not paused."""
        self.held: dict[tuple[int, int], Request] = {}
        """Requests that came since, in order."""
        self.draining: list[Future[None]] = []
        """Wait until no request moves."""

    def begin(self, mode: PauseMode, drained: "Future[None]") -> None:
        """Pause, or change the mode of a pause."""
        self.mode = mode
        self.draining.append(drained)

    def holds(self, request: Request) -> bool:
        """Whether a new request has to wait for the end of the pause; it is held then."""
        if self.mode is None:
            return False
        self.held[request.key] = request
        return True

    def note_drained(self) -> None:
        """Tell all who wait that no request moves."""
        draining, self.draining = self.draining, []
        for drained in draining:
            drained.set_result(None)

    def end(self) -> list[Request]:
        """End the pause; the requests that were held."""
        self.note_drained()
        held, self.mode, self.held = list(self.held.values()), None, {}
        return held


def names_of(external_id: str) -> frozenset[str]:
    """What a client may call a request: the id in its answer, and the id that it had asked for."""
    found = _ID.fullmatch(external_id)
    return frozenset(filter(None, (external_id, *found.groups()))) if found else frozenset()
