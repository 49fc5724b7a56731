"""How the layers of a model share KV blocks: which keep all tokens of a request, and which only a window of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Groups of layers. A block holds some tokens in the layers of one group, so they take a block in each group.

    No group has more layers than the largest, so that any block can serve any group: the layers that stand at the same
    place in their groups share one cache. By default all layers are one group, which keeps all tokens.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    """Numbers of layers; the groups that keep all tokens come first. None: all layers are one group."""
    sliding: int = 0
    """How many groups, the last ones, keep a window."""
    window: int = 0
    """Tokens that their layers see, the newest included."""

    @property
    def width(self) -> int:
        """Number of groups."""
        return max(1, len(self.groups))

    def largest(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a group of full size: as many as there are caches."""
        return max(self.groups, key=len, default=tuple(range(num_layers)))

    def places(self, num_layers: int) -> list[tuple[int, int]]:
        """For each layer its group, and its place there, which is the number of its cache."""
        groups = self.groups or (tuple(range(num_layers)),)
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group)}
        return [place[layer] for layer in range(num_layers)]

    def of_layers(self, layers: range) -> "KVLayout":
        """What these layers have of it, numbered from 0: as many groups, some of them perhaps without any layer."""
        groups = tuple(tuple(layer - layers.start for layer in group if layer in layers) for group in self.groups)
        return replace(self, groups=groups)

    def first_seen(self, position: int, block_size: int) -> int:
        """The first of a request's blocks that the layers with a window need for the token at `position`."""
        return max(0, position - self.window + 1) // block_size

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Blocks that a request may hold at once on its way to `tokens`, of which a step computes `step_tokens`."""
        count = -(-tokens // block_size)
        return (self.width - self.sliding) * count + self.sliding * min(count, self._most_seen(step_tokens, block_size))

    def longest(self, blocks: int, step_tokens: int, block_size: int, limit: int) -> int:
        """The most tokens, at most `limit`, of a request that so many blocks hold."""
        seen, full = self._most_seen(step_tokens, block_size), self.width - self.sliding
        count = blocks // self.width
        if self.sliding and count >= seen:
            count = (blocks - self.sliding * seen) // full if full else limit
        return min(limit, count * block_size)

    def usable_tokens(self, blocks: int, length: int, step_tokens: int, block_size: int) -> int:
        """Tokens that so many blocks hold, where layers have windows: in requests of `length`."""
        if not self.sliding:
            return blocks * block_size
        return blocks * length // self.most_blocks(length, step_tokens, block_size)

    def _most_seen(self, step_tokens: int, block_size: int) -> int:
        """The most blocks of a request that the layers with a window need in one step."""
        return -(-(self.window + step_tokens - 2) // block_size) + 1


def group_layers(windows: Sequence[int | None], length: int) -> KVLayout:
    """The layout for layers with these windows (None sees everything) and contexts of up to `length` tokens.

    Windows that hold all of it, or of different sizes, save nothing: all layers are one group then.
    """
    sizes = {window for window in windows if window is not None and window < length}
    if len(sizes) != 1:
        return KVLayout()
    (window,) = sizes
    full = [layer for layer, size in enumerate(windows) if size != window]
    sliding = [layer for layer, size in enumerate(windows) if size == window]
    if not full:
        return KVLayout(groups=(tuple(sliding),), sliding=1, window=window)

    def cost(size: int) -> tuple[int, int]:
        """Caches that a token takes in all groups, filled or not, and in those that keep all."""
        full_groups, sliding_groups = -(-len(full) // size), -(-len(sliding) // size)
        return (full_groups + sliding_groups) * size, full_groups * size

    size = min((len(full), len(sliding)), key=cost)
    groups = [*_cut(full, size), *_cut(sliding, size)]
    return KVLayout(groups=tuple(groups), sliding=-(-len(sliding) // size), window=window)


def _cut(layers: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]
