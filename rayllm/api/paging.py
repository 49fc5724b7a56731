"""Pages of lists, as OpenAI's API has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayllm.errors import RequestError

Json = dict[str, Any]


def page_of(items: Sequence[Json], query: Mapping[str, str], order: str) -> Json:
    """The page of a list that a query asks for. Each item has an id, the oldest is first; `order` is the default.

    Raises:
        RequestError: names the parameter.
    """
    limit, order = query.get("limit", "20"), query.get("order", order)
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= 100:
        raise RequestError("limit must be from 1 to 100", "limit")
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'", "order")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        places = [i for i, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise RequestError("after must be the id of an item", "after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}
