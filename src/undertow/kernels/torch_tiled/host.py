"""Entry points of the tiled kernel: cut the call into segments and runs of kv heads, and run the stages on each."""

from __future__ import annotations

from ...problem import Problem
from ..alloc import scratch as allocate
from ..spec import Config, Tensors
from .backward import delta, dsink, gradients
from .forward import attend
from .plan import forward_workspace
from .threads import share
from .tiles import band_bias, true_fp32
from .views import Call, Step, fill_gaps, segments, steps


def forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """Fill out and lse from q, k, v (and sink), in the problem's layout and with any strides.

    Packed lengths (cu_seqlens, seqused) are read on the host: on a GPU this synchronises.
    """
    device = tensors["q"].device
    with true_fp32(device.type):
        found = segments(problem, tensors)
        fill_gaps(problem, tensors, ("out", "lse"), found)
        scratch = allocate(forward_workspace(problem, config), device)
        call = Call(problem, config, tensors, scratch, band_bias(problem.band, device))
        share(attend, steps(call, ("q", "k", "v", "out", "lse"), found), config.switch("workers"))


def backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """Fill dq, dk, dv (and dsink) from dout, q, k, v, out, lse (and sink, dlse, delta) and the plan's scratch.

    Packed lengths (cu_seqlens, seqused) are read on the host: on a GPU this synchronises. There is one order of
    additions: two runs with the same number of threads agree bit for bit.
    """
    device = tensors["q"].device
    names = ("q", "k", "v", "dout", "lse", "D", "dq", "dk", "dv", "out" if tensors.get("delta") is None else "delta")
    names += () if tensors.get("dlse") is None else ("dlse",)
    with true_fp32(device.type):
        found = segments(problem, tensors)
        fill_gaps(problem, tensors, ("dq", "dk", "dv"), found)
        call = Call(problem, config, {**tensors, "D": scratch["delta"]}, scratch, band_bias(problem.band, device))
        share(_backward_step, steps(call, names, found), config.switch("workers"))
        if tensors.get("sink") is not None:
            dsink(problem, tensors, scratch, found)


def _backward_step(step: Step) -> None:
    delta(step)
    gradients(step)
