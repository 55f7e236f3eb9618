"""Triton's kernels run in its CPU interpreter where there is no GPU; that must be settled before triton is imported.

Interpreted and compiled kernels cannot live in one process: tests/simulator compiles, so it runs in a process of its
own (`pytest tests/simulator`), and a run over other tests leaves it out, and says so.
"""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

COMPILED = Path(__file__).parent / "simulator"
settings.register_profile(
    "undertow", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("undertow")
torch.set_num_threads(2)


def _asked_for_compiled(config) -> list[bool]:
    paths = [Path(a.split("::")[0]).resolve() for a in config.args]
    return [p == COMPILED or COMPILED in p.parents for p in paths]


def pytest_configure(config):
    compiled = _asked_for_compiled(config)
    if any(compiled) and not all(compiled):
        raise pytest.UsageError("tests/simulator compiles what other tests interpret: run it in a process of its own")
    if not any(compiled) and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path, config):
    return True if collection_path == COMPILED and not any(_asked_for_compiled(config)) else None


def pytest_report_header(config):
    if any(_asked_for_compiled(config)):
        return "triton: compiled offline"
    where = "interpreted on this CPU" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled for this GPU"
    return f"triton: {where}; tests/simulator is left out, it needs a process of its own"


def pytest_collection_modifyitems(items):
    missing = None if torch.cuda.is_available() else pytest.mark.skip(reason="no CUDA or ROCm device on this machine")
    for item in items:
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(missing)
