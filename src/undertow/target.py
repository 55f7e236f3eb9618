"""The machine a kernel is built for. `detect` is the only device query of the library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .env import settings


@dataclass(frozen=True, slots=True)
class Target:
    """What a kernel may assume of the hardware.

    `lds_bytes` is the shared memory (LDS) one workgroup may use, `num_cus` the streaming multiprocessors, compute
    units or CPU threads, `num_queues` the static queues blocks are dealt to (AMD XCDs; 1 pool elsewhere).
    `interpreter` is set when Triton interprets its kernels on this CPU.
    """

    arch: str
    vendor: str
    warp_size: int
    lds_bytes: int
    registers_per_lane: int
    num_cus: int
    num_queues: int = 1
    interpreter: bool = False

    @staticmethod
    def named(arch: str) -> Target:
        """The known target of that name; ValueError lists the names."""
        if arch not in TARGETS:
            raise ValueError(f"target is {arch!r}, wanted one of {', '.join(TARGETS)}")
        return TARGETS[arch]


TARGETS = {
    t.arch: t
    for t in (
        Target("gfx942", "amd", 64, 64 * 1024, 512, 304, num_queues=8),
        Target("gfx950", "amd", 64, 160 * 1024, 512, 256, num_queues=8),
        Target("sm_80", "nvidia", 32, 163 * 1024, 255, 108),
        Target("sm_86", "nvidia", 32, 99 * 1024, 255, 84),
        Target("sm_89", "nvidia", 32, 99 * 1024, 255, 128),
        Target("sm_90", "nvidia", 32, 227 * 1024, 255, 132),
        Target("sm_100", "nvidia", 32, 227 * 1024, 255, 148),
        Target("sm_120", "nvidia", 32, 99 * 1024, 255, 170),
        Target("cpu", "cpu", 1, 0, 0, 1),
    )
}


def detect(device: Any = None) -> Target:
    """The target of a torch device; None means the best one of this machine (the current GPU, else the CPU)."""
    import torch

    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cpu" or device.type == "meta":
        threads = torch.get_num_threads()
        return replace(TARGETS["cpu"], num_cus=threads, interpreter=settings().triton_interpret)
    if device.type != "cuda":
        raise NotImplementedError(f"device is {device.type!r}, wanted cuda (NVIDIA or ROCm) or cpu")
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _gpu(index: int) -> Target:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        known = TARGETS.get(arch, Target(arch, "amd", properties.warp_size, 64 * 1024, 512, 0))
        return replace(known, num_cus=properties.multi_processor_count)
    arch = f"sm_{properties.major}{properties.minor}"
    return Target(
        arch, "nvidia", 32, properties.shared_memory_per_block_optin, 255, properties.multi_processor_count
    )
