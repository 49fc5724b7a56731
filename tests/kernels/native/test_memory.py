import torch

from rayllm_kernels.native.memory import HUGE_PAGE, LINE, REGION, Arena, zeros


def test_zeros_begin_on_a_huge_page() -> None:
    for size in (1, 4096, 5 * HUGE_PAGE + 3):
        memory = zeros(size)
        assert memory.shape == (size,)
        assert memory.dtype == torch.uint8
        assert memory.data_ptr() % HUGE_PAGE == 0
        assert not memory.any()
        memory.fill_(1)


def test_what_an_arena_gives_does_not_overlap() -> None:
    arena = Arena()
    taken = [arena.take(size) for size in (1, LINE, 1000, REGION, 5, REGION // 2, REGION // 2, 7)]
    for number, memory in enumerate(taken):
        assert memory.data_ptr() % LINE == 0
        memory.fill_(number)
    for number, memory in enumerate(taken):
        assert (memory == number).all()
