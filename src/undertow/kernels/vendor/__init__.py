"""torch's own attention kernels as peers: each with what it cannot do, and why. No torch until one is launched."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..spec import Kernel, no_config, no_workspace
from . import limits as _


def _lazy(module: str, function: str) -> Callable[..., None]:
    """A function of a module of this package, imported at the first call."""

    def call(*arguments: object) -> None:
        getattr(import_module(f".{module}", __name__), function)(*arguments)

    return call


def _peer(name: str, about: str, limits: tuple, archs: frozenset[str] = _.NVIDIA, **fields: object) -> Kernel:
    module = "varlen" if name == "aten_flash_varlen" else "dense"
    short = name.removeprefix("sdpa_").removeprefix("aten_")
    forward, backward = (_lazy(module, f"{short}_{which}") for which in ("forward", "backward"))
    return Kernel(name, about, archs, limits, no_config, no_workspace, forward, backward, vendor=True, **fields)


KERNELS = (
    _peer(
        "sdpa_flash",
        "flash-attention 2 behind torch's SDPA; dK and dV of a GQA group are rounded a head before they are summed",
        (*_.SDPA, _.SIXTEEN_BIT, _.SQUARE_CAUSAL, _.EQUAL_DIMS, _.SM86_BACKWARD, _.NOT_DETERMINISTIC),
        executed_dims=_.flash_dims,
    ),
    _peer(
        "sdpa_cudnn",
        "cuDNN's attention behind torch's SDPA",
        (*_.SDPA, _.SIXTEEN_BIT, _.TOP_LEFT_CAUSAL, _.CUDNN_DIMS, _.CUDNN_KEYS, _.CUDNN_NOT_DETERMINISTIC),
    ),
    _peer(
        "sdpa_efficient",
        "the CUTLASS memory-efficient attention behind torch's SDPA",
        (*_.SDPA, _.MHA, _.TOP_LEFT_CAUSAL, _.NOT_DETERMINISTIC),
    ),
    _peer(
        "sdpa_cpu_flash",
        "torch's tiled CPU attention; 16-bit inputs are multiplied in 16 bits",
        (_.ON_CPU, *_.SDPA, _.TOP_LEFT_CAUSAL, _.EQUAL_DIMS),
        archs=frozenset(),
    ),
    _peer(
        "sdpa_math",
        "torch's unfused attention, O(seqlen_q * seqlen_k) fp32 memory; the backward recomputes, ignores out and lse",
        (*_.SDPA, _.TOP_LEFT_CAUSAL),
        archs=frozenset(),
        gemms=lambda p, t: (3, 3),
    ),
    _peer(
        "aten_flash_varlen",
        "flash-attention 2 over packed segments, aten::_flash_attention_forward and _backward",
        (_.PACKED, _.NOT_EMPTY, _.NO_MIXED_WINDOW, *_.COMMON, _.SIXTEEN_BIT, _.BOTTOM_RIGHT, _.EQUAL_DIMS,
         _.SM86_BACKWARD, _.NOT_DETERMINISTIC),
        executed_dims=_.flash_dims,
    ),
)  # fmt: skip
