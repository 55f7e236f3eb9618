"""Steps to a device: compiled once a build, then called on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from ...layout import AXES, shapes
from ...problem import Problem
from .. import alloc
from ..spec import Config, Tensors
from .compiler import arguments, compile_launcher, launcher
from .plan import plan_workspace
from .steps import Step, backward_steps

FARTHEST = 1 << 21
"""Elements from token to token that keep the byte offsets of a 128-row block below 2**30."""


def backward(
    problem: Problem, config: Config, tensors: Tensors, scratch: Tensors, run: Callable[[Step], None] | None = None
) -> None:
    """Fill dq, dk, dv and dsink: preprocess, main, convert, gaps. `run` launches a step; default: on the device."""
    run = run_on_device if run is None else run
    token = AXES[problem.layout].index("s")
    tensors = dict(tensors) | {n: _readable(n, tensors[n], token) for n in ("q", "k", "v", "dout", "out")}
    for name in ("dq", "dk", "dv"):
        _check_writable(name, tensors[name], token)
    if min(problem.batch, problem.total_q, problem.total_k) == 0:
        for name in ("dq", "dk", "dv", "dsink"):
            if tensors.get(name) is not None:
                tensors[name].zero_()
        return
    for step in backward_steps(problem, config, tensors, scratch):
        run(step)
    if problem.has_sink:
        tensors["dsink"].copy_(scratch["dsink_rows"].flatten(1).sum(1))


def offline_steps(problem: Problem, config: Config) -> list[Step]:
    """The steps of a problem without tensors: what the probe and a compiler read; their pointers lead nowhere."""
    device = torch.device("meta")
    absent = ("seqused",) if problem.is_packed else ("seqused", "cu_seqlens")
    tensors = {
        name: alloc.output(shape, alloc.DTYPE[problem.dtype], device, poison=False)
        for name, shape in shapes(problem).items()
        if not name.startswith(absent)
    }
    scratch = {b.name: tensors["q"] for b in plan_workspace(problem, config).buffers}
    return backward_steps(problem, config, tensors, scratch)


def run_on_device(step: Step) -> None:
    """Launch one step on the current stream of its tensors' device; compiled on first use of its key there."""
    device = next(arg.device for arg in step.flat() if isinstance(arg, torch.Tensor))
    with current_stream(device) as stream:
        jit, compiled = _compiled(step.key, device.index)
        compiled(*arguments(jit, step.key, (*step.args, step.grid)), stream)


@contextmanager
def current_stream(device: torch.device) -> Iterator[int]:
    """The raw handle of the device's current stream, with the device made current."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream().cuda_stream


@lru_cache(maxsize=256)
def _compiled(key: tuple[str, str, Any, frozenset[str]], device: int | None) -> tuple[Any, Any]:
    jit = launcher(key)
    return jit, compile_launcher(jit, key)


def _fits(tensor: torch.Tensor, token_axis: int) -> bool:
    """Whether rows start on dword boundaries, and tokens neither overlap nor lie too far apart for 32-bit offsets."""
    step = tensor.stride(token_axis) if tensor.shape[token_axis] > 1 else tensor.shape[-1]
    even = tensor.data_ptr() % 4 == 0 and all(
        s % 2 == 0 for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1
    )
    return tensor.stride(-1) == 1 and even and tensor.shape[-1] <= step <= FARTHEST


def _readable(name: str, tensor: torch.Tensor, token_axis: int) -> torch.Tensor:
    """The tensor, or a contiguous copy where the kernels cannot read its strides."""
    if _fits(tensor, token_axis):
        return tensor
    copy = tensor.clone(memory_format=torch.contiguous_format)
    if not _fits(copy, token_axis):
        raise NotImplementedError(
            f"{name} has {copy.stride(token_axis)} elements from token to token, wanted at most {FARTHEST}"
        )
    return copy


def _check_writable(name: str, tensor: torch.Tensor, token_axis: int) -> None:
    if not _fits(tensor, token_axis):
        raise NotImplementedError(
            f"{name} has strides {tensor.stride()} at {tensor.data_ptr():#x}, wanted last stride 1, even strides, "
            f"tokens {tensor.shape[-1]} to {FARTHEST} elements apart, and a 4-byte aligned start"
        )
