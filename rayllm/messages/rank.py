"""What an executor and the processes of its ranks say to one another, filed by receiver."""

from typing import Any

import msgspec

from rayllm.messages.structured import StructuredOutputs
from rayllm.messages.worker import StepPlan, StepResult


class Listen(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To rank 0: open the place where the ranks meet. Answer: its host and port."""


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Form the process groups, at this address of rank 0."""

    host: str
    port: int


class LoadModel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Load the model. Answer: bytes of a KV block, bytes for the KV cache, names of the logits processors."""


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Allocate the KV cache."""

    num_blocks: int


class CallMethod(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Call a method of the worker. Answer: what it returns."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class PrepareGrammar(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Compile a grammar, beside the steps, and hold it until told otherwise."""

    asked: StructuredOutputs


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Something that the rank answers under the same number."""

    number: int
    what: Listen | Meet | LoadModel | Allocate | CallMethod | PrepareGrammar


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Carry out a step. Before it, append these tokens, sampled by another pipeline stage, to their rows."""

    plan: StepPlan
    rows: list[int] = []
    token_ids: list[int] = []


class DropGrammar(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Hold the grammar of that number no more."""

    number: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """End the process."""


ToRank = Ask | RunStep | DropGrammar | End


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First on each of a rank's two connections."""

    secret: str
    rank: int
    aside: bool
    """Whether this connection is for what goes on beside the steps."""
    shares_memory: bool
    pid: int


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A step's results; of one rank alone."""

    result: StepResult


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to an `Ask`, or how it failed: the error's class, and what makes it anew."""

    number: int
    value: Any = None
    error: str | None = None
    arguments: list[Any] = []


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A step failed; the rank cannot go on."""

    reason: str


FromRank = Hello | StepDone | Answered | Failed
