"""A functional simulator of AMD CDNA3/CDNA4 machine code: run gfx942 and gfx950 kernels on a CPU, with checks.

`triton`, `isa` and `code_object` run a kernel on CPU tensors and return a `Report`. numpy is the only dependency.
"""

from .asm import AsmError
from .launch import Options, code_object, isa, simulate_module, triton
from .machine import SimulationError
from .report import Finding, Report
from .state import UnsupportedError

__all__ = [
    "AsmError",
    "Finding",
    "Options",
    "Report",
    "SimulationError",
    "UnsupportedError",
    "code_object",
    "isa",
    "simulate_module",
    "triton",
]
