"""What attention needs to know about one step: which tokens belong to whom, and where their KV entries stand.

Letters of shapes: B requests, T tokens of the step.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

GROUP_TOKENS = 32768
"""Most padded KV tokens that requests of one query are handled together with; bounds scratch memory."""
SMALL_TOKENS = 4096
"""Padding below this many tokens costs less than another round of calls."""


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Requests with one query each, of similar length, to be handled in one padded batch."""

    rows: Tensor
    """int64, which requests of the batch."""
    tokens: Tensor
    """int64, where their queries stand among the tokens of the step."""
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests that begin with the same blocks, as far as layers without a window go."""

    requests: Tensor
    """int32, rising; each has one query."""
    tokens: int
    """How many they have in common, fewer than any of them has."""


@dataclass(frozen=True)
class AttentionBatch:
    """One step's requests, in order; request b owns tokens query_start[b] to query_start[b + 1].

    A request's queries are its last tokens: with n queries and length s they stand at positions s - n to s - 1.
    """

    query_start: Tensor
    """(B + 1) int32."""
    seq_lens: Tensor
    """(B) int32: tokens of each request, this step's included."""
    block_table: Tensor
    """(B, most blocks) int32. Entries beyond a request's length, and before the windows of all its queries, are never
    used, but must name an existing block. Where groups of layers have blocks of their own: (groups, B, most blocks).
    """
    slot_mapping: Tensor
    """(T) int64: block * block_size + offset, where each token's key and value go; or (groups, T)."""
    query_start_host: np.ndarray
    seq_lens_host: np.ndarray
    shared: SharedPrefix | None = None
    """Whose attention may be computed together. No result depends on it."""

    def of_group(self, group: int) -> "AttentionBatch":
        """As one group of layers sees it."""
        if self.block_table.ndim == 2:
            assert group == 0, group
            return self
        return replace(self, block_table=self.block_table[group], slot_mapping=self.slot_mapping[group])

    @cached_property
    def singles(self) -> tuple[SingleGroup, ...]:
        """The requests with one query."""
        counts = np.diff(self.query_start_host)
        return _group_singles(counts, self.query_start_host, self.seq_lens_host, self.seq_lens.device)

    @cached_property
    def longer(self) -> tuple[int, ...]:
        """The requests with more."""
        return tuple(np.flatnonzero(np.diff(self.query_start_host) > 1).tolist())

    @classmethod
    def from_numpy(
        cls,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        slot_mapping: np.ndarray,
        device: torch.device | str = "cpu",
        shared: SharedPrefix | None = None,
    ) -> "AttentionBatch":
        """Make a batch from host arrays of the dtypes above.

        On a CPU the tensors share the arrays' memory, so these must stay unchanged until the step is done. No request
        may be without queries.
        """
        assert np.diff(query_start).min(initial=1) > 0, "a request without queries"
        assert query_start[-1] == slot_mapping.shape[-1], (query_start[-1], slot_mapping.shape)
        return cls(
            query_start=to_device(query_start.astype(np.int32, copy=False), device),
            seq_lens=to_device(seq_lens.astype(np.int32, copy=False), device),
            block_table=to_device(block_table.astype(np.int32, copy=False), device),
            slot_mapping=to_device(slot_mapping.astype(np.int64, copy=False), device),
            query_start_host=query_start,
            seq_lens_host=seq_lens,
            shared=shared,
        )


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """The array as a tensor; on a CPU one that shares its memory, made without letting go of the interpreter."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if torch.device(device).type == "cpu" else tensor.to(device, non_blocking=True)


def _group_singles(
    counts: np.ndarray, query_start: np.ndarray, seq_lens: np.ndarray, device: torch.device | str
) -> tuple[SingleGroup, ...]:
    """Split the requests with one query into groups where at most half is padding, longest first."""
    rows = np.flatnonzero(counts == 1)
    rows = rows[np.argsort(-seq_lens[rows], kind="stable")]
    groups, start = [], 0
    while start < len(rows):
        longest = int(seq_lens[rows[start]])
        fit = max(1, GROUP_TOKENS // longest)
        end = start + 1
        while end < len(rows) and end - start < fit:
            padded = (end - start) * longest
            if padded > SMALL_TOKENS and 2 * seq_lens[rows[end]] < longest:
                break
            end += 1
        chosen = np.sort(rows[start:end])
        groups.append(
            SingleGroup(to_device(chosen, device), to_device(query_start[chosen].astype(np.int64), device), longest)
        )
        start = end
    return tuple(groups)
