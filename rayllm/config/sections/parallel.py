"""Options of how the work is divided."""

from typing import Any

from rayllm.config.option import Kind, Option


def _only(one: Any, why: str) -> Any:
    def check(value: Any) -> str | None:
        return None if value == one else why

    return check


PARALLEL = (
    Option(
        name="data-parallel-size",
        kind=Kind.INT,
        default=1,
        aliases=("-dp",),
        minimum=1,
        help="Engine replicas, each with the whole model; memory and threads of a machine are divided among them.",
    ),
    Option(
        name="tensor-parallel-size",
        kind=Kind.INT,
        default=1,
        aliases=("-tp",),
        minimum=1,
        check=_only(1, "only 1 is supported yet"),
        help="Workers that share each layer.",
    ),
    Option(
        name="pipeline-parallel-size",
        kind=Kind.INT,
        default=1,
        aliases=("-pp",),
        minimum=1,
        check=_only(1, "only 1 is supported yet"),
        help="Groups of layers, one after the other.",
    ),
)
