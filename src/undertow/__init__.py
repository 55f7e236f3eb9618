"""Fused attention backward for AMD and NVIDIA GPUs and the CPU, and the instruments that prove it right."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Band": "problem",
    "Problem": "problem",
    "Target": "target",
    "explain": "dispatch",
    "Grads": "ops",
    "attention": "ops",
    "attention_backward": "ops",
    "attention_varlen": "ops",
    "attention_varlen_backward": "ops",
    "checked": "env",
    "workspace_nbytes": "ops",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
