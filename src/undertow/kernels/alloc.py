"""WorkspacePlan to tensors: the only allocator of scratch and outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..workspace import ALIGNMENT, WorkspacePlan

DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32}
HOST_ALIGNMENT = 64  # what torch's CPU allocator gives; a device needs ALIGNMENT
GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF  # every float format reads 0xFF.. as NaN

Workspace = Tensor | Callable[[int, bool], Tensor] | None


def scratch(plan: WorkspacePlan, device: torch.device, memory: Tensor | None = None) -> dict[str, Tensor]:
    """The plan's buffers as tensors over `memory` (uint8, at least plan.nbytes), zeroed where the plan says so.

    Allocates on `device` when `memory` is None.
    """
    if memory is None:
        memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    tensors = {}
    for buffer in plan.buffers:
        start = plan.offset(buffer.name)
        tensors[buffer.name] = memory[start : start + buffer.nbytes].view(DTYPE[buffer.dtype]).view(buffer.shape)
        if buffer.zeroed:
            tensors[buffer.name].zero_()
    return tensors


def resolve(workspace: Workspace, plan: WorkspacePlan, device: torch.device) -> Tensor | None:
    """The caller's memory as a uint8 tensor of exactly plan.nbytes, checked; None when the caller gave none.

    Raises:
        ValueError: too small, misaligned, not contiguous bytes, or on another device; the text has need and have.
    """
    if workspace is None:
        return None
    memory = workspace(plan.nbytes, plan.zero_init) if callable(workspace) else workspace
    if not isinstance(memory, Tensor):
        raise ValueError(f"workspace gave a {type(memory).__name__}, wanted a tensor of {plan.nbytes} bytes")
    have = memory.numel() * memory.element_size()
    boundary = HOST_ALIGNMENT if device.type == "cpu" else ALIGNMENT
    faults = {
        f"workspace is on {memory.device}, wanted {device}": memory.device != device,
        f"workspace has {have} bytes, needs {plan.nbytes}": have < plan.nbytes,
        f"workspace strides are {memory.stride()}, wanted contiguous": not memory.is_contiguous(),
        f"workspace starts at {memory.data_ptr():#x}, wanted a multiple of {boundary}": plan.nbytes > 0
        and memory.data_ptr() % boundary != 0,
    }
    for fault, found in faults.items():
        if found:
            raise ValueError(fault)
    return memory.detach().reshape(-1).view(torch.uint8)[: plan.nbytes]


def output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, poison: bool = False) -> Tensor:
    """A contiguous output; NaN-filled when `poison`, so that an element nobody writes shows."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return tensor.fill_(float("nan")) if poison else tensor


class Fence:
    """Scratch with a guard band before, between and after every buffer, NaN-poisoned where the plan does not zero.

    `check()` raises when a kernel wrote outside its buffers. For verify and tests: it synchronises and costs memory.
    """

    def __init__(self, plan: WorkspacePlan, device: torch.device) -> None:
        self._spans: list[tuple[str, int, int]] = []
        at = GUARD_BYTES
        for buffer in plan.buffers:
            self._spans.append((buffer.name, at, at + buffer.nbytes))
            at = -(-(at + buffer.nbytes) // ALIGNMENT) * ALIGNMENT + GUARD_BYTES
        self._memory = torch.full((at,), GUARD_BYTE, dtype=torch.uint8, device=device)
        self.tensors: dict[str, Tensor] = {}
        for (name, start, end), buffer in zip(self._spans, plan.buffers, strict=True):
            span = self._memory[start:end].fill_(0 if buffer.zeroed else POISON_BYTE)
            self.tensors[name] = span.view(DTYPE[buffer.dtype]).view(buffer.shape)

    def check(self) -> None:
        """Raise RuntimeError naming the buffer beside which a guard byte changed."""
        ends = [("before the first buffer", 0), *((f"behind {name}", end) for name, _, end in self._spans)]
        starts = [*(start for _, start, _ in self._spans), self._memory.numel()]
        for (where, end), start in zip(ends, starts, strict=True):
            self._intact(end, start, where)

    def _intact(self, start: int, end: int, where: str) -> None:
        broken = (self._memory[start:end] != GUARD_BYTE).nonzero()
        if broken.numel():
            raise RuntimeError(f"a kernel wrote {broken.numel()} bytes {where}, the first {int(broken[0])} bytes in")


