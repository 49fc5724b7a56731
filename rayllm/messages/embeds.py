"""Embeddings as clients send them: one tensor in a file of `torch.save`, read without unpickling anything.

Such a file is an archive of stored records, among them `data.pkl`, which describes the tensor, and its numbers. The
description is read as data: an opcode that a plain tensor does not need is refused, and no name in it is looked up.
"""

import base64
import io
import pickletools
import zipfile
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rayllm.errors import RequestError

Floats = npt.NDArray[np.float32]
FIELD = "prompt_embeds"
_LONGEST = 16 << 10
"""Bytes of a description; one of a tensor takes a few hundred."""
_TYPES = {"torch FloatStorage": "<f4", "torch HalfStorage": "<f2", "torch BFloat16Storage": "<u2"}
_PUSHED = frozenset({"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "GLOBAL"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor as its file describes it. Offset and strides count numbers."""

    archive: zipfile.ZipFile
    record: zipfile.ZipInfo
    kind: str
    offset: int
    shape: tuple[int, int]
    strides: tuple[int, int]


def decoded(encoded: Any) -> bytes:
    """The file that a client has sent in base64.

    Raises:
        RequestError: it is none.
    """
    try:
        return base64.b64decode(encoded, validate=True)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{FIELD} must be base64: {error}", FIELD) from None


def saved_shape(saved: bytes) -> tuple[int, int]:
    """(tokens, width) of the tensor in a file, as it claims.

    Raises:
        RequestError: the file holds anything but a tensor of 32 or 16 bits of that form.
    """
    return _open(saved).shape


def read_saved(saved: bytes, tokens: int, width: int) -> Floats:
    """The tensor in a file, (tokens, width).

    Raises:
        RequestError: as `saved_shape`; or it has another shape, is damaged, or holds what is not finite.
    """
    tensor = _open(saved)
    if tensor.shape != (tokens, width):
        raise RequestError(
            f"{FIELD} has the shape {tensor.shape}, but {tokens} tokens of this model take {(tokens, width)}", FIELD
        )
    try:
        numbers = np.frombuffer(tensor.archive.read(tensor.record), _TYPES[tensor.kind])
    except Exception as error:  # whatever a hostile archive makes of the library
        raise _wrong(str(error)) from None
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    if min(tensor.offset, *tensor.strides) < 0 or last >= len(numbers):
        raise _wrong("it holds fewer numbers than its shape says")
    strides = [step * numbers.itemsize for step in tensor.strides]
    rows = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides)
    if numbers.dtype.kind == "u":  # bfloat16, which numpy has not: the upper half of a float32
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    rows = np.array(rows, np.float32, order="C")
    if not np.isfinite(rows).all():
        raise RequestError(f"{FIELD} holds numbers that are not finite", FIELD)
    return rows


def _open(saved: bytes) -> _Saved:
    try:
        archive = zipfile.ZipFile(io.BytesIO(saved))
        records = {info.filename: info for info in archive.infolist()}
        (description,) = (name for name in records if name.endswith("/data.pkl"))
        folder = description.removesuffix("data.pkl")
        for info in records.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(saved):
                raise ValueError("its records are compressed")
        if records[description].file_size > _LONGEST:
            raise ValueError("it holds more than a tensor")
        if (order := records.get(folder + "byteorder")) and archive.read(order) != b"little":
            raise ValueError("its numbers are big-endian")
        kind, key, offset, shape, strides = _tensor(_described(archive.read(description)))
        return _Saved(archive, records[f"{folder}data/{key}"], kind, offset, shape, strides)
    except Exception as error:  # whatever a hostile archive makes of the libraries
        raise _wrong(str(error) or type(error).__name__) from None


def _described(pickled: bytes) -> Any:
    """What a pickle of plain values says. Calls in it come out as (name, arguments)."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for op, argument, _ in pickletools.genops(pickled):
        name, value = op.name, cast(Any, argument)
        if name in _PUSHED:
            stack.append(value)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE" or name in _TUPLES:
            begin = len(stack) - _TUPLES[name] if name in _TUPLES else _last_mark(stack)
            items = tuple(item for item in stack[begin:] if item is not _MARK)
            stack[begin:] = [items]
        elif name == "REDUCE":
            stack[-2:] = [(stack[-2], stack[-1])]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name not in ("PROTO", "BINPERSID", "STOP"):
            raise ValueError(f"it holds more than a tensor ({name})")
    return stack[-1]


def _last_mark(stack: list[Any]) -> int:
    return max(at for at, item in enumerate(stack) if item is _MARK)


def _tensor(described: Any) -> tuple[str, str, int, tuple[int, int], tuple[int, int]]:
    """(kind, record, offset, shape, strides)."""
    match described:
        case ("torch._utils _rebuild_parameter", (inner, *_)):
            described = inner
    match described:
        case (
            "torch._utils _rebuild_tensor_v2",
            (("storage", str(kind), str(key), _, _), int(offset), tuple(shape), tuple(strides), *_),
        ):
            pass
        case _:
            raise ValueError("it holds something other than one tensor")
    if kind not in _TYPES:
        raise ValueError(f"its numbers are of {kind.removeprefix('torch ')}; send float32, float16 or bfloat16")
    if len(shape) == 3 and shape[0] == 1:
        shape, strides = shape[1:], strides[1:]
    match shape, strides:
        case (int(tokens), int(width)), (int(row), int(column)) if tokens > 0 and width > 0:
            return kind, key, offset, (tokens, width), (row, column)
    raise ValueError("its shape must be (tokens, width of the model)")


def _wrong(reason: str) -> RequestError:
    return RequestError(f"{FIELD} must be a tensor in the format of torch.save: {reason[:200]}", FIELD)
