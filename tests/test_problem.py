"""What a Problem refuses, what it normalises, and that it is plain data."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from undertow.layout import AXES, lse_axes, shapes
from undertow.problem import LAYOUTS, Band, Problem

SMALL = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 24, "head_dim_v": 16}


@pytest.mark.parametrize(
    "fields, error, text",
    [
        ({"dtype": "fp64"}, ValueError, "dtype is 'fp64', wanted one of"),
        ({"layout": "hbsd"}, ValueError, "layout is 'hbsd', wanted one of"),
        ({"nheads_q": 5}, ValueError, "nheads_q=5 is not a positive multiple of nheads_kv=2"),
        ({"nheads_kv": 0}, ValueError, "nheads_q=4 is not a positive multiple of nheads_kv=0"),
        ({"nheads_q": 0}, ValueError, "nheads_q=0 is not a positive multiple"),
        ({"head_dim_qk": 20}, NotImplementedError, "head_dim_qk is 20, wanted a multiple of 8 up to 256"),
        ({"head_dim_v": 264}, NotImplementedError, "head_dim_v is 264, wanted a multiple of 8 up to 256"),
        ({"head_dim_v": 0}, NotImplementedError, "head_dim_v is 0, wanted a multiple of 8"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0, wanted a finite number >= 0"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan, wanted a finite number >= 0"),
        ({"softcap": float("inf")}, ValueError, "softcap is inf, wanted a finite number >= 0"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan, wanted a finite number"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale is inf, wanted a finite number"),
        ({"total_q": -1}, ValueError, "total_q is -1, wanted >= 0"),
        ({"max_seqlen_k": -3}, ValueError, "max_seqlen_k is -3, wanted >= 0"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_wanted(fields, error, text):
    with pytest.raises(error) as caught:
        replace(Problem.dense(2, 8, 12, **SMALL), **fields)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"window_size": (-2, 0)}, "window_size is (-2, 0), wanted (left, right), each >= -1"),
        ({"window_size": (1, 2, 3)}, "window_size is (1, 2, 3)"),
        ({"align": "middle"}, "causal_align is 'middle', wanted one of"),
    ],
)
def test_bad_flags(arguments, text):
    with pytest.raises(ValueError) as caught:
        Band.from_flags(**({"causal": False} | arguments))
    assert text in str(caught.value)


@pytest.mark.parametrize("sides", [(-1, 0), (0, -1), (2, -3)])
def test_a_band_that_holds_no_key_is_refused(sides):
    with pytest.raises(ValueError, match="holds no key"):
        Band(*sides)
    Band(2, -2), Band(-2, 2)  # one diagonal is a band


def test_equal_masks_make_equal_problems():
    """B55: the causal window that cuts nothing is causal, so it is one compile key and one plan."""
    problems = {
        Problem.dense(1, 160, 160, band=band, **SMALL)
        for band in (Band(None, 0), Band(159, 0), Band(160, 0), Band(10**9, 0))
    }
    assert len(problems) == 1
    assert Problem.dense(1, 160, 160, band=Band(158, 0), **SMALL) not in problems
    assert Problem.dense(1, 160, 160, band=Band(None, 159), **SMALL).band == Band()


def test_it_is_frozen_and_hashable():
    problem = Problem.packed((3, 0, 7), **SMALL)
    with pytest.raises(FrozenInstanceError):
        problem.batch = 2
    assert hash(problem) == hash(Problem.packed((3, 0, 7), **SMALL))


def test_packed_and_dense_count_their_rows():
    packed = Problem.packed((3, 0, 7), (1, 2, 9), **SMALL)
    assert (packed.batch, packed.total_q, packed.total_k) == (3, 10, 12)
    assert (packed.max_seqlen_q, packed.max_seqlen_k, packed.layout) == (7, 9, "thd")
    assert packed.cu_seqlens("q") == (0, 3, 3, 10) and packed.cu_seqlens("k") == (0, 1, 3, 12)
    dense = Problem.dense(3, 8, 12, **SMALL)
    assert (dense.total_q, dense.total_k, dense.segments) == (24, 36, ((8, 12),) * 3)
    assert dense.scale == 24**-0.5 and replace(dense, softmax_scale=0.25).scale == 0.25
    assert dense.group == 2
    with pytest.raises(ValueError, match="seqlens_q has 3 segments, seqlens_k has 2"):
        Problem.packed((3, 0, 7), (1, 2), **SMALL)
    with pytest.raises(ValueError, match="does not know its segment lengths"):
        _ = replace(packed, seqlens_q=None).segments


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_follow_the_axes(layout):
    problem = (
        Problem.packed((3, 7), (1, 9), **SMALL) if layout == "thd" else Problem.dense(3, 8, 12, layout=layout, **SMALL)
    )
    sizes_q = {"b": 3, "s": 10 if layout == "thd" else 8, "h": 4}
    sizes_k = {"b": 3, "s": 10 if layout == "thd" else 12, "h": 2}
    found = shapes(problem)
    for names, sizes, dim in (
        (("q", "dq"), sizes_q, 24),
        (("out", "dout"), sizes_q, 16),
        (("k", "dk"), sizes_k, 24),
        (("v", "dv"), sizes_k, 16),
    ):
        for name in names:
            assert found[name] == tuple((sizes | {"d": dim})[axis] for axis in AXES[layout]), name
    want = tuple(sizes_q[axis] for axis in lse_axes(problem))
    assert found["lse"] == found["delta"] == found["dlse"] == want


def test_planning_imports_no_torch():
    """DESIGN section 2: floors 0 to 2, dispatch included, answer before torch could be imported."""
    code = (
        "import sys, undertow\n"
        "from undertow import Problem, Band, Target, explain\n"
        "from undertow.target import TARGETS\n"
        "p = Problem.packed((5, 9), nheads_q=2, nheads_kv=1, head_dim_qk=192, head_dim_v=128)\n"
        "assert any(v.status == 'chosen' for v in explain(p, TARGETS['gfx942']))\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
