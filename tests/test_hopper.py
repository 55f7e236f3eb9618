"""The Hopper kernel's host side on a CPU: side kernels in Triton's interpreter, the main kernel as torch tiles.

The device code itself is compiled and inspected in test_hopper_build.py, and run by the GPU tests.
"""

from dataclasses import replace

import pytest
import torch
from hopper_emulator import emulate
from support import CAUSAL, DEVICE, prove

from undertow import dispatch
from undertow.kernels import hopper
from undertow.kernels.hopper import build
from undertow.kernels.hopper.geometry import choose
from undertow.problem import Band, Problem
from undertow.target import TARGETS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the emulation replaces the compiled kernel; CPU only")
DIMS = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64}
BANDS = {"full": Band(), "causal": CAUSAL, "top_left": Band(None, 0, "top_left"), "window": Band(70, 9)}
SEGMENTS = ((200, 0, 1, 130, 3), (129, 3, 36, 0, 300))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    target = replace(TARGETS["sm_90"], num_cus=4)
    kernel = replace(
        hopper.KERNEL, archs=frozenset({"cpu"}), config=lambda p, t, w: hopper.config(p, target, w),
        limits=hopper.LIMITS[:-1],
    )  # fmt: skip
    monkeypatch.setattr(build, "entry", emulate)
    monkeypatch.setattr(dispatch, "BY_NAME", (*dispatch.BY_NAME, kernel))
    monkeypatch.setattr(dispatch, "KERNELS", tuple(k for k in dispatch.KERNELS if k.name != "hopper"))
    dispatch.select.cache_clear()
    yield
    dispatch.select.cache_clear()


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_dense_bands(band):
    prove(Problem.dense(2, 200, 270, band=band, **DIMS), "hopper")


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_packed_with_nan_gaps(band):
    prove(Problem.packed(*SEGMENTS, band=band, **DIMS), "hopper", gap=5)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_layouts(layout):
    prove(Problem.dense(2, 70, 150, layout=layout, band=CAUSAL, **DIMS), "hopper")


PAIRS = [(192, 128), (128, 128), (96, 96), (40, 40), (72, 80), (112, 112), (64, 128), (8, 16), (256, 256), (256, 128)]


@pytest.mark.parametrize("dims", PAIRS)
def test_head_dims(dims):
    """Fused, two kernels (112), and one for each of dK and dV (256)."""
    pair = {"head_dim_qk": dims[0], "head_dim_v": dims[1]}
    prove(Problem.packed((70, 130), (130, 70), band=CAUSAL, **(DIMS | pair)), "hopper")


def test_sink_and_lse_gradient():
    prove(Problem.packed(*SEGMENTS, band=CAUSAL, has_sink=True, has_dlse=True, **DIMS), "hopper", gap=3)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_deterministic_plan(band):
    """Two kernels, no dQ accumulator; packed with NaN gaps, and dense."""
    problem = Problem.packed(*SEGMENTS, band=band, deterministic=True, **DIMS)
    prove(problem, "hopper", gap=5)
    assert "dq_acc" not in hopper.plan_workspace(problem, hopper.config(problem, TARGETS["sm_90"], "backward"))
    prove(Problem.dense(2, 200, 270, band=band, deterministic=True, **DIMS), "hopper")


def test_many_segments_are_sorted_and_found():
    """More segments than a chunk of the table holds, of falling and rising lengths."""
    lengths = tuple((7 * i) % 23 for i in range(75))
    prove(Problem.packed(lengths, tuple(reversed(lengths)), band=CAUSAL, **DIMS), "hopper", gap=1)


def test_fp16():
    prove(Problem.dense(1, 130, 130, band=CAUSAL, dtype="fp16", **DIMS), "hopper")


def test_every_claimed_geometry_fits():
    """Registers and shared memory by the formulas; without dq_acc there is a plan for every pair."""
    assert choose(256, 256) is None
    for qk in range(8, 257, 8):
        for v in range(8, 257, 8):
            for geometry in (choose(qk, v), choose(qk, v, dq=False)):
                assert geometry is None or (geometry.feasible and geometry.d_qk >= qk and geometry.d_v >= v)
            assert choose(qk, v, dq=False) is not None


def test_outputs_that_the_copy_engine_cannot_write_are_copied():
    q = torch.zeros(2, 5, 3, 12)[..., :8]  # rows of 24 bytes in bf16
    from undertow.kernels.hopper.host import _tma

    assert _tma(q.bfloat16().expand(2, 5, 3, 8), "bshd").stride(2) % 8 == 0
    odd = torch.zeros(2, 5, 3, 12, dtype=torch.bfloat16)[..., :8]
    assert _tma(odd, "bshd").data_ptr() != odd.data_ptr()
    even = torch.zeros(2, 3, 5, 16, dtype=torch.bfloat16)[..., :8]
    assert _tma(even, "bhsd").data_ptr() == even.data_ptr() and _tma(even, "bhsd").shape == (2, 5, 3, 8)
