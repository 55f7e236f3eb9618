"""The Hopper kernel's host side on a CPU: side kernels in Triton's interpreter, the main kernel as torch tiles.

The device code itself is compiled and inspected in test_hopper_build.py, and run by the GPU tests.
"""

import ast
import itertools
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_emulator import emulate
from support import CAUSAL, DEVICE, call, make, prove, same

from undertow import attention_backward, dispatch
from undertow.instruments.shapes import pick
from undertow.kernels import hopper
from undertow.kernels.hopper import build
from undertow.kernels.hopper.geometry import REGISTERS, SHARED_BYTES, choose, launches
from undertow.kernels.hopper.host import _band
from undertow.mask import q_tiles
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
    monkeypatch.setattr(hopper, "_better_apart", lambda problem: False)  # as dispatch does for long segments
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
    """Fused, and a kernel for each of dK and dV (256)."""
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
                for kind, built in launches(geometry) if geometry else ():
                    assert kind == "dq" or (built.registers <= REGISTERS and built.shared_bytes <= SHARED_BYTES)
                    assert built.d_qk >= qk and built.d_v >= v
            assert choose(qk, v, dq=False) is not None


def test_outputs_that_the_copy_engine_cannot_write_are_copied():
    q = torch.zeros(2, 5, 3, 12)[..., :8]  # rows of 24 bytes in bf16
    from undertow.kernels.hopper.host import _tma

    assert _tma(q.bfloat16().expand(2, 5, 3, 8), "bshd").stride(2) % 8 == 0
    odd = torch.zeros(2, 5, 3, 12, dtype=torch.bfloat16)[..., :8]
    assert _tma(odd, "bshd").data_ptr() != odd.data_ptr()
    even = torch.zeros(2, 3, 5, 16, dtype=torch.bfloat16)[..., :8]
    assert _tma(even, "bhsd").data_ptr() == even.data_ptr() and _tma(even, "bhsd").shape == (2, 5, 3, 8)


@pytest.mark.parametrize("layout, shape", [("bshd", (2, 5, 3, 8)), ("thd", (30, 1, 8)), ("bhsd", (1, 1, 1, 8))])
def test_a_contiguous_tensor_off_16_bytes_is_copied(layout, shape):
    from undertow.kernels.hopper.host import _tma

    count = torch.Size(shape).numel()
    whole = torch.arange(count + 1, dtype=torch.bfloat16)
    off = whole[1:].view(shape) if whole.data_ptr() % 16 == 0 else whole[:-1].view(shape)
    assert off.is_contiguous() and off.data_ptr() % 16
    got = _tma(off, layout)
    assert got.data_ptr() % 16 == 0 and all(s and s % 8 == 0 for s in got.stride()[:-1])
    assert torch.equal(got.flatten(), off.flatten()) or layout == "bhsd"


@pytest.mark.parametrize("row, unit, heads", [(72, 8, 2), (76, 4, 2), (74, 2, 2), (73, 1, 2), (72, 8, 1), (73, 1, 1)])
def test_rows_that_are_multiples_of_16_bytes_or_not(row, unit, heads):
    """out, dout and dq with gaps between rows: the same bits, whatever unit the side kernels count strides in."""
    from undertow.kernels.hopper.host import _in_units

    fields = {"nheads_q": heads, "nheads_kv": heads, "head_dim_qk": 72, "head_dim_v": 72, "band": CAUSAL}
    problem = Problem.dense(heads, 70, 70, **fields)
    tensors = make(problem)
    want = call(problem, tensors, "hopper")

    def spread(x):
        strides = [s if n > 1 else 3 for n, s in zip(x.shape, x.new_empty(*x.shape[:-1], row).stride(), strict=True)]
        return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)

    dout, out, dq = (spread(x) for x in (tensors["dout"], want["out"], torch.full_like(want["dq"], float("nan"))))
    assert _in_units(problem, dout, dq)[1] == unit
    got = attention_backward(
        dout, *(tensors[n] for n in "qkv"), out, want["lse"], causal=True, dq=dq, kernel="hopper"
    )  # fmt: skip
    assert got.dq is dq
    same(got._asdict(), want, ("dq", "dk", "dv"))


def test_sides_of_a_band_fit_the_kernels_arithmetic():
    from undertow.kernels.hopper.host import UNBOUNDED, _band

    ends = {"layout": "thd", **DIMS}
    for left, right in ((2**31 - 9, 0), (-(2**31), 2**31 + 5), (None, 2**30), (None, None), (70, 9)):
        got = _band(Problem(1, 4, 4, 2**31 - 1, 2**31 - 1, band=Band(left, right), **ends))
        assert all(abs(x) <= UNBOUNDED for x in got) and sum(got) >= 0
        assert (left, right) != (70, 9) or got == (70, 9)


class Table:
    """Row 7 of a scheduling table whose segments hold these tiles; a probe beside the segments is an error."""

    def __init__(self, tiles):
        self.firsts = [0, *itertools.accumulate(tiles)]
        self.shape = (9, len(self.firsts))

    def __getitem__(self, at):
        row, column = at
        assert row == 7 and 0 <= column < self.shape[1] - 1, f"probed {at} of {self.shape[1] - 1} segments"
        return self.firsts[column]


def lanes_of(source):
    """`segment_of` of the device code as a generator for one lane: it yields its vote and is sent the ballot."""
    tree = next(x for x in ast.parse(source).body if getattr(x, "name", "") == "segment_of")
    tree.decorator_list = []
    text = ast.unparse(tree).replace("cute.arch.vote_ballot_sync(", "(yield ")
    text = text.replace("(table, tile)", "(table, tile, lane)").replace("lane = cute.arch.lane_idx()", "")
    names = {"Int32": int, "cutlass": SimpleNamespace(min=min)}
    names["cute"] = SimpleNamespace(arch=SimpleNamespace(popc=int.bit_count))
    exec(text, names)
    return names["segment_of"]


def warp(lane, table, tile):
    """What 32 lanes find, in step."""
    running, ballot = [lane(table, tile, n) for n in range(32)], None
    while True:
        votes, found = [], set()
        for one in running:
            try:
                votes.append(one.send(ballot))
            except StopIteration as end:
                found.add(end.value)
        if found:
            (answer,) = found
            assert not votes
            return answer
        ballot = sum(vote << n for n, vote in enumerate(votes))


def test_a_warp_finds_the_segment_of_every_tile():
    """The device code's own lines, with the lanes in step: never a probe beside the row, whatever the batch."""
    lane = lanes_of((Path(build.__file__).parent / "pieces_device.py").read_text())
    for segments in range(1, 1501):
        table = Table([1 + n * n % 3 for n in range(segments)])
        few = {0, segments // 3, segments - 2, segments - 1} if segments > 66 else range(segments)
        for s in few:
            for tile in {table.firsts[s], table.firsts[s + 1] - 1} if s >= 0 else ():
                assert warp(lane, table, tile) == s


def test_the_search_that_left_the_row_is_red():
    """As it was: the last round of 70 segments probed two columns too far."""
    source = (Path(build.__file__).parent / "pieces_device.py").read_text()
    bound = "lane * step < cutlass.min(span, table.shape[1] - 1 - low)"
    assert bound in source
    with pytest.raises(AssertionError, match="of 70 segments"):
        warp(lanes_of(source.replace(bound, "lane * step < span")), Table([1] * 70), 69)


DEVICE_CODE = {n: (Path(build.__file__).parent / f"{n}_device.py").read_text() for n in ("main", "pieces")}


def decoder(geometry, blocks, source=DEVICE_CODE["main"]):
    """The device code's own `_item` and `draw`, as a function of (table, work, ticket, heads)."""
    trees = [ast.parse(text) for text in (source, DEVICE_CODE["pieces"])]
    named = {x.name: x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    for name in ("_item", "draw"):
        named[name].decorator_list = []
    fields = [x.target.id for x in named["Item"].body if isinstance(x, ast.AnnAssign)]
    names = {"Int32": int, "const_expr": bool, "Item": namedtuple("Item", fields)}
    names["cutlass"] = SimpleNamespace(min=min, max=max)
    names["cute"] = SimpleNamespace(arch=SimpleNamespace(grid_dim=lambda: (blocks, 1, 1)))
    names["segment_of"] = lambda table, tile: max(s for s in range(table.shape[1] - 1) if table[7, s] <= tile)
    exec("\n".join(ast.unparse(named[name]) for name in ("draw", "_item")), names)

    def decode(table, work, ticket, heads):
        k = SimpleNamespace(tensor=SimpleNamespace(shape=(0, 0, heads, 0)))
        return names["_item"](SimpleNamespace(geo=geometry), SimpleNamespace(table=table, k=k), work, ticket)

    return decode


def walked(item):
    """Query tiles of an item in the order of `_produce`, for one head of a group."""
    found, m = [], item.m_first
    for _ in range(item.m_hi - item.m_lo):
        found.append(m)
        m += item.way
        m = item.m_hi - 1 if m < item.m_lo else m
    return found


def walks(geometry, problem, decode, blocks):
    """(item, query tiles as walked) of every ticket; each is every live query tile of its key tile, once."""
    config = hopper.config(problem, replace(TARGETS["sm_90"], num_cus=blocks), "backward")
    segments, heads = list(problem.segments), problem.nheads_kv
    counts = [max(1, -(-sk // geometry.tile_kv)) for _, sk in segments]
    firsts = [0, *itertools.accumulate(counts)]
    shifts = [0 if problem.band.align == "top_left" else sk - sq for sq, sk in segments]
    sizes = [[sq for sq, _ in segments], [sk for _, sk in segments]]
    rows = [[0] * len(segments)] * 3 + [*sizes, sizes[1], [0] * len(segments), firsts, shifts]
    table = torch.tensor([row + [0] * (len(segments) + 1 - len(row)) for row in rows])
    columns = heads * (1 if problem.is_packed else problem.batch)
    left, right = _band(problem)
    work = SimpleNamespace(columns=columns, together=min(columns, config.switch("together")), left=left, right=right)
    seen, found = set(), []
    for ticket in range(firsts[-1] * heads):
        item = SimpleNamespace(**{k: int(v) for k, v in decode(table, work, ticket, heads)._asdict().items()})
        s = next(s for s in range(len(segments)) if (item.len_q, item.len_k) == segments[s])  # as long, as masked
        j0 = item.n * geometry.tile_kv
        live = q_tiles((j0, j0 + geometry.tile_kv), segments[s], problem.band, geometry.tile_q)
        assert sorted(tiles := walked(item)) == list(live), (problem, ticket, item)
        seen.add((item.b, item.head, item.n, ticket))
        found.append((item, tiles))
    assert len(seen) == firsts[-1] * heads
    return found


MANY = {"nheads_q": 32, "nheads_kv": 16, "head_dim_qk": 192, "head_dim_v": 128}
WALKED = {
    "causal": Problem.dense(2, 1000, 1000, band=CAUSAL, **MANY),
    "more keys": Problem.dense(1, 500, 2100, band=CAUSAL, **MANY),
    "more queries": Problem.dense(1, 2100, 1100, band=CAUSAL, **MANY),
    "full": Problem.dense(1, 1000, 1100, **MANY),
    "window": Problem.dense(1, 3000, 3000, band=Band(300, 0), **MANY),
    "two-sided": Problem.dense(1, 3000, 2900, band=Band(700, 90), **MANY),
    "packed": Problem.packed((3000, 0, 1, 1000), (2500, 70, 0, 1000), band=CAUSAL, **MANY),
}


@pytest.mark.parametrize("name", WALKED)
@pytest.mark.parametrize("changes", [{}, {"turning": False}, {"reverse": True}, {"tile_q": 128}])
def test_every_round_of_blocks_walks_every_live_tile_once(name, changes):
    geometry = replace(choose(192, 128), **changes)
    found = walks(geometry, WALKED[name], decoder(geometry, 132), 132)
    ways = {item.way for item, tiles in found if tiles}
    assert ways == ({-1, 1} if geometry.turning else {-1}) or WALKED[name].band.left is not None
    assert -1 in ways


def test_the_second_round_meets_where_the_first_ended():
    """S1g: 132 blocks draw the longest items first; those of one time are within two query tiles of one another."""
    (problem,) = (w.problem for w in pick(("S1g",)))
    geometry = choose(192, 128)
    found, free, at = walks(geometry, problem, decoder(geometry, 132), 132), [0] * 132, {}
    for item, tiles in found:
        block = min(range(132), key=free.__getitem__)
        for step, tile in enumerate(tiles):
            at.setdefault((free[block] + step, item.way), set()).add(tile)
        free[block] += len(tiles)
    assert all(max(tiles) - min(tiles) <= 2 for tiles in at.values())
    assert {way for _, way in at} == {-1, 1}


def test_a_walk_that_begins_at_the_wrong_end_is_red():
    geometry, source = choose(192, 128), DEVICE_CODE["main"]
    assert source.count("m_first, way = m_lo, Int32(1)") == 1
    wrong = source.replace("m_first, way = m_lo, Int32(1)", "way = Int32(1)")
    with pytest.raises(AssertionError):
        walks(geometry, WALKED["causal"], decoder(geometry, 132, wrong), 132)
