"""Compile the launches of a problem for any target, without its hardware: the input of probe and simulator."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime.jit import create_function_from_signature

from ...layout import shapes
from ...problem import Problem
from ...target import Target
from .. import alloc
from . import config, host, plan_workspace

FP32 = ("lse", "dlse", "delta", "sink", "dsink")
INT32 = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
OPTIONAL = {"dlse": "has_dlse", "delta": "has_delta", "sink": "has_sink", "dsink": "has_sink"}


def launches(problem: Problem, target: Target, which: str) -> list[host.Launch]:
    """The launches of a pass on tensors without memory, as the host makes them."""
    tensors = {name: _placeholder(problem, name, shape) for name, shape in shapes(problem).items()}
    chosen = config(problem, target, which)
    if which == "forward":
        return list(host.forward_launches(problem, chosen, tensors))
    scratch = alloc.scratch(plan_workspace(problem, chosen), torch.device("meta"))
    return list(host.backward_launches(problem, chosen, tensors, scratch))


def compile_launch(launch: host.Launch, target: Target) -> Any:
    """Triton's compiled kernel of a launch: `.asm` (amdgcn or ptx, cubin) and `.metadata`.

    Compile in a subprocess when the kernel may hold an instruction the backend cannot select: LLVM aborts the process.
    """
    gpu = GPUTarget("hip", target.arch, target.warp_size) if target.vendor == "amd" else GPUTarget(
        "cuda", int(target.arch.removeprefix("sm_")), target.warp_size
    )  # fmt: skip
    backend = make_backend(gpu)
    fn = launch.kernel
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    arguments = dict(launch.meta)
    arguments["debug"] = False
    bound, specialization, options = bind(*launch.args, **arguments)
    options, signature, constants, attributes = fn._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(fn, signature, constants, attributes)
    return triton_compile(source, target=gpu, options=options.__dict__)


def _placeholder(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    if not getattr(problem, OPTIONAL.get(name, ""), True) or name in INT32 and not problem.is_packed:
        return None
    if name.startswith("seqused"):
        return None
    dtype = torch.float32 if name in FP32 else torch.int32 if name in INT32 else alloc.DTYPE[problem.dtype]
    return alloc.output(shape, dtype, torch.device("meta"))
