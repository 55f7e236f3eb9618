"""The schedule model and the matrix-instruction prediction, against published counts and brute force."""

import random

import pytest

from undertow import cost, mask, schedule
from undertow.problem import Band, Problem
from undertow.target import TARGETS

SEGMENTS = (1471, 3638, 3495, 3624, 774, 3633, 3387, 472, 3127, 3204, 3264, 1846, 833)
MLA = Problem.packed(SEGMENTS, nheads_q=2, nheads_kv=2, head_dim_qk=192, head_dim_v=128, band=Band(None, 0))


def blocks(**how):
    return schedule.block_tiles(MLA, 32, 128, **how)


def test_published_order_114_against_144():
    gfx942 = TARGETS["gfx942"]
    assert (gfx942.num_queues, gfx942.num_cus) == (8, 8 * 38)
    assert schedule.predict(blocks(kv_major=True), gfx942) == 114
    assert schedule.predict(blocks(kv_major=False), gfx942) == 144


def test_published_grid():
    assert MLA.total_q == 32768
    assert len(blocks()) == 754 == len(blocks(kv_major=False))
    assert (min(blocks()), max(blocks())) == (0, 114)
    assert sum(blocks()) == sum(blocks(kv_major=False)) == 2 * 12970


def test_published_mfma_counts():
    assert cost.tile_iterations(MLA, 32, 128) == 12970
    assert cost.mfma_per_tile(MLA, 32, 128, 16) == 8 * 104
    assert cost.mfma_count(MLA, 32, 128, 16) == 21_582_080
    assert cost.mfma_count(MLA, 32, 128, 32) == 10_791_040


def test_a_product_that_is_no_whole_number_of_instructions_is_refused():
    problem = Problem.dense(1, 64, 64, nheads_q=1, nheads_kv=1, head_dim_qk=72, head_dim_v=64)
    with pytest.raises(ValueError, match="16x16x32"):
        cost.mfma_per_tile(problem, 16, 16, 32)


def test_empty_blocks_cost_nothing_behind_and_something_in_between():
    gfx942 = {"queues": 8, "units": 38}
    live = blocks(empties="dropped")
    assert len(live) < 754 and all(live)
    appended = blocks(empties="appended")
    assert appended == live + (0,) * (754 - len(live))
    assert schedule.makespan(appended, **gfx942) == schedule.makespan(live, **gfx942)
    assert schedule.makespan(appended, **gfx942, empty_cost=4) == schedule.makespan(live, **gfx942)
    # Interleaved empties move every later block to another queue, and delay it where they cost anything.
    fastest = {"kv_major": False}
    assert schedule.makespan(blocks(**fastest), **gfx942) > schedule.makespan(
        blocks(**fastest, empties="dropped"), **gfx942
    )
    held = [schedule.makespan(blocks(**fastest), **gfx942, empty_cost=cost_) for cost_ in (0, 10, 30)]
    assert held[0] < held[1] < held[2], held


def test_one_pool_serves_nvidia():
    sm90 = TARGETS["sm_90"]
    assert (sm90.num_queues, sm90.num_cus) == (1, 132)
    grid = schedule.block_tiles(MLA, 64, 128)
    spans = [schedule.predict(schedule.block_tiles(MLA, 64, 128, kv_major=k), sm90) for k in (True, False)]
    assert schedule.floor(grid, 132) <= spans[0] < spans[1]


def test_makespan_against_the_plainest_statement_of_it():
    rng = random.Random(0)
    for _ in range(50):
        grid = [rng.randrange(6) for _ in range(rng.randrange(1, 40))]
        queues, units = rng.randrange(1, 5), rng.randrange(1, 4)
        assert schedule.makespan(grid, queues=queues, units=units) == _last(grid, queues, units)


def _last(grid, queues, units):
    ends = []
    for q in range(queues):
        free = [0] * units
        for tiles in grid[q::queues]:
            free.sort()
            free[0] += tiles
        ends += free
    return max(ends)


def test_groups_multiply_the_work_of_a_block():
    sizes = {"nheads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "band": Band(None, 0)}
    one = schedule.block_tiles(Problem.packed((300, 90), nheads_q=2, **sizes), 32, 128)
    four = schedule.block_tiles(Problem.packed((300, 90), nheads_q=8, **sizes), 32, 128)
    assert four == tuple(4 * tiles for tiles in one)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_q_tiles_are_exactly_the_tiles_with_a_live_pair(align):
    rng = random.Random(1)
    for _ in range(200):
        sq, sk, bm, bn = rng.randrange(0, 40), rng.randrange(0, 40), rng.choice((4, 8)), rng.choice((4, 16))
        left, right = rng.choice(((None, 0), (None, None), (3, 0), (0, 5), (None, 4), (6, None), (-2, 7)))
        band = Band(left, right, align)
        for j0 in range(0, 48, bn):
            want = {i // bm for i in range(sq) for j in range(j0, min(j0 + bn, sk)) if mask.live(i, j, sq, sk, band)}
            got = mask.q_tiles((j0, j0 + bn), (sq, sk), band, bm)
            assert want <= set(got), (sq, sk, band, j0)
            assert not want or (min(got), max(got)) == (min(want), max(want))


@pytest.mark.parametrize("fault", [{"queues": 0, "units": 1}, {"queues": 1, "units": 0}])
def test_bad_sizes_are_named(fault):
    with pytest.raises(ValueError, match="wanted at least one"):
        schedule.makespan([1], **fault)
    with pytest.raises(ValueError, match="empties"):
        blocks(empties="sideways")
