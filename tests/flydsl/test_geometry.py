"""The geometry: what is derived, what is refused and with which numbers, and which tile a head-dim pair gets."""

from dataclasses import fields, replace
from itertools import product

import pytest

from undertow import cost
from undertow.kernels.flydsl import KERNEL, LOW_MEMORY, plan
from undertow.kernels.flydsl.geometry import Geometry
from undertow.problem import Band, Problem
from undertow.target import TARGETS

MLA = Geometry()
DIMS = [(192, 128), (128, 128), (64, 64), (96, 96), (128, 64), (32, 32), (160, 160), (192, 192), (256, 64), (256, 256)]
DIMS += [(224, 96), (64, 256)]


def problem(qk=192, v=128, **fields_):
    heads = {"nheads_q": 2, "nheads_kv": 1, "band": Band(None, 0)}
    return Problem.dense(1, 256, 256, head_dim_qk=qk, head_dim_v=v, **heads, **fields_)


def test_resolved_geometry_of_the_published_build():
    echo = MLA.echo()
    assert (echo["threads"], echo["mfma_k"], echo["key_tiles"], echo["q_tiles"], echo["dq_tiles"]) == (512, 16, 1, 2, 3)
    assert echo["lds_bytes"] == 25088 + 16896 + 8448 + 256 + 256 == 50944 <= 51200
    assert echo["mfma_per_wave"] == 104 and replace(MLA, arch="gfx950").mfma_per_wave() == 52
    assert echo["barriers"] == 2 and replace(MLA, pipeline=False).barriers == 3


def test_every_knob_is_echoed_and_described():
    assert {f.name for f in fields(Geometry)} <= set(MLA.echo())
    knobs = ["qk_head_dim", "v_head_dim", "block_m", "block_n", "num_waves", "dq_groups", "transposed_tiles"]
    for name in [*knobs, "pipeline", "schedule", "sched_steps", "kv_major"]:
        lines = [line for line in Geometry.__doc__.splitlines() if line.strip().startswith(f"{name} ")]
        assert len(lines) == 1, name


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"block_n": 192}, "block_n=192 % (num_waves=8 * 16) != 0"),
        ({"block_m": 24}, "block_m=24 % 16 != 0"),
        ({"block_m": 16, "arch": "gfx950"}, "block_m=16 % 32 != 0"),
        ({"qk_head_dim": 96, "v_head_dim": 96}, "= 12 dQ tiles % (num_waves=8/dq_groups=1) = 4"),
        ({"dq_groups": 3}, "num_waves=8 % dq_groups=3 != 0"),
        ({"dq_groups": 16}, "num_waves=8 % dq_groups=16 != 0"),
        ({"qk_head_dim": 72}, "qk_head_dim=72, wanted a multiple of 32 up to 256"),
        ({"v_head_dim": 288}, "v_head_dim=288, wanted a multiple of 32 up to 256"),
        ({"transposed_tiles": True}, "wide_t 27648 + slim_t 18432"),
        ({"block_m": 64}, "= 101888 bytes, gfx942 has 65536"),
        ({"num_waves": 32, "block_n": 512}, "num_waves=32 is 2048 threads, at most 1024"),
        ({"accumulate": "bf16"}, "a wave has 3: wanted an even number"),
        ({"accumulate": "bf16", "dq_groups": 2, "dtype": "fp16"}, "accumulate='bf16' needs dtype='bf16'"),
        ({"schedule": "magic"}, "schedule is 'magic', wanted one of"),
        ({"sched_steps": 0}, "sched_steps=0, wanted at least 1"),
        ({"arch": "gfx90a"}, "arch is 'gfx90a'"),
        ({"dtype": "fp32"}, "dtype is 'fp32'"),
    ],
)
def test_what_does_not_divide_or_fit_is_refused_with_its_numbers(change, numbers):
    with pytest.raises(ValueError) as caught:
        replace(MLA, **change)
    assert numbers in str(caught.value)


def test_a_wave_share_that_crosses_a_row_of_tiles_is_refused():
    # 2 * 14 tiles over 4 waves is 7 each, half a row of 14; over 8 / 8 groups = 1 wave it is both rows.
    assert replace(MLA, qk_head_dim=224, dq_groups=2).dq_tiles == 7
    with pytest.raises(ValueError, match="28 a wave do not stay inside one row of 14"):
        replace(MLA, qk_head_dim=224, dq_groups=8, block_n=256, num_waves=8)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dims", DIMS)
def test_every_pair_gets_a_tile(dims, arch):
    for deterministic in (False, True):
        p = problem(*dims, deterministic=deterministic)
        assert KERNEL.unsupported(p, TARGETS[arch]) == ()
        config = plan.config(p, TARGETS[arch], "backward")
        geometry = plan.geometry_of(p, config)
        assert geometry == plan.default_geometry(p, arch) and plan.config_of(geometry) == config
        assert geometry.lds_bytes <= TARGETS[arch].lds_bytes
        assert (geometry.accumulate == "none") is deterministic
        if deterministic:
            assert plan.owner_of(geometry).lds_bytes <= TARGETS[arch].lds_bytes


def test_every_multiple_of_32_up_to_256_gets_a_tile_in_any_pair():
    dims = range(32, 257, 32)
    for arch, qk, v, deterministic in product(("gfx942", "gfx950"), dims, dims, (False, True)):
        p = problem(qk, v, deterministic=deterministic)
        g = plan.default_geometry(p, arch)
        assert g.lds_bytes <= TARGETS[arch].lds_bytes
        assert not deterministic or plan.owner_of(g).lds_bytes <= TARGETS[arch].lds_bytes


def test_the_tiles_that_the_documentation_names():
    def tile(qk, v, arch="gfx942"):
        g = plan.default_geometry(problem(qk, v), arch)
        return g.block_m, g.block_n, g.num_waves, g.dq_groups

    assert tile(192, 128) == tile(128, 128) == tile(64, 64) == tile(128, 64) == (32, 128, 8, 1)
    assert tile(96, 96) == tile(32, 32) == tile(160, 160) == (32, 128, 8, 2)
    assert tile(256, 128) == (16, 128, 8, 1)
    assert tile(256, 256) == (16, 64, 4, 1)
    assert tile(256, 256, "gfx950") == (32, 64, 4, 1)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_sections_and_turned_chunks_tile_every_column_once(dims, arch):
    g = plan.default_geometry(problem(*dims), arch)
    for dim in dims:
        staged = [c + x * w + e for c, w in g.sections(dim) for x in range(g.threads_per_row) for e in range(w)]
        assert sorted(staged) == list(range(dim))
        turned = [c + lane * n + e for c, n in g.turned(dim) for lane in range(16) for e in range(n)]
        assert sorted(turned) == list(range(dim))


@pytest.mark.parametrize("dims", DIMS)
def test_mfma_of_the_geometry_are_those_of_the_prediction(dims):
    for arch in ("gfx942", "gfx950"):
        for deterministic in (False, True):
            p = problem(*dims, deterministic=deterministic)
            g = plan.default_geometry(p, arch)
            for shape in (g, plan.owner_of(g)) if deterministic else (g,):
                predicted = cost.mfma_per_tile(p, shape.block_m, shape.block_n, shape.mfma_k, shape.gemms)
                assert shape.mfma_per_wave() * shape.num_waves == predicted


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim_qk": 72}, "head_dim_qk=72 is no multiple of 32"),
        ({"head_dim_v": 40}, "head_dim_v=40 is no multiple of 32"),
        ({"dtype": "fp32"}, "dtype is fp32"),
    ],
)
def test_limits_show_the_numbers_and_a_way_out(change, why):
    sizes = {"nheads_q": 2, "nheads_kv": 1, "head_dim_qk": 128, "head_dim_v": 128}
    p = Problem.dense(1, 64, 64, **(sizes | change))
    reasons = KERNEL.unsupported(p, TARGETS["gfx942"])
    assert len(reasons) == 1 and why in reasons[0]
    assert KERNEL.failing(p, TARGETS["gfx942"])[0].remedy(p, TARGETS["gfx942"])
    assert "arch is sm_90" in KERNEL.unsupported(Problem.dense(1, 64, 64, **sizes), TARGETS["sm_90"])[0]


def test_the_low_memory_mode_is_a_kernel_of_its_own():
    p = problem()
    assert LOW_MEMORY.unsupported(p, TARGETS["gfx942"]) == ()
    geometry = plan.geometry_of(p, LOW_MEMORY.config(p, TARGETS["gfx942"], "backward"))
    assert (geometry.accumulate, geometry.dq_groups, geometry.dq_tiles) == ("bf16", 2, 6)
    fp16, ordered = (replace(p, **change) for change in ({"dtype": "fp16"}, {"deterministic": True}))
    assert "dtype is fp16" in LOW_MEMORY.unsupported(fp16, TARGETS["gfx942"])[0]
    assert "no order" in LOW_MEMORY.unsupported(ordered, TARGETS["gfx942"])[0]
    for qk, v in product(range(32, 257, 32), repeat=2):
        LOW_MEMORY.config(problem(qk, v), TARGETS["gfx942"], "backward")


class TestPlan:
    sizes = {"nheads_q": 4, "nheads_kv": 2, "head_dim_qk": 192, "head_dim_v": 128}

    def buffers(self, p, geometry):
        return {b.name: b for b in plan.plan_workspace(p, plan.config_of(geometry)).buffers}

    def test_the_accumulator_has_d_qk_columns_and_lives_where_the_plan_says(self):
        p = Problem.packed((45, 60, 0), **self.sizes)
        acc = self.buffers(p, MLA)["dq_acc"]
        assert (acc.shape, acc.dtype) == ((4, 105, 192), "fp32")
        low = self.buffers(p, replace(MLA, accumulate="bf16", dq_groups=2))["dq_acc"]
        assert (low.axes, low.shape, low.dtype, low.zeroed) == ("bhsd", (3, 4, 64, 192), "bf16", True)
        assert low.stride("h") == 64 * 192 and low.stride("s") == 192

    def test_bf16_halves_the_accumulator_of_equal_segments(self):
        p = Problem.dense(3, 64, 64, **self.sizes)
        fp32, bf16 = (self.buffers(p, g)["dq_acc"].nbytes for g in (MLA, replace(MLA, accumulate="bf16", dq_groups=2)))
        assert fp32 == 2 * bf16

    def test_the_deterministic_plan_has_no_accumulator(self):
        p = Problem.packed((45, 60), deterministic=True, **self.sizes)
        assert set(self.buffers(p, plan.default_geometry(p, "gfx942"))) == {"delta", "lse_log2"}

    def test_plans_grow_linearly_in_tokens(self):
        def nbytes(n):
            p = Problem.packed((n,) * 4, **self.sizes)
            return plan.plan_workspace(p, plan.config(p, TARGETS["gfx942"], "backward")).nbytes

        assert nbytes(2048) - nbytes(1024) == nbytes(3072) - nbytes(2048)
