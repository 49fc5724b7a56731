"""The container of a GGUF model file: its metadata, and where its tensors are. Read with neither torch nor numpy.

Format: the GGUF specification of the ggml project, versions 2 and 3, little endian. Every length is checked against
the file before it is believed, so a damaged file ends in an error that says what is wrong, at once.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayllm.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

BLOCKS: Mapping[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
"""Tensor types that can be read: ggml's number, values in a block, bytes of a block."""
_TYPE_NAMES = {number: name for name, (number, _, _) in BLOCKS.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    type: str
    """A key of `BLOCKS`."""
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the last one lies in blocks."""
    offset: int
    """Of its data, in bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a GGUF file says about itself."""

    path: str
    metadata: Mapping[str, Any]
    """Numbers, booleans, strings, and lists of these."""
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: str, arrays: bool = True) -> GgufFile:
    """Read metadata and tensor table, and check that the data of every tensor is there.

    Without `arrays`, lists longer than 1024 (vocabularies) are left out, which saves a good part of the time.

    Raises:
        ModelError: the file cannot be read, is not GGUF, is damaged or cut short, or holds a type we cannot read.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, arrays).read()
    except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
        raise ModelError(path, f"cannot be read: {e}") from e


class _Reader:
    """Walks through one file."""

    def __init__(self, path: str, data: mmap.mmap, arrays: bool) -> None:
        self.path, self.data, self.arrays, self.at = path, data, arrays, 0

    def read(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise self.error(f"not a GGUF file: it begins with {self.data[:4]!r} instead of the magic b'GGUF'")
        self.at = 4
        version = self.scalar("<I", "version")
        if version not in (2, 3):
            raise self.error(f"GGUF version {version} is not supported, only 2 and 3 (little endian)")
        num_tensors = self.count("number of tensors", 24)
        num_values = self.count("number of metadata values", 13)
        if num_tensors == 0:
            raise self.error("holds no tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.string("a metadata key")
            value = self.value(self.scalar("<I", key), key)
            if value is not None:
                metadata[key] = value
        tensors = {info.name: info for info in self.tensor_infos(num_tensors, metadata)}
        if len(tensors) != num_tensors:
            raise self.error("two tensors have the same name")
        return GgufFile(self.path, metadata, tensors)

    def error(self, reason: str) -> ModelError:
        return ModelError(self.path, reason)

    def take(self, size: int, what: str) -> int:
        """Move over `size` bytes; return where they began."""
        start = self.at
        if size > len(self.data) - start:
            raise self.error(
                f"damaged or truncated: {what} has length {size} bytes at offset {start}, beyond the end of the file"
            )
        self.at = start + size
        return start

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        number: int = self.scalar("<Q", what)
        if number * least_bytes > len(self.data):
            raise self.error(f"damaged or truncated: {what} is {number}, more than the size of the file allows")
        return number

    def string(self, what: str) -> str:
        size = self.scalar("<Q", f"length of {what}")
        start = self.take(size, f"the string of {what}")
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as e:
            raise self.error(f"damaged: {what} is not UTF-8 at offset {start}") from e

    def value(self, kind: int, key: str) -> Any:
        """The next value; None for a long list that is not wanted."""
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.error(f"damaged: {key} has the unknown value type {kind}")
        return self.scalar(_SCALARS[kind], key)

    def array(self, key: str) -> list[Any] | None:
        kind = self.scalar("<I", key)
        length = self.count(f"length of {key}", 1)
        wanted = self.arrays or length <= 1024
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.take(length * struct.calcsize(code), key)
            return list(struct.unpack_from(f"<{length}{code[1]}", self.data, start)) if wanted else None
        if kind != _STRING:
            raise self.error(f"damaged: {key} is a list of the unsupported value type {kind}")
        # The lists of a vocabulary are most of the metadata, hence this loop without calls of our own.
        unpack, data, at, end, found = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data), []
        for _ in range(length):
            if at + 8 > end:
                raise self.error(f"damaged or truncated: {key} goes on beyond the end of the file")
            size = unpack(data, at)[0]
            if size > end - at - 8:
                raise self.error(f"damaged or truncated: a string of {key} has length {size}, beyond the end")
            if wanted:
                found.append(data[at + 8 : at + 8 + size])
            at += 8 + size
        self.at = at
        # Vocabularies hold pieces of UTF-8 sequences in some files.
        return [text.decode(errors="surrogateescape") for text in found] if wanted else None

    def tensor_infos(self, number: int, metadata: Mapping[str, Any]) -> Iterator[TensorInfo]:
        rows = [self.tensor_row() for _ in range(number)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.error(f"general.alignment: must be a positive integer, not {alignment!r}")
        base = -(-self.at // alignment) * alignment
        for name, kind, shape, offset in rows:
            type_name = _TYPE_NAMES.get(kind)
            if type_name is None:
                raise ModelError(self.path, f"ggml type {kind} is not supported, only {', '.join(BLOCKS)}", name)
            _, values, size = BLOCKS[type_name]
            if not shape or shape[-1] % values:
                raise ModelError(self.path, f"damaged: shape {list(shape)} does not fit type {type_name}", name)
            count = 1
            for dimension in shape:
                count *= dimension
            nbytes = count // values * size
            if base + offset + nbytes > len(self.data):
                raise ModelError(self.path, "truncated: its data goes beyond the end of the file", name)
            yield TensorInfo(name, type_name, shape, base + offset, nbytes)

    def tensor_row(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string("a tensor name")
        dimensions = self.scalar("<I", name)
        if dimensions > _MAX_DIMENSIONS:
            raise self.error(f"damaged: tensor {name!r} has {dimensions} dimensions")
        # The file has the innermost dimension first.
        shape = tuple(reversed([self.scalar("<Q", name) for _ in range(dimensions)]))
        return name, self.scalar("<I", name), shape, self.scalar("<Q", name)
