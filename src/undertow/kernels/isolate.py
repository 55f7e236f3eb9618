"""FlyDSL and CUTLASS's DSL each bring an MLIR of their own: the second one imported ends the process (nanobind)."""

from __future__ import annotations

import sys

OTHER = {"flydsl": "cutlass", "cutlass": "flydsl"}


def claim(package: str) -> None:
    """Call before importing one of the two. Raises RuntimeError where the other is loaded."""
    other = OTHER[package]
    if other in sys.modules and package not in sys.modules:
        raise RuntimeError(f"{package} cannot be loaded beside {other}, which this process holds: use another process")
