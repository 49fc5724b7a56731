"""Where a process stands in a sharded model: its group of tensor ranks, and its stage of the pipeline."""

from dataclasses import dataclass, field

from rayllm.parallel.group import Group, SingleGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of one process; by default it has the model to itself."""

    tensor: Group = field(default_factory=SingleGroup)
    """The ranks that divide this stage's layers."""
    stage: int = 0
    stages: int = 1

    @property
    def first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the norm and the head."""
        return self.stage == self.stages - 1

    @property
    def alone(self) -> bool:
        """Whether this process has the whole model."""
        return self.tensor.size == self.stages == 1

    def layers(self, count: int) -> range:
        """The layers of this stage, of a model of `count`: as many as others have, or one more in the middle."""
        assert count >= self.stages, (count, self.stages)
        each, over = divmod(count, self.stages)
        # The first and the last stage have the tables of the vocabulary to compute with.
        middle = sorted(range(self.stages), key=lambda stage: (abs(2 * stage + 1 - self.stages), stage))
        sizes = [each + (stage in middle[:over]) for stage in range(self.stages)]
        begin = sum(sizes[: self.stage])
        return range(begin, begin + sizes[self.stage])
