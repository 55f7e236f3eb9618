"""The walls' arithmetic against what was measured of them, and the ladder's rungs: each a config that runs."""

from dataclasses import replace

import pytest

from undertow.instruments.ladder import launch_columns, launch_order, predicted_ratio
from undertow.instruments.shapes import ODD_DIMS, bench_shapes, pick
from undertow.kernels import hopper
from undertow.kernels.hopper import model
from undertow.kernels.hopper.geometry import choose, launches
from undertow.kernels.hopper.ladder import ladder, objects, predicted_clocks
from undertow.problem import Band
from undertow.target import TARGETS

H200 = TARGETS["sm_90"]
(S1,), (S2,) = ((w.problem for w in pick((name,))) for name in ("S1", "S2"))
MLA = choose(192, 128)


@pytest.mark.parametrize(
    ("n", "registers", "clocks"),
    [(48, False, 28.0), (64, False, 32.0), (96, False, 48.0), (128, False, 64.0), (192, False, 96.0), (48, True, 24.0),
     (192, True, 96.0)],
)  # fmt: skip
def test_a_product_takes_what_was_measured(n, registers, clocks):
    """Clocks of one m64nNk16 a warpgroup, as measured: 28.0 for n 48 from shared memory, where 24 is ideal."""
    assert model.product(n, 16, registers=registers).clocks == model.WARPGROUPS * clocks


def test_the_products_of_a_step_at_192_128():
    """Five products of 64 by 128 at 4096 FLOP a clock: 3328 clocks; without dQ 2560."""
    assert model.clocks(MLA)["tensor"] == 64 * 128 * 2 * (3 * 192 + 2 * 128) / 4096 == 3328
    two = model.clocks(choose(192, 128, dq=False))
    assert two["tensor"] == 2560 + 64 * 128 * 2 * (2 * 192 + 128) / 4096


def test_exponentials_wait_for_the_special_function_units():
    assert model.exponentials(8192).clocks == 8192 / 16


def test_sums_of_dq_are_slower_beyond_the_l2_cache():
    """S1's 64x192 fp32 tile from each of 132 SMs: 3030 clocks at 3.8 TB/s were measured at about 1.77 GHz."""
    near = model.reduction(4 * 64 * 192, 12 << 20, 1.77, 132)
    assert near == pytest.approx(3030, rel=0.01)
    assert model.reduction(4 * 64 * 192, 201 << 20, 1.77, 132) == pytest.approx(near * 3.8 / 2.1)


def test_a_step_is_its_largest_bound():
    found = model.clocks(MLA)
    assert found["phases"] == found["scores"] + found["gradients"] + found["dq"]
    assert found["step"] == max(found[name] for name in ("phases", "shared", "tensor", "reduction"))
    assert model.clocks(MLA, live=201 << 20)["step"] == model.clocks(MLA, live=201 << 20)["reduction"]


def test_dq_leaves_beside_the_next_scores_where_shared_memory_has_room():
    """128 rows a product leave a quarter of it free; 64 rows take all of it, so by the walls nothing is won there."""
    for geometry, gains in ((choose(96, 96), True), (MLA, False)):
        late, before = (model.clocks(replace(geometry, late=late)) for late in (True, False))
        assert (late["phases"] < before["phases"]) is gains
        assert late["tensor"] == before["tensor"] and late["shared"] == before["shared"]


@pytest.mark.parametrize("dims", [(40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 128), (256, 256)])
def test_every_plan_has_a_model(dims):
    for dq in (True, False):
        geometry = choose(*dims, dq=dq)
        if geometry:
            found = model.clocks(geometry)
            useful = geometry.tile_q * geometry.tile_kv * 2 * (3 * dims[0] + 2 * dims[1]) / 4096
            assert found["step"] >= found["tensor"] >= useful


def test_the_plan_follows_what_a_query_sees():
    """Few keys: two kernels. No dims of 256 have a fused one."""
    problems = {w.name: w.problem for w in bench_shapes()}
    fused = {name for name, p in problems.items() if hopper._geometry(p).dq}
    assert fused == {"S1", "S1g", "S10", "S3", "S4", "S5", "S8", *(f"d{dim}" for dim in ODD_DIMS)}
    assert not any(hopper._geometry(replace(p, deterministic=True)).dq for p in problems.values())
    assert not hopper._geometry(replace(problems["S1"], band=Band(1024, 0))).dq
    assert hopper._geometry(replace(problems["S2"], batch=2, seqlens_q=None, seqlens_k=None)).dq


def test_the_ladder_ends_at_what_dispatch_runs():
    rungs = {name: config for name, _, config in ladder(S1, H200)}
    assert rungs["turning"] == hopper.config(S1, H200, "backward")
    det = hopper.config(replace(S1, deterministic=True), H200, "backward")
    assert rungs["apart"].switch("geometry") == det.switch("geometry")
    assert len(set(rungs.values())) == len(rungs)
    for config in rungs.values():
        geometry = config.switch("geometry")
        assert geometry.deepest is not None
        assert (config.block_m, config.block_n) == (geometry.tile_q, geometry.tile_kv)
        assert hopper.plan_workspace(S1, config).nbytes > 0
        assert predicted_clocks(S1, config, 1.75, 132) > 3000


def test_the_objects_of_the_ladder_are_what_its_rungs_launch():
    wanted = {x for _, _, config in ladder(S1, H200) for x in launches(config.switch("geometry"))}
    assert set(objects(S1, H200)) == wanted
    assert {kind for kind, _ in wanted} == {"main", "dq"}


def test_heads_in_flight_are_the_switch_of_the_config():
    rungs = {name: config for name, _, config in ladder(S1, H200)}
    assert launch_columns(S1, rungs["plain"]) == 32
    assert launch_columns(S1, rungs["heads"]) == rungs["heads"].switch("together") < 32
    assert launch_columns(S2, rungs["plain"]) == 16
    assert sum(launch_order(S1, rungs["plain"])) == 133120
    grouped, every = (predicted_clocks(S1, rungs[n], 1.75, 132) for n in ("heads", "plain"))
    assert every > grouped
    turning = replace(S1, nheads_kv=2)  # all 201 MB of dQ are summed at a time, but few tiles of it
    late, tuned = (predicted_clocks(turning, rungs[n], 1.75, 132) for n in ("late", "turning"))
    assert late > tuned == predicted_clocks(S1, rungs["turning"], 1.75, 132)


def test_the_order_step_has_a_prediction():
    rungs = {name: config for name, _, config in ladder(S1, H200)}
    last, first = (launch_order(S1, rungs[n]) for n in ("last first", "plain"))
    assert sorted(last) == sorted(first)
    assert last[0] < first[0]
    assert predicted_ratio(S1, rungs["last first"], rungs["plain"], H200) > 1
    assert predicted_ratio(S1, rungs["ring"], rungs["late"], H200) is None
