"""The block pool: who holds which KV block, and which blocks can be found again by their hash.

A block is held (one or more requests refer to it), cached (nobody does, but its hash is known and its content can be
used again) or empty. The pool knows block ids and hashes, and no tensor.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks by state; the three add up to the size of the pool."""

    empty: int
    cached: int
    held: int

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out."""
        return self.empty + self.cached


class BlockWatch(Protocol):
    """Is told what happens to blocks, after it has happened."""

    def taken(self, blocks: list[int]) -> None:
        """These are held, with no content yet."""
        ...

    def shared(self, blocks: list[int]) -> None:
        """One more request uses the content of these."""
        ...

    def let_go(self, block: int) -> None:
        """No request holds it any more; its content can still be found."""
        ...

    def ended(self, block: int) -> None:
        """Its content is given up."""
        ...


class BlockPool:
    """Owns `num_blocks` blocks with the ids 0 to `num_blocks` - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._watch: BlockWatch | None = None

    def watch(self, watch: BlockWatch) -> None:
        """Tell one object what happens to blocks. To be called before the first `take`."""
        self._watch = watch

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out: empty ones, then cached ones by age."""
        return len(self._empty) + len(self._cached)

    def take(self, count: int) -> list[int] | None:
        """Hold `count` blocks with no content, or None (and no change) if there are too few.

        Cached blocks are used up last, the least recently used first; their content can then not be found any more.
        """
        if count > self.free:
            return None
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                if self._watch is not None:
                    self._watch.ended(block)
            self._references[block] = 1
            blocks.append(block)
        if self._watch is not None:
            self._watch.taken(blocks)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or cached."""
        return self._block_of.get(block_hash)

    def is_held(self, block: int) -> bool:
        """Whether a request refers to the block."""
        return self._references[block] > 0

    def share(self, blocks: list[int]) -> None:
        """Hold blocks that were found, one reference more each."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        if self._watch is not None:
            self._watch.shared(blocks)

    def give_back(self, blocks: list[int]) -> None:
        """Drop one reference to each block, in the order of a request's tokens."""
        # Tail first, so that the head of a prefix, which more requests can share, is evicted last.
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, block
            if self._references[block] == 0:
                if self._hash[block] is None:
                    self._empty.append(block)
                    if self._watch is not None:
                        self._watch.ended(block)
                else:
                    self._cached[block] = None
                    if self._watch is not None:
                        self._watch.let_go(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make the content of a held block findable. Of two blocks with one content the first stays findable."""
        assert self._references[block] > 0, block
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash[block] = block_hash

    def drop_cache(self) -> None:
        """Forget all content; held blocks stay held."""
        for block in list(self._block_of.values()):
            self._forget(block)
        self._empty.extend(self._cached)
        if self._watch is not None:
            for block in self._cached:
                self._watch.ended(block)
        self._cached.clear()

    def stats(self) -> PoolStats:
        """Blocks by state."""
        empty, cached = len(self._empty), len(self._cached)
        return PoolStats(empty=empty, cached=cached, held=self.num_blocks - empty - cached)

    def check(self) -> None:
        """Assert that every block is in exactly one state and every hash leads to its block."""
        empty, cached = set(self._empty), set(self._cached)
        held = {b for b in range(self.num_blocks) if self._references[b] > 0}
        assert len(empty) == len(self._empty), "an empty block is listed twice"
        assert empty.isdisjoint(cached)
        assert held.isdisjoint(empty | cached)
        assert len(empty) + len(cached) + len(held) == self.num_blocks
        assert all(self._hash[b] is None for b in empty)
        assert all(self._hash[b] is not None for b in cached)
        assert all(self._hash[b] == h for h, b in self._block_of.items())
        assert sum(h is not None for h in self._hash) == len(self._block_of)

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None, block
        del self._block_of[block_hash]
        self._hash[block] = None
