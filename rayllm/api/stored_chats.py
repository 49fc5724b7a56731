"""Chat completions that were made with `store`: retrieved, listed, given other metadata, and forgotten."""

from collections.abc import Callable, Sequence
from typing import Any

from rayllm.api.answer import Writer
from rayllm.api.call import Call
from rayllm.api.choice import Choice, Piece
from rayllm.api.front import Front
from rayllm.api.paging import page_of
from rayllm.api.parse import parse_request
from rayllm.api.responses_store import Kept, ResponseStore
from rayllm.api.wire import ChatRequest, Wire
from rayllm.errors import RequestError

Json = dict[str, Any]

_FILTERS = ("model", "after", "limit", "order")


class ChatUpdate(Wire):
    """`POST /v1/chat/completions/{id}`."""

    metadata: dict[str, str] | None


class StoredChats:
    """The chat completions that this process keeps, in bounded memory."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._store = ResponseStore(kind="chat completion")

    def keeper(self, request: ChatRequest) -> Callable[[Writer], Writer]:
        """What makes a writer keep the answer to a request when it is whole.

        Raises:
            RequestError: the request's metadata cannot be kept.
        """
        metadata = request.metadata or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise RequestError("metadata must have texts as values, to be stored", "metadata")
        return lambda writer: _Storing(writer, self._store, metadata, request.messages or [])

    async def retrieve(self, call: Call) -> None:
        """One of them."""
        await call.json(self._found(call).response)

    async def messages(self, call: Call) -> None:
        """The messages that led to one."""
        await call.json(page_of(self._found(call).items, call.query(), order="asc"))

    async def list(self, call: Call) -> None:
        """Those of a model, with some metadata, or all."""
        query = call.query()
        wanted = {}
        for name, value in query.items():
            if name.startswith("metadata[") and name.endswith("]"):
                wanted[name[len("metadata[") : -1]] = value
            elif name not in _FILTERS:
                message = f"unknown parameter {name[:60]!r}; there are {', '.join(_FILTERS)} and metadata[KEY]"
                raise RequestError(message, name[:60])
        found = [
            kept.response
            for kept in self._store.all()
            if query.get("model") in (None, kept.response["model"])
            and wanted.items() <= kept.response["metadata"].items()
        ]
        await call.json(page_of(found, query, order="asc"))

    async def update(self, call: Call) -> None:
        """Give one other metadata."""
        kept = self._found(call)
        request = parse_request(ChatUpdate, await call.body(self._front.settings.max_body_bytes))
        kept.response = {**kept.response, "metadata": request.metadata or {}}
        self._store.keep(kept)
        await call.json(kept.response)

    async def delete(self, call: Call) -> None:
        """Forget one."""
        id_ = self._found(call).response["id"]
        self._store.forget(id_)
        await call.json({"object": "chat.completion.deleted", "id": id_, "deleted": True})

    def _found(self, call: Call) -> Kept:
        return self._store.get(call.scope["path_params"]["id"], "completion_id")


class _Storing:
    """Writes as another writer does, and keeps the whole."""

    def __init__(self, writer: Writer, store: ResponseStore, metadata: Json, messages: Sequence[Json]) -> None:
        self._writer, self._store = writer, store
        self._metadata, self._messages = metadata, messages
        self._pieces: dict[int, Piece] = {}

    def opening(self) -> bytes:
        return self._writer.opening()

    def event(self, choice: Choice, piece: Piece) -> bytes:
        event = self._writer.event(choice, piece)
        self._pieces.setdefault(choice.index, Piece()).extend(piece)
        return event

    def closing(self) -> bytes:
        self._keep(self._writer.whole([piece for _, piece in sorted(self._pieces.items())]))
        return self._writer.closing()

    def whole(self, pieces: Sequence[Piece]) -> Json:
        whole = self._writer.whole(pieces)
        self._keep(whole)
        return whole

    def _keep(self, whole: Json) -> None:
        items = [_shown(message, f"{whole['id']}-{i}") for i, message in enumerate(self._messages)]
        self._store.keep(Kept({**whole, "metadata": self._metadata}, items))


def _shown(message: Json, id_: str) -> Json:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return {**message, "id": id_, "content": None if parts else content, "content_parts": parts}
