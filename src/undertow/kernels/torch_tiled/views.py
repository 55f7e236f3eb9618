"""A call cut into segments, and its tensors seen head-major: the layouts end here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import AXES, lse_axes
from ...mask import q_range
from ...problem import Problem
from ..spec import Config, Tensors

Segment = tuple[int, slice, slice]
"""Batch index, query rows and keys; the rows count from the start of the batch entry, or of a packed tensor."""

SIDES = {"q": "q", "dout": "q", "out": "q", "dq": "q", "k": "k", "v": "k", "dk": "k", "dv": "k"}
ROW_SCALARS = ("lse", "dlse", "delta", "D")


@dataclass(frozen=True)
class Call:
    """A launch; `bias` gives the band of a tile."""

    problem: Problem
    config: Config
    tensors: Tensors
    scratch: Tensors
    bias: Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Step:
    """One segment and one run of kv heads: what a stage works on, every tensor head-major.

    `worker` is the thread that takes it, which has scratch of its own.
    """

    call: Call
    seqlens: tuple[int, int]
    heads: slice
    views: dict[str, Tensor]
    worker: int = 0

    @property
    def problem(self) -> Problem:
        """The call's."""
        return self.call.problem

    @property
    def config(self) -> Config:
        """The call's."""
        return self.call.config

    def __getitem__(self, name: str) -> Tensor:
        """A tensor of the call, cut to this step."""
        return self.views[name][self.heads]

    def __contains__(self, name: str) -> bool:
        return name in self.views

    def buffer(self, name: str, side: str = "") -> Tensor:
        """A scratch buffer of the worker's, cut to this step's heads and, given a side, to its length."""
        x = self.call.scratch[name][self.worker, : self.heads.stop - self.heads.start]
        return x if side == "" else x[:, : self.seqlens["qk".index(side)]]


def lengths(segment: Segment) -> tuple[int, int]:
    """(seqlen_q, seqlen_k)."""
    _, rows, keys = segment
    return rows.stop - rows.start, keys.stop - keys.start


def segments(problem: Problem, tensors: Tensors) -> list[Segment]:
    """Every segment by its real lengths. Copies cu_seqlens and seqused to the host, so it waits for a GPU."""
    rows, keys = (_spans(problem, tensors, side) for side in "qk")
    return [(b, rows[b], keys[b]) for b in range(problem.batch)]


def _spans(problem: Problem, tensors: Tensors, side: str) -> list[slice]:
    cu, used = (tensors.get(f"{name}_{side}") for name in ("cu_seqlens", "seqused"))
    if problem.is_packed:
        edges = cu.tolist()
        starts, sizes = edges[:-1], [end - start for start, end in zip(edges[:-1], edges[1:], strict=True)]
    else:
        longest = problem.max_seqlen_q if side == "q" else problem.max_seqlen_k
        starts, sizes = [0] * problem.batch, [longest] * problem.batch
    sizes = sizes if used is None else used.tolist()
    return [slice(start, start + length) for start, length in zip(starts, sizes, strict=True)]


def head_major(x: Tensor, axes: str, b: int, rows: slice) -> Tensor:
    """The view [head, row, ...] of some rows of batch entry `b`."""
    if "b" in axes:
        x, axes = x.select(axes.index("b"), b), axes.replace("b", "")
    return x.movedim(axes.index("h"), 0)[:, rows]


def of_segment(problem: Problem, tensors: Tensors, names: tuple[str, ...], segment: Segment) -> dict[str, Tensor]:
    """Views of one segment: [kv head, row, group, dim] of a query-side tensor, [kv head, key, dim] of a key-side one.

    lse, dlse and delta are [kv head, row, group].
    """
    b, rows, keys = segment
    views = {}
    for name in names:
        axes = lse_axes(problem) if name in ROW_SCALARS else AXES[problem.layout]
        if SIDES.get(name, "q") == "k":
            views[name] = head_major(tensors[name], axes, b, keys)
        else:
            by_head = head_major(tensors[name], axes, b, rows)
            views[name] = by_head.unflatten(0, (problem.nheads_kv, problem.group)).transpose(1, 2)
    return views


def steps(call: Call, names: tuple[str, ...], found: list[Segment]) -> Iterator[Step]:
    """Every segment, and within it the kv heads, as many at a time as the config says."""
    problem, heads = call.problem, call.config.switch("heads")
    for segment in found:
        views = of_segment(problem, call.tensors, names, segment)
        for h in range(0, problem.nheads_kv, heads):
            yield Step(call, lengths(segment), slice(h, min(h + heads, problem.nheads_kv)), views)


def live_rows(problem: Problem, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Query rows [lo, hi) of a segment that see a key; the rest have no probabilities."""
    if seqlen_k == 0:
        return 0, 0
    lo, hi = q_range((0, seqlen_k), seqlen_q, seqlen_k, problem.band)
    return (lo, hi) if lo < hi else (0, 0)


def fill_gaps(problem: Problem, tensors: Tensors, names: tuple[str, ...], found: list[Segment]) -> None:
    """Write what rows outside every segment hold: 0, and -inf in lse."""
    for name in names:
        axes = lse_axes(problem) if name in ROW_SCALARS else AXES[problem.layout]
        side = SIDES.get(name, "q")
        spans = [(b, rows if side == "q" else keys) for b, rows, keys in found]
        for b, gap in _gaps(problem, spans, tensors[name].shape[axes.index("s")]):
            head_major(tensors[name], axes, b, gap).fill_(-torch.inf if name == "lse" else 0.0)


def _gaps(problem: Problem, spans: list[tuple[int, slice]], length: int) -> Iterator[tuple[int, slice]]:
    if problem.is_packed:
        edges = [0, *(edge for _, span in spans for edge in (span.start, span.stop)), length]
        yield from ((0, slice(a, z)) for a, z in zip(edges[::2], edges[1::2], strict=True) if a < z)
    else:
        yield from ((b, slice(span.stop, length)) for b, span in spans if span.stop < length)
