"""Metadata of a GGUF file: the key-value pairs in front of its tensors, read without the weights.

The layout is that of the GGUF specification, versions 2 and 3: magic, version, two counts, then pairs of
(string key, type number, value). All numbers are little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from rayllm.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_LENGTH = struct.Struct("<Q")


class _Reader:
    """A cursor over the file. Every length is checked against the file's size before anything is made of it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"the file ends before the {size} bytes that are due at offset {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        return self.take(self.scalar(_LENGTH)).decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        # The hot loop: two arrays of some 50,000 to 250,000 strings hold the whole vocabulary.
        data, at, end, out = self.data, self.at, len(self.data), []
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise ValueError("the file ends inside a list of strings")
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise ValueError("a string is longer than the file")
            out.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar(_SCALARS[4]), self.scalar(_LENGTH)
        if count > len(self.data):
            raise ValueError(f"a list of {count} entries is longer than the file")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        layout = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{layout.format[1:]}", self.take(count * layout.size)))


def read_gguf_metadata(path: str) -> dict[str, Any]:
    """All metadata of the GGUF file at `path`, by key.

    Raises:
        ModelError: the file cannot be read, or is no sound GGUF file.
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_pairs(_Reader(data))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(path, f"not a readable GGUF file: {e}") from e


def _read_pairs(reader: _Reader) -> dict[str, Any]:
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.scalar(_SCALARS[4])
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported, only 2 and 3")
    reader.scalar(_LENGTH)  # number of tensors
    pairs = {}
    for _ in range(reader.scalar(_LENGTH)):
        key = reader.string()
        pairs[key] = reader.value(reader.scalar(_SCALARS[4]))
    return pairs
