"""Runs a decoder on several requests at once, with a paged cache whose blocks lie in disorder."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rayllm.model.decoder import Decoder
from rayllm_kernels import AttentionBatch


@dataclass
class Sequence:
    """One request: its tokens, how many of them are computed, and the logits that followed each."""

    tokens: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Runner:
    """Owns the caches of some sequences."""

    def __init__(self, model: Decoder, rows: int, length: int, block_size: int = 4) -> None:
        self.model, self.block_size = model, block_size
        blocks = -(-length // block_size)
        order = np.random.default_rng(0).permutation(rows * blocks + 1)[1:].astype(np.int32)
        self.table = order.reshape(rows, blocks)
        self.caches = model.new_caches(rows * blocks + 1, block_size)

    @torch.inference_mode()
    def step(self, work: list[tuple[int, Sequence, int]]) -> None:
        """Compute some more tokens of each: (row, sequence, count)."""
        tokens, positions, slots = [], [], []
        for row, sequence, count in work:
            position = np.arange(sequence.computed, sequence.computed + count)
            tokens += sequence.tokens[sequence.computed : sequence.computed + count]
            positions.append(position)
            blocks = self.table[row][position // self.block_size].astype(np.int64)
            slots.append(blocks * self.block_size + position % self.block_size)
            sequence.computed += count
        counts = [count for _, _, count in work]
        batch = AttentionBatch.from_numpy(
            np.cumsum([0, *counts], dtype=np.int32),
            np.array([sequence.computed for _, sequence, _ in work], dtype=np.int32),
            self.table[[row for row, _, _ in work]],
            np.concatenate(slots),
        )
        hidden = self.model(torch.tensor(tokens), torch.from_numpy(np.concatenate(positions)), batch, self.caches)
        logits = self.model.logits(hidden)
        for (_, sequence, _), part in zip(work, logits.split(counts), strict=True):
            sequence.logits += list(part)


def all_logits(model: Decoder, tokens: list[int], chunk: int = 1000) -> Tensor:
    """Logits after every token, (tokens, vocabulary), computed in chunks."""
    sequence, runner = Sequence(list(tokens)), Runner(model, 1, len(tokens))
    while sequence.computed < len(tokens):
        runner.step([(0, sequence, min(chunk, len(tokens) - sequence.computed))])
    return torch.stack(sequence.logits)


def greedy(model: Decoder, prompt: list[int], count: int, chunk: int = 1000) -> list[int]:
    """The tokens that greedy decoding appends to a prompt."""
    return greedy_together(model, [prompt], count, [chunk])[0]


def greedy_together(model: Decoder, prompts: list[list[int]], count: int, chunks: list[int]) -> list[list[int]]:
    """The tokens that greedy decoding appends to each prompt, of which each step computes as many as its chunk says."""
    sequences = [Sequence(list(prompt)) for prompt in prompts]
    ends = [len(prompt) + count for prompt in prompts]
    runner = Runner(model, len(prompts), max(ends))
    while work := [
        (row, sequence, min(chunks[row], len(sequence.tokens) - sequence.computed))
        for row, sequence in enumerate(sequences)
        if len(sequence.tokens) < ends[row]
    ]:
        runner.step(work)
        for _, sequence, _ in work:
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(sequence.logits[-1].argmax()))
    return [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
