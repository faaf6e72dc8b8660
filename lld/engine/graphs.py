"""Decode steps of fixed shapes, captured once as CUDA graphs and replayed without Python overhead.

A step with one token per row depends only on the tokens and their positions. Its shape is the number of rows
and the cache length that attention reads, both rounded up. The padding rows are the next rows of the cache.
Each writes to its own first free position, which its next real token overwrites before it is read.
"""

from collections.abc import Callable

import torch

from lld.engine.decoder import LENGTH_BUCKET, head_logits
from lld.engine.spans import SingleSpans, reads_exactly

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)  # and multiples of 64 from 128 on
REPEATS = 16  # steps of a shape before it is captured: a capture costs about as much as a few steps


def bucket(num_rows: int, num_slots: int) -> int:
    """The number of rows a step of `num_rows` is padded to."""
    rounded = next((rows for rows in ROWS if rows >= num_rows), -(-num_rows // 64) * 64)
    return min(rounded, num_slots)


def capture_cuda(forward: Callable[[], torch.Tensor], pool) -> tuple[Callable[[], None], torch.Tensor]:
    """(replay, the tensor in which each replay leaves its result)."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: searches in other threads may use the GPU during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = forward()
    return graph.replay, result


class DecodeGraphs:
    """The captured steps of one engine.

    They hold the addresses of weights and cache. Weights must not move; after the cache has grown, steps are
    captured anew.
    """

    def __init__(self, lm, decoder, cache, capture: Callable = capture_cuda):
        self.lm = lm
        self.decoder = decoder
        self.cache = cache
        self.capture = capture
        self.pool = torch.cuda.graph_pool_handle() if cache.keys_values.is_cuda else None
        self._forget()

    def _forget(self) -> None:
        self.keys_values = self.cache.keys_values
        self.steps: dict[tuple[int, int], tuple] = {}  # shape -> (replay, its inputs, its logits)
        self.seen: dict[tuple[int, int], int] = {}  # shape -> how many times it was run

    def __call__(
        self, tokens_A: torch.Tensor, ends_A: torch.Tensor, longest: int, num_rows: int
    ) -> torch.Tensor:
        """The logits (num_rows, V) after the first `num_rows` tokens; the others are padding.

        ends_A: tokens in each row, the new one included; `longest`: the largest of the first `num_rows`. The
        result is valid until the next call.
        """
        if reads_exactly(ends_A, self.cache.keys_values.dtype):
            length = self.cache.room
        else:
            length = -(-longest // LENGTH_BUCKET) * LENGTH_BUCKET
        if self.cache.keys_values is not self.keys_values:
            self._forget()
        shape = (len(ends_A), length)
        if shape in self.steps:
            replay, static_2A, logits_AV = self.steps[shape]
            torch.stack([tokens_A, ends_A], out=static_2A)
            replay()
            return logits_AV[:num_rows]
        inputs_2A = torch.stack([tokens_A, ends_A])
        logits_AV = self._forward(inputs_2A, length)
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.seen[shape] == REPEATS:
            replay, static_logits_AV = self.capture(lambda: self._forward(inputs_2A, length), self.pool)
            self.steps[shape] = (replay, inputs_2A, static_logits_AV)
        return logits_AV[:num_rows]

    def _forward(self, inputs_2A: torch.Tensor, length: int) -> torch.Tensor:
        spans = SingleSpans(inputs_2A[1], length, self.keys_values.dtype)
        return head_logits(self.decoder(inputs_2A[0], spans, self.cache), self.lm.get_output_embeddings())
