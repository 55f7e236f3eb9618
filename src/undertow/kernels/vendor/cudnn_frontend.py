"""cuDNN's attention through its Python frontend: packed, windowed, bottom-right, deterministic, unequal head dims."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...layout import AXES
from ...problem import Problem
from .. import alloc
from ..spec import Config, Kernel, Limit, Tensors, no_config, no_workspace
from . import limits as _

INSTALLED = Limit(
    "package nvidia-cudnn-frontend (module cudnn) is not importable",
    lambda p, t: find_spec("cudnn") is not None,
    "pip install nvidia-cudnn-frontend (extra 'peers')",
)
NO_RIGHT_WINDOW = Limit(
    "band (left={p.band.left}, right={p.band.right}): cuDNN bounds the left only together with right 0",
    lambda p, t: p.band.right in (None, 0) and (p.band.left is None or p.band.right == 0),
    "window_size=(left, 0)",
)


@dataclass(frozen=True)
class Graph:
    """A built cuDNN graph: its tensors by our argument names, its workspace."""

    graph: Any
    tensors: dict[str, Any]
    nbytes: int


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse."""
    _execute(problem, tensors, "forward", ("q", "k", "v", "out"))


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv from out and lse."""
    _execute(problem, tensors, "backward", ("q", "k", "v", "out", "dout", "dq", "dk", "dv"))


def forget() -> None:
    """Drop built graphs and the offsets of packed tensors."""
    _graph.cache_clear()
    _offsets.cache_clear()


def _execute(problem: Problem, tensors: Tensors, which: str, names: tuple[str, ...]) -> None:
    """Run the graph of a pass. The LSE of packed rows is row-major for cuDNN and head-major for us, so it is copied."""
    handle = _handle(torch.cuda.current_device())
    strides = tuple(_bhsd(problem, tensors[n]).stride() for n in names)
    built = _graph(problem, which, names, strides)
    stats = tensors["lse"].t().contiguous() if problem.is_packed else tensors["lse"]
    stats = stats if stats.is_contiguous() else stats.contiguous()
    given = {n: tensors[n] for n in names} | {"lse": stats} | _segments(problem, tensors)
    workspace = alloc.output((max(1, built.nbytes),), torch.uint8, tensors["q"].device)
    _set_stream(handle)
    built.graph.execute({t: given[n] for n, t in built.tensors.items()}, workspace, handle=handle)
    if which == "forward" and stats.data_ptr() != tensors["lse"].data_ptr():
        tensors["lse"].copy_(stats.t() if problem.is_packed else stats)


@lru_cache(maxsize=8)
def _graph(problem: Problem, which: str, names: tuple[str, ...], strides: tuple[tuple[int, ...], ...]) -> Graph:
    import cudnn

    kind = cudnn.data_type.BFLOAT16 if problem.dtype == "bf16" else cudnn.data_type.HALF
    fp32 = cudnn.data_type.FLOAT
    handle = _handle(torch.cuda.current_device())
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    t: dict[str, Any] = {}
    if problem.is_packed:
        _ragged(graph, problem, t, names)
    for name, stride in zip(names, strides, strict=True):
        if name in ("q", "k", "v", "dout") or (name == "out" and which == "backward"):
            t[name] = _tensor(graph, problem, t, name, stride)
    options = _options(cudnn, problem, t)
    if which == "forward":
        out, stats = graph.sdpa(q=t["q"], k=t["k"], v=t["v"], generate_stats=True, **options)
        _output(problem, t, {"out": out}, dict(zip(names, strides, strict=True)))
        stats.set_output(True).set_data_type(fp32).set_dim(_stats(problem)[0]).set_stride(_stats(problem)[1])
        if problem.is_packed:
            stats.set_ragged_offset(t["ragged_lse"])
        t["lse"] = stats
    else:
        dim, stride = _stats(problem)
        t["lse"] = graph.tensor(name="stats", dim=dim, stride=stride, data_type=fp32)
        if problem.is_packed:
            t["lse"].set_ragged_offset(t["ragged_lse"])
            options |= {"max_total_seq_len_q": problem.total_q, "max_total_seq_len_kv": problem.total_k}
        found = graph.sdpa_backward(
            q=t["q"], k=t["k"], v=t["v"], o=t["out"], dO=t["dout"], stats=t["lse"],
            use_deterministic_algorithm=problem.deterministic, **options,
        )  # fmt: skip
        _output(problem, t, dict(zip(("dq", "dk", "dv"), found, strict=True)), dict(zip(names, strides, strict=True)))
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise NotImplementedError(f"cuDNN has no engine for this graph: {error}") from error
    return Graph(graph, t, graph.get_workspace_size())


def _options(cudnn: Any, problem: Problem, t: dict[str, Any]) -> dict[str, Any]:
    """Scale, band and segments as keywords of both nodes."""
    band = problem.band
    options: dict[str, Any] = {"attn_scale": problem.scale}
    if band.right is not None:
        corner = cudnn.diagonal_alignment
        options["diagonal_alignment"] = corner.TOP_LEFT if _top_left(problem) else corner.BOTTOM_RIGHT
        options["diagonal_band_right_bound"] = band.right
    if band.left is not None:
        options["diagonal_band_left_bound"] = band.left + 1  # cuDNN counts the diagonal
    if problem.is_packed:
        options |= {"use_padding_mask": True, "seq_len_q": t["seqlens_q"], "seq_len_kv": t["seqlens_k"]}
    return options


def _top_left(problem: Problem) -> bool:
    """Whether the band may be called top-left, as it may where every segment is square.

    The engine that cuDNN 9.19 takes for a bottom-right backward on an H200 is the slower by far: a window of 1024 over
    16384 rows ran at 31 TFLOP/s.
    """
    if problem.band.align == "top_left":
        return True
    if problem.is_packed:
        return problem.seqlens_q is not None and problem.seqlens_q == problem.seqlens_k
    return problem.max_seqlen_q == problem.max_seqlen_k


def _ragged(graph: Any, problem: Problem, t: dict[str, Any], names: tuple[str, ...]) -> None:
    """Length and offset tensors of a packed call: [batch] lengths and [batch + 1] element offsets, one a row width."""
    import cudnn

    lengths, offsets = (problem.batch, 1, 1, 1), (problem.batch + 1, 1, 1, 1)
    for side in "qk":
        t[f"seqlens_{side}"] = graph.tensor(name=f"seqlens_{side}", dim=lengths, stride=(1, 1, 1, 1),
                                            data_type=cudnn.data_type.INT32)  # fmt: skip
    for name in (*names, "lse"):
        key = f"ragged_{_row(problem, name)[0]}" if name != "lse" else "ragged_lse"
        if key not in t:
            t[key] = graph.tensor(name=key, dim=offsets, stride=(1, 1, 1, 1), data_type=cudnn.data_type.INT64)


def _row(problem: Problem, name: str) -> tuple[str, int]:
    """(key, elements of a row) of a contiguous packed tensor: query or key side, qk or v dim."""
    side = "k" if name in ("k", "v", "dk", "dv") else "q"
    wide = name in ("v", "out", "dout", "dv")
    heads = problem.nheads_kv if side == "k" else problem.nheads_q
    dim = problem.head_dim_v if wide else problem.head_dim_qk
    return f"{side}_{'v' if wide else 'qk'}", heads * dim


def _tensor(graph: Any, problem: Problem, t: dict[str, Any], name: str, stride: tuple[int, ...]) -> Any:
    tensor = graph.tensor(name=name, dim=_dim(problem, name), stride=_stride(problem, name, stride))
    if problem.is_packed:
        tensor.set_ragged_offset(t[f"ragged_{_row(problem, name)[0]}"])
    return tensor


def _output(problem: Problem, t: dict[str, Any], found: dict[str, Any], strides: dict[str, tuple[int, ...]]) -> None:
    for name, tensor in found.items():
        tensor.set_output(True).set_dim(_dim(problem, name)).set_stride(_stride(problem, name, strides[name]))
        if problem.is_packed:
            tensor.set_ragged_offset(t[f"ragged_{_row(problem, name)[0]}"])
        t[name] = tensor


def _dim(problem: Problem, name: str) -> tuple[int, ...]:
    side, wide = _row(problem, name)[0].split("_")
    heads, rows = (problem.nheads_kv, problem.max_seqlen_k) if side == "k" else (problem.nheads_q, problem.max_seqlen_q)
    return problem.batch, heads, rows, problem.head_dim_v if wide == "v" else problem.head_dim_qk


def _stride(problem: Problem, name: str, stride: tuple[int, ...]) -> tuple[int, ...]:
    """(batch, head, row, dim) strides; a packed batch is as far apart as its longest segment could be."""
    if not problem.is_packed:
        return stride
    return (stride[2] * _dim(problem, name)[2], *stride[1:])


def _stats(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dim and stride of the LSE: dense (b, h, s, 1), packed rows of nheads_q."""
    b, h, s = problem.batch, problem.nheads_q, problem.max_seqlen_q
    return (b, h, s, 1), (h * s, 1, h, 1) if problem.is_packed else (h * s, s, 1, 1)


def _segments(problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    """Length and offset tensors by the names of `_ragged`."""
    if not problem.is_packed:
        return {}
    if tensors.get("seqused_q") is not None or tensors.get("seqused_k") is not None:
        raise NotImplementedError("seqused was given: this peer takes packed segments without gaps")
    for name in ("q", "k", "v", "out"):
        if not tensors[name].is_contiguous():
            raise NotImplementedError(f"packed {name} has strides {tensors[name].stride()}, wanted contiguous")
    return _offsets(problem, tensors["cu_seqlens_q"], tensors["cu_seqlens_k"])


@lru_cache(maxsize=8)
def _offsets(problem: Problem, cu_q: Tensor, cu_k: Tensor) -> dict[str, Tensor]:
    cu = {"q": cu_q.long(), "k": cu_k.long()}
    made = {f"seqlens_{side}": cu[side].diff().int() for side in "qk"}
    for name in ("q", "k", "v", "out"):
        key, width = _row(problem, name)
        made[f"ragged_{key}"] = cu[key[0]] * width
    return made | {"ragged_lse": cu["q"] * problem.nheads_q}


def _bhsd(problem: Problem, x: Tensor) -> Tensor:
    if problem.is_packed:
        return x.transpose(0, 1)[None]
    return x.permute(tuple(AXES[problem.layout].index(axis) for axis in "bhsd"))


@lru_cache(maxsize=8)
def _handle(index: int) -> Any:
    import cudnn

    return cudnn.create_handle()


def _set_stream(handle: Any) -> None:
    import cudnn

    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)


KERNEL = Kernel(
    "cudnn_frontend",
    "cuDNN's attention through nvidia-cudnn-frontend, best plan of its heuristic",
    _.NVIDIA,
    (INSTALLED, _.NOT_EMPTY, _.SIXTEEN_BIT, NO_RIGHT_WINDOW, *_.COMMON),
    no_config,
    no_workspace,
    forward,
    backward,
    vendor=True,
)
