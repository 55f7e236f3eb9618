"""LDS instructions against byte oracles, and every ordering check made to fire and made to stay silent."""

import numpy as np
import pytest
from bench import FULL, LANES, PARTIAL, Bench, bits_of

from undertow.simulator import Options
from undertow.simulator.local_memory import READS, WRITES, bank_conflicts

rng = np.random.default_rng(3)
ON = bits_of(PARTIAL)
LANE = np.arange(LANES, dtype=np.uint32)
OLD = np.full(LANES, 0xA1B2C3D4, np.uint32)
WORDS = rng.integers(0, 1 << 32, (8, LANES), dtype=np.uint64).astype(np.uint32)
WAIT = "\ns_waitcnt lgkmcnt(0)\n"


def span(start, count):
    return f"v{start}" if count == 1 else f"v[{start}:{start + count - 1}]"


# ---------------------------------------------------------------- data
@pytest.mark.parametrize("name", sorted(READS))
def test_reads(name):
    """Fill 1 KiB by b128 writes, then read a permutation of it at an offset, lanes partly off."""
    element = READS[name]
    order = rng.permutation(LANES).astype(np.uint32) * np.uint32(element.nbytes)
    fill = "ds_write_b128 v10, v[0:3]" + WAIT
    registers = {n: WORDS[n] for n in range(4)} | {10: LANE * 16, 11: order, **dict.fromkeys(range(4, 8), OLD)}
    offset = 16 if element.nbytes < 16 else 0
    bench = Bench(v=registers, lds=1024)
    text = f"{fill}s_mov_b64 exec, s[20:21]\nds_read_{name} {span(4, element.registers)}, v11 offset:{offset}{WAIT}"
    bench.s = {20: PARTIAL & 0xFFFFFFFF, 21: PARTIAL >> 32}
    state = bench.run(text)
    content = WORDS[:4].T.tobytes()
    for lane in range(LANES):
        at = int(order[lane]) + offset
        raw = content[at : at + element.nbytes]
        if not ON[lane]:
            want = [int(OLD[lane])] * element.registers
        elif element.nbytes >= 4:
            want = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, element.nbytes, 4)]
        else:
            value = int.from_bytes(raw, "little", signed=element.signed) & 0xFFFFFFFF
            old = int(OLD[lane])
            want = [
                value
                if element.half is None
                else old & 0xFFFF0000 | value & 0xFFFF
                if element.half == 0
                else old & 0xFFFF | (value & 0xFFFF) << 16
            ]
        assert [int(state.v[4 + r, 0, lane]) for r in range(element.registers)] == want, lane
    assert bench.kinds() == []


@pytest.mark.parametrize("name", sorted(WRITES))
def test_writes(name):
    element = WRITES[name]
    order = rng.permutation(LANES).astype(np.uint32) * np.uint32(element.nbytes)
    bench = Bench(v={n: WORDS[n] for n in range(4)} | {10: order}, exec_mask=PARTIAL, lds=1024)
    bench.run(f"ds_write_{name} v10, {span(0, element.registers)}")
    got = bench.machine.lds.octets.tobytes()
    for lane in range(LANES):
        raw = b"".join(int(WORDS[r][lane]).to_bytes(4, "little") for r in range(element.registers))
        raw = (raw[2:] if element.half == 1 else raw)[: element.nbytes]
        at = int(order[lane])
        assert got[at : at + element.nbytes] == (raw if ON[lane] else bytes(element.nbytes))
    assert bench.kinds() == []


@pytest.mark.parametrize("width", ("b32", "b64"))
@pytest.mark.parametrize("stride", ("", "st64"))
def test_two_address_forms(width, stride):
    size = int(width[1:]) // 8
    unit = size * (64 if stride else 1)
    first, second = (0, 1) if stride else (0, 130)
    n = size // 4
    bench = Bench(v={n: WORDS[n] for n in range(4)} | {10: LANE * size}, lds=4096)
    state = bench.run(
        f"ds_write2{stride}_{width} v10, {span(0, n)}, {span(2, n)} offset0:{first} offset1:{second}\n"
        "s_waitcnt lgkmcnt(0)\n"
        f"ds_read2{stride}_{width} {span(4, 2 * n)}, v10 offset0:{second} offset1:{first}{WAIT}"
    )
    if stride:
        memory = bench.machine.lds.octets
        assert memory[unit : unit + size].tobytes() == WORDS[2 : 2 + n, 0].tobytes()
    for r in range(n):
        assert (state.v[4 + r, 0] == WORDS[2 + r]).all() and (state.v[4 + n + r, 0] == WORDS[r]).all()


def test_addresses_wrap_at_32_bits():
    """LLVM folds offsets onto negative bases."""
    bench = Bench(v={0: WORDS[0], 10: LANE * 4 - np.uint32(64), 11: LANE * 4}, lds=256)
    state = bench.run("ds_write_b32 v10, v0 offset:64\ns_waitcnt lgkmcnt(0)\nds_read_b32 v1, v11" + WAIT)
    assert (state.v[1, 0] == WORDS[0]).all() and bench.kinds() == []


def test_a_read_may_overwrite_its_own_address():
    bench = Bench(v={n: WORDS[n] for n in range(4)} | {10: LANE * 16}, lds=2048)
    state = bench.run("ds_write_b128 v10, v[0:3]\ns_waitcnt lgkmcnt(0)\nds_read2_b64 v[10:13], v10 offset1:1" + WAIT)
    assert (state.v[10:14, 0] == WORDS[:4]).all()


LDS_ATOMIC = {
    "add_u32": lambda o, x: o + x & 0xFFFFFFFF,
    "sub_u32": lambda o, x: o - x & 0xFFFFFFFF,
    "max_u32": max,
    "min_u32": min,
    "or_b32": lambda o, x: o | x,
    "and_b32": lambda o, x: o & x,
    "xor_b32": lambda o, x: o ^ x,
    "max_i32": lambda o, x: max(o, x, key=lambda v: v - (v >> 31 << 32)),
    "min_i32": lambda o, x: min(o, x, key=lambda v: v - (v >> 31 << 32)),
}


@pytest.mark.parametrize("name", LDS_ATOMIC)
@pytest.mark.parametrize("returns", (False, True))
def test_lds_atomics(name, returns):
    function = LDS_ATOMIC[name]
    where = rng.integers(0, 4, LANES).astype(np.uint32)
    stem, _, kind = name.rpartition("_")
    call = f"ds_{stem}_rtn_{kind} v5, v11, v1" if returns else f"ds_{name} v11, v1"
    bench = Bench(v={0: WORDS[0], 1: WORDS[1], 5: OLD, 10: LANE * 4, 11: where * 4}, lds=256)
    state = bench.run(f"ds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\ns_mov_b64 exec, {0x7FFF_FFFF:#x}\n{call}{WAIT}")
    memory = [int(x) for x in WORDS[0][:4]]
    for lane in range(31):
        if returns:
            assert int(state.v[5, 0, lane]) == memory[where[lane]]
        memory[where[lane]] = function(memory[where[lane]], int(WORDS[1][lane]))
    assert [int(x) for x in bench.machine.lds.words[:4]] == memory


# ---------------------------------------------------------------- shuffles
def test_bpermute_and_permute():
    target = rng.integers(0, 256, LANES).astype(np.uint32)
    bench = Bench(v={0: OLD, 1: target * 4 // 4, 2: WORDS[0], 3: OLD}, exec_mask=PARTIAL)
    state = bench.run(
        "v_lshlrev_b32_e32 v1, 2, v1\nds_bpermute_b32 v0, v1, v2 offset:8\nds_permute_b32 v3, v1, v2" + WAIT
    )
    pushed = [0] * LANES
    for lane in np.flatnonzero(ON):
        pushed[target[lane] % 64] = int(WORDS[0][lane])
    for lane in range(LANES):
        source = (int(target[lane]) + 2) % 64
        pulled = int(WORDS[0][source]) if ON[source] else 0
        assert int(state.v[0, 0, lane]) == (pulled if ON[lane] else int(OLD[lane]))
        assert int(state.v[3, 0, lane]) == (pushed[lane] if ON[lane] else int(OLD[lane]))


@pytest.mark.parametrize(
    "spelling, source",
    (
        ("swizzle(SWAP,16)", lambda i: i ^ 16),
        ("swizzle(SWAP,1)", lambda i: i ^ 1),
        ("swizzle(REVERSE,8)", lambda i: i ^ 7),
        ("swizzle(QUAD_PERM, 0, 2, 1, 3)", lambda i: i & ~3 | (0, 2, 1, 3)[i & 3]),
        ("swizzle(BROADCAST,4,2)", lambda i: i & ~3 | 2),
        ('swizzle(BITMASK_PERM, "0p1i0")', lambda i: i & 32 | (i & 0b01010 | 0b00100) ^ 0b00010),
        ("0x801f", lambda i: i & ~3 | (0x1F >> 2 * (i & 3)) & 3),
        ("0x041f", lambda i: i ^ 1),
    ),
)
def test_swizzles(spelling, source):
    state = Bench(v={0: OLD, 1: WORDS[0]}).run(f"ds_swizzle_b32 v0, v1 offset:{spelling}" + WAIT)
    assert [int(x) for x in state.v[0, 0]] == [int(WORDS[0][source(lane)]) for lane in range(LANES)]


def test_transposed_read():
    """16 lanes fetch a 4 x 16 tile of halves by rows and hold it by columns."""
    tile = rng.integers(0, 1 << 16, (4, 4, 16)).astype(np.uint16)  # [group of lanes, row, column]
    address = LANE * 8
    words = tile.reshape(LANES, 4).view(np.uint32)
    bench = Bench(v={0: words[:, 0], 1: words[:, 1], 10: address}, lds=512, target="gfx950")
    state = bench.run("ds_write_b64 v10, v[0:1]\ns_waitcnt lgkmcnt(0)\nds_read_b64_tr_b16 v[2:3], v10" + WAIT)
    got = state.v[2:4, 0].T.copy().view(np.uint16)
    for lane in range(LANES):
        assert [int(x) for x in got[lane]] == [int(tile[lane // 16, row, lane % 16]) for row in range(4)]


# ---------------------------------------------------------------- checks: two waves of one workgroup
def two_waves(text, *, lds=1024, seed=None, scc_by_wave=True, per_group=2, waves=2, **registers):
    """Wave w has s0 = w; v10 addresses a dword of its own per lane, v11 the same dwords seen from the other wave."""
    wave = (np.arange(waves, dtype=np.uint32) % per_group)[:, None]
    own = (wave * LANES + LANE) * 4
    other = ((per_group - 1 - wave) * LANES + LANE) * 4
    bench = Bench(
        v={0: np.broadcast_to(LANE, own.shape), 10: own, 11: other, 20: np.broadcast_to(wave, own.shape), **registers},
        waves=waves,
        per_group=per_group,
        lds=lds,
        options=Options(seed=seed),
    )
    bench.state = bench.run("v_readfirstlane_b32 s0, v20\n" + text)
    return bench


PUBLISH = "ds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v1, v11\ns_waitcnt lgkmcnt(0)"


@pytest.mark.parametrize("seed", (None, 0, 1))
def test_a_proper_exchange_is_silent(seed):
    bench = two_waves(PUBLISH, seed=seed)
    assert bench.kinds() == [] and (bench.state.v[1] == LANE).all()


def test_missing_barrier_is_read_after_write():
    bench = two_waves(PUBLISH.replace("s_barrier", "s_nop 0"))
    (finding,) = bench.report.findings()
    assert (
        finding.kind == "lds-race"
        and "RAW" in finding.message
        and finding.text == "ds_read_b32 v1, v11"
        and finding.wave == 0
        and finding.lane == 0
    )


def test_missing_wait_before_the_barrier_that_publishes():
    bench = two_waves(PUBLISH.replace("s_waitcnt lgkmcnt(0)\ns_barrier", "s_barrier"))
    assert bench.kinds() == ["lds-publish"]


def test_a_wait_that_leaves_the_write_outstanding_is_not_enough():
    text = PUBLISH.replace("s_waitcnt lgkmcnt(0)\ns_barrier", "s_waitcnt lgkmcnt(1)\ns_barrier")
    assert two_waves(text).kinds() == ["lds-publish"]
    covered = PUBLISH.replace(
        "s_waitcnt lgkmcnt(0)\ns_barrier", "ds_bpermute_b32 v2, v10, v0\ns_waitcnt lgkmcnt(1)\ns_barrier"
    )
    assert two_waves(covered).kinds() == []


def test_write_after_read_needs_a_barrier():
    text = PUBLISH + "\nds_write_b32 v10, v10\ns_waitcnt lgkmcnt(0)"
    assert two_waves(text).kinds() == ["lds-race"]
    assert "WAR" in two_waves(text).report.findings()[0].message
    assert two_waves(PUBLISH + "\ns_barrier\nds_write_b32 v10, v10").kinds() == []


def test_a_read_must_retire_before_the_barrier_that_recycles():
    """The read of one wave is still in flight when the other wave overwrites."""
    text = PUBLISH.replace(
        "ds_read_b32 v1, v11\ns_waitcnt lgkmcnt(0)",
        "ds_read_b32 v1, v11\ns_barrier\nds_write_b32 v10, v10\ns_waitcnt lgkmcnt(0)",
    )
    assert two_waves(text).kinds() == ["lds-recycle"]


def test_write_after_write():
    text = "ds_write_b32 v0, v20\ns_waitcnt lgkmcnt(0)"
    assert two_waves("v_lshlrev_b32_e32 v0, 2, v0\n" + text).kinds() == ["lds-race"]
    assert two_waves("v_lshlrev_b32_e32 v0, 2, v0\n" + text.replace("v20", "v0")).kinds() == [], (
        "both waves write the same value"
    )
    staggered = (
        "v_lshlrev_b32_e32 v0, 2, v0\ns_cmp_eq_u32 s0, 0\n"
        "s_cbranch_scc0 .L\nds_write_b32 v0, v20\n.L:\nds_write_b32 v0, v20"
    )
    assert two_waves(staggered).kinds() == ["lds-race"]


def test_half_words_of_one_dword_belong_to_different_waves():
    text = (
        "v_lshlrev_b32_e32 v2, 2, v0\nv_lshl_add_u32 v2, s0, 1, v2\nds_write_b16 v2, v0\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\nds_read_u16 v3, v2\ns_waitcnt lgkmcnt(0)"
    )
    assert two_waves(text).kinds() == []
    assert two_waves(
        text.replace("v_lshl_add_u32 v2, s0, 1, v2\n", "").replace("v2, v0\ns_wait", "v2, v20\ns_wait")
    ).kinds() == ["lds-race"]


def test_uninitialised_out_of_bounds_and_misaligned_lds():
    assert two_waves("ds_read_b32 v1, v10\ns_waitcnt lgkmcnt(0)").kinds() == ["lds-uninitialised"]
    assert two_waves("ds_write_b32 v10, v0", lds=500).kinds() == ["lds-bounds"]
    bench = two_waves("ds_write_b32 v10, v0 offset:2")
    assert bench.kinds() == ["misaligned"]


def test_registers_of_a_load_are_not_valid_before_the_wait():
    for text, message in (
        ("ds_read_b32 v1, v10\nv_mov_b32_e32 v2, v1", "v1 is read"),
        ("ds_read_b32 v1, v10\nv_mov_b32_e32 v1, v2", "v1 is overwritten"),
        ("ds_read_b32 v1, v10\nds_read_b32 v2, v10\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v3, v2", "v2 is read"),
        ("ds_read_b32 v1, v10\nv_readlane_b32 s5, v1, 0", "v1 is read"),
        ("ds_read_b32 v1, v10\nds_write_b32 v10, v1", "v1 is read"),
    ):
        bench = two_waves("ds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\n" + text)
        (finding,) = [f for f in bench.report.findings() if f.kind == "wait"]
        assert message in finding.message and "ds_read_b32" in finding.message
    for text in (
        "ds_read_b32 v1, v10\nds_read_b32 v2, v10\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v3, v1",
        "ds_read_b32 v1, v10\nds_read_b32 v1, v10\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v3, v1",
    ):
        assert two_waves("ds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\n" + text).kinds() == []


def test_scalar_loads_return_out_of_order():
    data = np.arange(64, dtype=np.uint32)
    run = lambda text: Bench(buffers={"x": data}, place={"x": 0}).run(text)
    for text, clean in (
        ("s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s6, s4", False),
        ("s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\ns_waitcnt lgkmcnt(0)\ns_mov_b32 s6, s4", True),
        ("s_load_dwordx2 vcc, s[0:1], 0x0\nv_cndmask_b32_e32 v0, v1, v2, vcc", False),
    ):
        bench = Bench(v={1: LANE, 2: LANE}, buffers={"x": data}, place={"x": 0})
        bench.run(text)
        assert (bench.kinds() == []) == clean, text
    del run


def test_vector_memory_counts_apart_from_lds():
    data = np.zeros(LANES, np.uint32)
    for wait, clean in (
        ("lgkmcnt(0)", False),
        ("vmcnt(1)", False),
        ("vmcnt(0)", True),
        ("vmcnt(0) lgkmcnt(3)", True),
        ("0x0070", True),
    ):
        bench = Bench(v={8: LANE * 4}, buffers={"x": data}, place={"x": 0})
        bench.run(f"global_load_dword v0, v8, s[0:1]\ns_waitcnt {wait}\nv_mov_b32_e32 v1, v0")
        assert (bench.kinds() == []) == clean, wait


def test_load_to_lds_needs_its_own_wait():
    data = rng.integers(0, 1 << 32, 2 * LANES, dtype=np.uint64).astype(np.uint32)
    wave = np.arange(2, dtype=np.uint32)[:, None]
    registers = {
        8: (wave * LANES + LANE) * 4,
        10: (wave * LANES + LANE) * 4,
        11: ((1 - wave) * LANES + LANE) * 4,
        20: np.broadcast_to(wave, (2, LANES)),
    }
    text = (
        "v_readfirstlane_b32 s6, v20\ns_lshl_b32 m0, s6, 8\ns_nop 0\n"
        "global_load_lds_dword v8, s[0:1]\n{wait}s_barrier\nds_read_b32 v1, v11\ns_waitcnt lgkmcnt(0)"
    )
    for wait, kinds in (("s_waitcnt vmcnt(0)\n", []), ("s_waitcnt lgkmcnt(0)\n", ["lds-load"]), ("", ["lds-load"])):
        bench = Bench(v=registers, waves=2, per_group=2, lds=512, buffers={"x": data}, place={"x": 0})
        state = bench.run(text.format(wait=wait))
        assert bench.kinds() == kinds
        assert (state.v[1, 0] == data[LANES:]).all() and (state.v[1, 1] == data[:LANES]).all()


def test_deadlock_and_barriers_at_different_places():
    stuck = "s_cmp_eq_u32 s0, 0\ns_cbranch_scc1 .L\n.M:\ns_branch .N\n.L:\ns_barrier\n.N:\ns_nop 0"
    assert two_waves(stuck).kinds() == [], "an ended wave does not hold a barrier up"
    crossed = "s_cmp_eq_u32 s0, 0\ns_cbranch_scc1 .L\ns_barrier\ns_branch .N\n.L:\ns_barrier\n.N:\ns_nop 0"
    assert two_waves(crossed).kinds() == ["barrier-divergence"]
    assert two_waves("s_barrier\ns_barrier").kinds() == []


def test_workgroups_do_not_share_lds():
    bench = two_waves(PUBLISH, waves=8)
    assert bench.kinds() == [] and (bench.state.v[1] == LANE).all()


def test_findings_count_repeats_and_stop_growing():
    text = "\n".join(
        [
            "s_mov_b32 s3, 50",
            ".L:",
            "v_mov_b32_e32 v10, v10",
            "ds_read_b32 v1, v10",
            "s_waitcnt lgkmcnt(0)",
            "s_sub_i32 s3, s3, 1",
            "s_cmp_gt_i32 s3, 0",
            "s_cbranch_scc1 .L",
        ]
    )
    bench = two_waves(text)
    (finding,) = bench.report.findings()
    assert finding.count == 50 * 2 * LANES


@pytest.mark.parametrize(
    "address, nbytes, extra",
    (
        (LANE * 4, 4, 0),
        (LANE * 0, 4, 0),
        (LANE * 8, 4, 2),
        (LANE * 128, 4, 62),
        (LANE * 16, 16, 0),
        (LANE * 256, 16, 8 * 7),
        (LANE * 8, 8, 0),
    ),
)
def test_bank_model(address, nbytes, extra):
    assert bank_conflicts(address.astype(np.int64)[None], nbytes, None) == extra


def test_bank_model_ignores_lanes_that_are_off():
    assert bank_conflicts((LANE * 128).astype(np.int64)[None], 4, (LANE == 3)[None]) == 0
    assert FULL >> 63


@pytest.mark.parametrize("name", ("add_f32", "min_f32", "max_f32", "pk_add_f16", "pk_add_bf16"))
@pytest.mark.parametrize("returns", (False, True))
def test_float_lds_atomics(name, returns):
    """Small integers, exact in every type, on four cells; the sum of what was added is in the cells at the end."""
    where = rng.integers(0, 4, LANES).astype(np.uint32)
    values = rng.integers(-4, 5, (LANES, 2)).astype(np.float32)
    if name.startswith("pk"):
        halves = values.astype(np.float16).view(np.uint16) if "f16" in name[-3:] and "bf" not in name else None
        halves = halves if halves is not None else (values.view(np.uint32) >> 16).astype(np.uint16)
        words = halves[:, 0].astype(np.uint32) | halves[:, 1].astype(np.uint32) << 16
    else:
        words = values[:, 0].view(np.uint32)
    stem, _, kind = name.rpartition("_")
    call = f"ds_{stem}_rtn_{kind} v5, v11, v1" if returns else f"ds_{name} v11, v1"
    bench = Bench(v={0: LANE * 0, 1: words, 5: OLD, 10: LANE * 4, 11: where * 4}, lds=256)
    state = bench.run(f"ds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\n{call}{WAIT}")
    cells = bench.machine.lds.words[:4].copy()
    if name.startswith("pk"):
        parts = np.stack([cells & 0xFFFF, cells >> 16], 1)
        got = (
            parts.astype(np.uint16).view(np.float16)
            if "bf" not in name
            else (parts << 16).astype(np.uint32).view(np.float32)
        )
    else:
        got = cells.view(np.float32)[:, None]
    pick = {"add": np.sum, "min": lambda v, axis: min(0, v.min()), "max": lambda v, axis: max(0, v.max())}
    for cell in range(4):
        for column in range(got.shape[1]):
            chosen = values[where == cell, column]
            want = {"pk_add": np.sum}.get(stem, pick.get(stem, np.sum))(chosen, axis=None)
            assert float(got[cell, column]) == want
    if returns:
        firsts = [int(np.flatnonzero(where == cell)[0]) for cell in range(4)]
        assert [int(state.v[5, 0, lane]) for lane in firsts] == [0] * 4, "the first lane of a cell sees what was there"


def test_exchange_and_compare_in_lds():
    text = (
        "ds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\nds_wrxchg_rtn_b32 v2, v10, v1\nds_cmpst_rtn_b32 v3, v10, v4, v5"
        + WAIT
    )
    bench = Bench(v={0: LANE, 1: LANE + 100, 4: np.where(LANE < 32, LANE + 100, 0), 5: LANE + 7, 10: LANE * 4}, lds=256)
    state = bench.run(text)
    assert (state.v[2, 0] == LANE).all() and (state.v[3, 0] == LANE + 100).all()
    assert (bench.machine.lds.words[:LANES] == np.where(LANE < 32, LANE + 7, LANE + 100)).all()


def test_atomics_race_with_plain_accesses_and_not_with_each_other():
    fill = "s_cmp_eq_u32 s0, 0\ns_cbranch_scc0 .L\nds_write_b32 v10, v0\ns_waitcnt lgkmcnt(0)\n.L:\n{barrier}"
    add = "v_mov_b32_e32 v3, 0\nds_add_u32 v3, v0\ns_waitcnt lgkmcnt(0)\n"
    read = "ds_read_b32 v4, v3\ns_waitcnt lgkmcnt(0)"
    barrier = "s_barrier\n"
    good = fill.format(barrier=barrier) + add + barrier + read
    bench = two_waves(good)
    assert bench.kinds() == [] and (bench.state.v[4] == 2 * int(LANE.sum())).all()
    assert two_waves(good.replace(barrier, "", 1)).kinds() == ["lds-race"], "wave 1 adds while wave 0 may still fill"
    assert two_waves(fill.format(barrier=barrier) + add + read).kinds() == ["lds-race"], "read while others may add"
    assert two_waves(add).kinds() == ["lds-uninitialised"]
    alone = fill.format(barrier="") + add + read
    assert two_waves(alone, waves=1, per_group=1).kinds() == [], "one wave cannot race with itself"
