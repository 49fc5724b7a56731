"""Embeddings that clients send: what is read is what was saved, and nothing else is let in."""

import contextlib
import io
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch

from rayllm.errors import RequestError
from rayllm.messages.embeds import read_saved, saved_shape


def saved(value: object, **more: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **more)
    return file.getvalue()


ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "tensor",
    [
        ROWS,
        ROWS.bfloat16(),
        ROWS.half(),
        ROWS.unsqueeze(0),
        ROWS.t().contiguous().t(),
        ROWS[1:4],
        ROWS[:, ::2],
        ROWS[:1].expand(3, 8),
        ROWS.clone().requires_grad_(),
        torch.nn.Parameter(ROWS.clone()),
    ],
    ids=["float32", "bfloat16", "float16", "batch", "transposed", "rows", "columns", "expanded", "grad", "parameter"],
)
def test_reads_what_was_saved(tensor: torch.Tensor) -> None:
    tokens, width = saved_shape(saved(tensor))
    wanted = tensor.detach().float().reshape(tokens, width)
    assert np.array_equal(read_saved(saved(tensor), tokens, width), wanted.numpy())


class Evil:
    ran = False

    def __reduce__(self) -> tuple[object, ...]:
        return setattr, (Evil, "ran", True)


def archive(description: bytes, numbers: bytes = b"\0" * 160, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as out:
        out.writestr("a/data.pkl", description)
        out.writestr("a/data/0", numbers)
    return file.getvalue()


def description(tensor: torch.Tensor) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "format of torch.save"),
        (b"x" * 100, "format of torch.save"),
        (saved(ROWS, _use_new_zipfile_serialization=False), "format of torch.save"),
        (pickle.dumps(Evil()), "format of torch.save"),
        (saved(Evil()), "something other"),
        (saved([ROWS]), "EMPTY_LIST"),
        (saved({"a": ROWS}), "EMPTY_DICT"),
        (saved(ROWS.double()), "DoubleStorage; send float32"),
        (saved(ROWS.int()), "IntStorage"),
        (saved(ROWS[0]), "shape must be"),
        (saved(torch.zeros(0, 8)), "shape must be"),
        (saved(torch.zeros(2, 5, 8)), "shape must be"),
        (saved(ROWS.to_sparse()), "something other"),
        (archive(description(ROWS), compression=zipfile.ZIP_DEFLATED), "compressed"),
        (archive(b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."), "something other"),
        (archive(b"(" * 20000 + b"."), "more than a tensor"),
    ],
)
def test_nothing_else_is_let_in(data: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        saved_shape(data)
    assert caught.value.param == "prompt_embeds"
    assert not Evil.ran


@pytest.mark.parametrize(
    ("data", "shape", "says"),
    [
        (saved(ROWS), (5, 16), "has the shape"),
        (saved(ROWS), (4, 8), "has the shape"),
        (saved(torch.full((5, 8), float("nan"))), (5, 8), "not finite"),
        (saved(torch.full((5, 8), float("-inf")).half()), (5, 8), "not finite"),
        (archive(description(ROWS), b"\0" * 100), (5, 8), "fewer numbers"),
    ],
)
def test_what_cannot_be_used_is_refused(data: bytes, shape: tuple[int, int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_saved(data, *shape)


def test_damage_is_refused() -> None:
    whole, rng = saved(ROWS), random.Random(2)
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        damaged = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        with contextlib.suppress(RequestError):
            assert read_saved(damaged, 5, 8).shape == (5, 8)
