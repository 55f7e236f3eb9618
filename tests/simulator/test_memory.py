"""Global, buffer, scratch and scalar memory with partial EXEC and partial bounds, against byte-by-byte oracles."""

import numpy as np
import pytest
from bench import FULL, LANES, PARTIAL, Bench, bits_of

from undertow.simulator import Options, SimulationError, UnsupportedError
from undertow.simulator.memory import LOADS, STORES

rng = np.random.default_rng(2)
ON = bits_of(PARTIAL)
LANE = np.arange(LANES, dtype=np.uint32)
OLD = np.full(LANES, 0xA1B2C3D4, np.uint32)
QUIET = Options(checks=False)


def span(start, count):
    return f"v{start}" if count == 1 else f"v[{start}:{start + count - 1}]"


def loaded(element, raw, old):
    """Registers that a load of these bytes gives, one integer a register."""
    if element.nbytes >= 4:
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, element.nbytes, 4)]
    value = int.from_bytes(raw, "little", signed=element.signed) & 0xFFFFFFFF
    if element.half is None:
        return [value]
    value &= 0xFFFF
    return [old & 0xFFFF0000 | value] if element.half == 0 else [old & 0xFFFF | value << 16]


@pytest.mark.parametrize("name", sorted(LOADS))
@pytest.mark.parametrize("form", ("vaddr", "saddr", "buffer", "flat"))
def test_loads(name, form):
    element = LOADS[name]
    data = rng.integers(0, 256, LANES * element.nbytes + 8, dtype=np.uint8)
    order = rng.permutation(LANES).astype(np.uint32)
    offset = order * element.nbytes
    registers = {8: offset, 9: np.zeros(LANES, np.uint32), **dict.fromkeys(range(4), OLD)}
    out = span(0, element.registers)
    if form == "saddr":
        text = f"global_load_{name} {out}, v8, s[0:1] offset:4"
    elif form == "vaddr":
        text = (
            f"v_mov_b32_e32 v10, s0\nv_mov_b32_e32 v11, s1\nv_lshl_add_u64 v[10:11], v[8:9], 0, v[10:11]\n"
            f"global_load_{name} {out}, v[10:11], off offset:4"
        )
    elif form == "flat":
        text = (
            "v_mov_b32_e32 v10, s0\nv_mov_b32_e32 v11, s1\nv_lshl_add_u64 v[10:11], v[8:9], 0, v[10:11]\n"
            f"flat_load_{name} {out}, v[10:11] offset:4"
        )
    else:
        text = (
            f"s_mov_b32 s2, {data.size}\ns_mov_b32 s3, 0x27000\nbuffer_load_{name} {out}, v8, s[0:3], 0 offen offset:4"
        )
    bench = Bench(v=registers, exec_mask=PARTIAL, buffers={"x": data}, place={"x": 0})
    state = bench.run(text + "\ns_waitcnt vmcnt(0)")
    for lane in range(LANES):
        at = int(offset[lane]) + 4
        want = (
            loaded(element, data[at : at + element.nbytes].tobytes(), int(OLD[lane]))
            if ON[lane]
            else [int(OLD[lane])] * element.registers
        )
        assert [int(state.v[r, 0, lane]) for r in range(element.registers)] == want
    assert bench.kinds() == []


@pytest.mark.parametrize("name", sorted(LOADS))
def test_buffer_loads_give_zero_past_num_records(name):
    """Also in the lanes of a partly valid access, whatever the register held (stale ones once gave NaN gradients)."""
    element = LOADS[name]
    data = rng.integers(1, 256, LANES * element.nbytes, dtype=np.uint8)
    limit = 40 * element.nbytes
    bench = Bench(
        v={8: LANE * element.nbytes, **dict.fromkeys(range(4), OLD)},
        exec_mask=PARTIAL,
        buffers={"x": data},
        place={"x": 0},
    )
    state = bench.run(
        f"s_mov_b32 s2, {limit}\ns_mov_b32 s3, 0x27000\n"
        f"buffer_load_{name} {span(0, element.registers)}, v8, s[0:3], 0 offen\ns_waitcnt vmcnt(0)"
    )
    for lane in np.flatnonzero(ON):
        at = int(lane) * element.nbytes
        raw = data[at : at + element.nbytes].tobytes() if lane < 40 else bytes(element.nbytes)
        assert [int(state.v[r, 0, lane]) for r in range(element.registers)] == loaded(element, raw, int(OLD[lane]))
    assert bench.kinds() == []


@pytest.mark.parametrize("name", sorted(STORES))
@pytest.mark.parametrize("records", (64, 41))
def test_stores_with_partial_exec_and_bounds(name, records):
    """The last element that fits is written, the first that does not is dropped: bounds count an access's bytes."""
    element = STORES[name]
    values = rng.integers(0, 1 << 32, (4, LANES), dtype=np.uint64).astype(np.uint32)
    bench = Bench(
        v={8: LANE * element.nbytes, **{n: values[n] for n in range(4)}},
        exec_mask=PARTIAL,
        buffers={"x": np.full(LANES * element.nbytes, 0xEE, np.uint8)},
        place={"x": 0},
    )
    bench.run(
        f"s_mov_b32 s2, {records * element.nbytes}\ns_mov_b32 s3, 0x27000\n"
        f"buffer_store_{name} {span(0, element.registers)}, v8, s[0:3], 0 offen"
    )
    got = bench.memory("x", np.uint8).reshape(LANES, element.nbytes)
    for lane in range(LANES):
        raw = b"".join(int(values[r][lane]).to_bytes(4, "little") for r in range(element.registers))
        raw = raw[2:] if element.half == 1 else raw
        want = raw[: element.nbytes] if ON[lane] and lane < records else b"\xee" * element.nbytes
        assert got[lane].tobytes() == want, lane
    assert bench.kinds() == []


@pytest.mark.parametrize("name", sorted(STORES))
@pytest.mark.parametrize("space", ("global", "flat"))
def test_global_and_flat_stores(name, space):
    element = STORES[name]
    values = rng.integers(0, 1 << 32, (4, LANES), dtype=np.uint64).astype(np.uint32)
    registers = {8: LANE * element.nbytes, 9: LANE * 0, **{n: values[n] for n in range(4)}}
    content = np.full(LANES * element.nbytes, 0xEE, np.uint8)
    bench = Bench(v=registers, exec_mask=PARTIAL, buffers={"x": content}, place={"x": 0})
    data = span(0, element.registers)
    tail = f"flat_store_{name} v[10:11], {data}" if space == "flat" else f"global_store_{name} v[10:11], {data}, off"
    bench.run(f"v_lshl_add_u64 v[10:11], v[8:9], 0, s[0:1]\n{tail}")
    got = bench.memory("x", np.uint8).reshape(LANES, element.nbytes)
    for lane in range(LANES):
        raw = b"".join(int(values[r][lane]).to_bytes(4, "little") for r in range(element.registers))
        raw = raw[2:] if element.half == 1 else raw
        assert got[lane].tobytes() == (raw[: element.nbytes] if ON[lane] else b"\xee" * element.nbytes)
    assert bench.kinds() == []


NARROW = [n for n, e in LOADS.items() if e.nbytes < 4]


@pytest.mark.parametrize("name", NARROW)
def test_narrow_scratch_loads(name):
    element = LOADS[name]
    words = rng.integers(0, 1 << 32, LANES, dtype=np.uint64).astype(np.uint32)
    for store in ("dword", "short_d16_hi", "byte_d16_hi"):
        state = Bench(v={0: words, 1: OLD, 2: LANE % 2 * element.nbytes}, scratch=16).run(
            f"scratch_store_dword off, v0, off\nscratch_store_{store} off, v0, off\n"
            f"scratch_load_{name} v1, v2, off\ns_waitcnt vmcnt(0)"
        )
        for lane in range(LANES):
            raw = bytearray(int(words[lane]).to_bytes(4, "little"))
            count = {"dword": 0, "short_d16_hi": 2, "byte_d16_hi": 1}[store]
            raw[:count] = raw[2 : 2 + count]
            at = lane % 2 * element.nbytes
            want = loaded(element, bytes(raw[at : at + element.nbytes]), int(OLD[lane]))
            assert [int(state.v[1, 0, lane])] == want


@pytest.mark.parametrize("count", (1, 2, 4, 8, 16))
def test_scalar_buffer_loads(count):
    data = np.arange(100, 132, dtype=np.uint32)
    name = "s_buffer_load_dword" + (f"x{count}" if count > 1 else "")
    out = "s16" if count == 1 else f"s[16:{15 + count}]"
    bench = Bench(buffers={"x": data}, place={"x": 0})
    state = bench.run(f"s_mov_b32 s2, 24\ns_mov_b32 s3, 0\n{name} {out}, s[0:3], 0x4\ns_waitcnt lgkmcnt(0)")
    assert [int(x) for x in state.s[0, 16 : 16 + count]] == [101 + i if i < 5 else 0 for i in range(count)]


@pytest.mark.parametrize("words", (3, 4))
def test_wide_loads_to_lds(words):
    data = rng.integers(0, 1 << 32, LANES * words, dtype=np.uint64).astype(np.uint32)
    bench = Bench(v={8: LANE * 4 * words}, lds=2048, target="gfx950", buffers={"x": data}, place={"x": 0})
    bench.run(f"s_mov_b32 m0, 64\nglobal_load_lds_dwordx{words} v8, s[0:1]\ns_waitcnt vmcnt(0)")
    assert (bench.machine.lds.words[16 : 16 + LANES * words] == data).all() and bench.kinds() == []


def test_global_store_matches_buffer_store_on_the_last_half():
    data = np.zeros(LANES, np.uint16)
    bench = Bench(v={8: LANE * 2, 0: LANE + 1}, buffers={"x": data}, place={"x": 0})
    bench.run("global_store_short v8, v0, s[0:1]")
    assert (bench.memory("x", np.uint16) == np.arange(1, LANES + 1)).all() and bench.kinds() == []


def test_load_may_overwrite_its_own_address():
    data = rng.integers(0, 1 << 32, 4 * LANES, dtype=np.uint64).astype(np.uint32)
    bench = Bench(v={0: LANE * 16}, buffers={"x": data}, place={"x": 0})
    state = bench.run("global_load_dwordx4 v[0:3], v0, s[0:1]\ns_waitcnt vmcnt(0)")
    assert (state.v[:4, 0] == data.reshape(LANES, 4).T).all()


def test_structured_buffers_bound_by_index():
    data = np.arange(LANES * 3, dtype=np.uint32)
    bench = Bench(v={8: LANE, 0: OLD}, buffers={"x": data}, place={"x": 0})
    state = bench.run(
        "s_or_b32 s1, s1, 0xc0000\ns_mov_b32 s2, 50\ns_mov_b32 s3, 0x27000\n"
        "buffer_load_dword v0, v8, s[0:3], 4 idxen offset:4\ns_waitcnt vmcnt(0)"
    )
    assert [int(x) for x in state.v[0, 0]] == [3 * lane + 2 if lane < 50 else 0 for lane in range(LANES)]


def test_swizzled_buffers_are_refused():
    bench = Bench(v={8: LANE}, buffers={"x": np.zeros(64, np.uint32)}, place={"x": 0})
    with pytest.raises(UnsupportedError, match="swizzled"):
        bench.run(
            "s_or_b32 s1, s1, 0x80000000\ns_mov_b32 s2, 50\ns_mov_b32 s3, 0\nbuffer_load_dword v0, v8, s[0:3], 0 offen"
        )


# ---------------------------------------------------------------- bounds and alignment
@pytest.mark.parametrize(
    "offset, text", ((-4, "before its start"), (4 * LANES, "0 past its 256 bytes"), (1 << 30, "past its 256 bytes"))
)
def test_global_bounds_name_the_buffer_and_lane(offset, text):
    address = np.where(LANE == 10, np.int64(offset), np.int64(0))
    bench = Bench(
        v={8: address.astype(np.int32).view(np.uint32), 9: (address >> 32).astype(np.int32).view(np.uint32), 0: OLD},
        exec_mask=PARTIAL,
        buffers={"w": np.ones(LANES, np.uint32), "x": np.ones(LANES, np.uint32)},
        place={"x": 0},
    )
    state = bench.run(
        "v_lshl_add_u64 v[10:11], v[8:9], 0, s[0:1]\nglobal_load_dword v0, v[10:11], off\ns_waitcnt vmcnt(0)"
    )
    (finding,) = bench.report.findings()
    assert (
        finding.kind == "global-bounds"
        and finding.lane == 10
        and text in finding.message
        and finding.message.split(": ")[1].startswith("x ")
    )
    assert [int(x) for x in state.v[0, 0]] == [
        (0 if lane == 10 else 1) if ON[lane] else int(OLD[lane]) for lane in range(LANES)
    ]


def test_lanes_that_are_off_do_not_count():
    address = np.where(ON, LANE * 4, 1 << 20).astype(np.uint32)
    bench = Bench(v={8: address}, exec_mask=PARTIAL, buffers={"x": np.ones(LANES, np.uint32)}, place={"x": 0})
    bench.run("global_load_dword v0, v8, s[0:1]\nglobal_store_dword v8, v1, s[0:1]")
    assert bench.kinds() == []


def test_wild_and_null_pointers():
    bench = Bench(v={8: LANE}, s={0: 0, 1: 0}, buffers={"x": np.ones(LANES, np.uint32)})
    bench.run("global_load_dword v0, v8, s[0:1]")
    assert bench.kinds() == ["global-bounds"] and "belongs to no buffer" in bench.report.findings()[0].message


def test_misaligned_accesses():
    bench = Bench(v={8: LANE * 4 + 2}, buffers={"x": np.ones(LANES + 1, np.uint32)}, place={"x": 0})
    bench.run("global_store_dword v8, v0, s[0:1]")
    assert bench.kinds() == ["misaligned"]


# ---------------------------------------------------------------- atomics
ATOMIC = {
    "add": lambda o, x: (o + x) & 0xFFFFFFFF,
    "sub": lambda o, x: (o - x) & 0xFFFFFFFF,
    "umin": min,
    "umax": max,
    "and": lambda o, x: o & x,
    "or": lambda o, x: o | x,
    "xor": lambda o, x: o ^ x,
    "swap": lambda o, x: x,
    "inc": lambda o, x: 0 if o >= x else o + 1,
    "dec": lambda o, x: x if o == 0 or o > x else o - 1,
    "smin": lambda o, x: min(o, x, key=lambda v: v - (v >> 31 << 32)),
    "smax": lambda o, x: max(o, x, key=lambda v: v - (v >> 31 << 32)),
}


@pytest.mark.parametrize("name", sorted(ATOMIC))
@pytest.mark.parametrize("returns", (False, True))
@pytest.mark.parametrize("width", (1, 2))
@pytest.mark.parametrize("space", ("global", "flat", "buffer"))
def test_integer_atomics_one_after_the_other(name, returns, width, space):
    """Lanes collide on 8 cells; without a seed they go in lane order."""
    kind = np.uint32 if width == 1 else np.uint64
    values = rng.integers(0, 1 << (32 if width == 1 else 33), LANES, dtype=np.uint64)
    cells = rng.integers(0, 1 << 20, 8, dtype=np.uint64).astype(kind)
    where = rng.integers(0, 8, LANES).astype(np.uint32)
    registers = {
        8: where * (4 * width),
        2: values.astype(np.uint32),
        3: (values >> np.uint64(32)).astype(np.uint32),
        0: OLD,
        1: OLD,
    }
    suffix, data, out = ("", "v2", "v0, ") if width == 1 else ("_x2", "v[2:3]", "v[0:1], ")
    bench = Bench(v=registers, exec_mask=PARTIAL, buffers={"x": cells.copy()}, place={"x": 0})
    tail = (" sc0" if returns else "") + "\ns_waitcnt vmcnt(0) lgkmcnt(0)"
    out = out if returns else ""
    wide = "v_mov_b32_e32 v9, 0\nv_lshl_add_u64 v[10:11], v[8:9], 0, s[0:1]\n"
    text = {
        "global": f"global_atomic_{name}{suffix} {out}v8, {data}, s[0:1]",
        "flat": f"{wide}flat_atomic_{name}{suffix} {out}v[10:11], {data}",
        "buffer": f"s_mov_b32 s2, 64\ns_mov_b32 s3, 0\nbuffer_atomic_{name}{suffix} {data}, v8, s[0:3], 0 offen",
    }[space]
    state = bench.run(text + tail)
    old = 2 if space == "buffer" else 0  # a buffer atomic returns into its data
    memory = [int(c) for c in cells]
    top = 32 * width
    function = ATOMIC[name]
    if width == 2:
        function = {
            "add": lambda o, x: (o + x) & FULL,
            "sub": lambda o, x: (o - x) & FULL,
            "smin": lambda o, x: min(o, x, key=lambda v: v - (v >> 63 << 64)),
            "smax": lambda o, x: max(o, x, key=lambda v: v - (v >> 63 << 64)),
        }.get(name, function)
    for lane in np.flatnonzero(ON):
        cell, value = int(where[lane]), int(values[lane]) & ((1 << top) - 1)
        if returns:
            got = int(state.v[old, 0, lane]) | (int(state.v[old + 1, 0, lane]) << 32 if width == 2 else 0)
            assert got == memory[cell], lane
        memory[cell] = function(memory[cell], value)
    assert [int(x) for x in bench.memory("x", kind)] == memory
    assert bench.kinds() == []


@pytest.mark.parametrize("name", ("add_f32", "pk_add_f16", "pk_add_bf16", "add_f64", "max_f64", "min_f64"))
@pytest.mark.parametrize("form", ("global", "flat", "buffer"))
def test_float_atomics(name, form):
    where = rng.integers(0, 4, LANES).astype(np.uint32)
    values = rng.integers(-8, 9, (LANES, 2)).astype(np.float32)  # small integers: exact in any order and type
    wide = name.endswith("f64")
    if name == "add_f32":
        words, memory = values[:, :1].view(np.uint32), np.zeros(4, np.float32)
    elif wide:
        words, memory = values[:, 0].astype(np.float64)[:, None].view(np.uint32), np.zeros(4, np.float64)
    elif name == "pk_add_f16":
        words, memory = values.astype(np.float16).view(np.uint32), np.zeros(8, np.float16)
    else:
        high = values.view(np.uint32) >> np.uint32(16)
        words, memory = (high[:, 0] | high[:, 1] << np.uint32(16))[:, None], np.zeros(4, np.uint32)
    bench = Bench(
        v={8: where * (8 if wide else 4), 2: words[:, 0], **({3: words[:, 1]} if wide else {})},
        exec_mask=PARTIAL,
        buffers={"x": memory},
        place={"x": 0},
    )
    data = "v[2:3]" if wide else "v2"
    if form == "global":
        bench.run(f"global_atomic_{name} v8, {data}, s[0:1]")
    elif form == "flat":
        wider = "v_mov_b32_e32 v9, 0\nv_lshl_add_u64 v[10:11], v[8:9], 0, s[0:1]\n"
        bench.run(f"{wider}flat_atomic_{name} v[10:11], {data}")
    else:
        bench.run(f"s_mov_b32 s2, 64\ns_mov_b32 s3, 0x27000\nbuffer_atomic_{name} {data}, v8, s[0:3], 0 offen")
    got = bench.memory("x", memory.dtype)
    if name == "pk_add_bf16":
        got = np.stack([got << np.uint32(16), got & np.uint32(0xFFFF0000)], 1).view(np.float32)
    got = got.reshape(4, -1)
    want = np.zeros((4, 2))
    for lane in np.flatnonzero(ON):
        if name in ("max_f64", "min_f64"):
            pick = max if name == "max_f64" else min
            want[where[lane], 0] = pick(want[where[lane], 0], values[lane, 0])
        else:
            want[where[lane]] += values[lane]
    np.testing.assert_array_equal(got, want[:, : got.shape[1]])


def test_a_seed_makes_the_order_of_float_atomics_show():
    """fp32 sums do not associate: their last bits differ between seeds, and not without one."""
    values = (rng.standard_normal(LANES) * 1000).astype(np.float32)
    results = {None: set(), 0: set()}
    for seed in range(8):
        for key in results:
            options = Options(seed=None if key is None else seed)
            bench = Bench(
                v={8: LANE * 0, 2: values}, buffers={"x": np.zeros(1, np.float32)}, place={"x": 0}, options=options
            )
            bench.run("global_atomic_add_f32 v8, v2, s[0:1]")
            results[key].add(float(bench.memory("x", np.float32)[0]))
    assert len(results[None]) == 1 and len(results[0]) > 1
    assert all(abs(x - values.astype(np.float64).sum()) < 0.01 for x in results[0])


@pytest.mark.parametrize("space", ("global", "flat", "buffer"))
@pytest.mark.parametrize("width", (1, 2))
def test_compare_and_swap_forms(space, width):
    """Lane 0 finds what it expects and swaps; lane 1 finds something else."""
    kind, size = (np.uint32, 4) if width == 1 else (np.uint64, 8)
    high = np.zeros(LANES, np.uint32)
    new, expected = LANE + 100, np.full(LANES, 5, np.uint32)
    registers = (
        {8: LANE % 2 * size, 2: new, 3: expected}
        if width == 1
        else {8: LANE % 2 * size, 2: new, 3: high, 4: expected, 5: high}
    )
    suffix, data, out = ("", "v[2:3]", "v0") if width == 1 else ("_x2", "v[2:5]", "v[0:1]")
    bench = Bench(v=registers, exec_mask=3, buffers={"x": np.array([5, 6], kind)}, place={"x": 0})
    wide = "v_mov_b32_e32 v9, 0\nv_lshl_add_u64 v[10:11], v[8:9], 0, s[0:1]\n"
    text = {
        "global": f"global_atomic_cmpswap{suffix} {out}, v8, {data}, s[0:1] sc0",
        "flat": f"{wide}flat_atomic_cmpswap{suffix} {out}, v[10:11], {data} sc0",
        "buffer": f"s_mov_b32 s2, 64\ns_mov_b32 s3, 0\nbuffer_atomic_cmpswap{suffix} {data}, v8, s[0:3], 0 offen sc0",
    }[space]
    state = bench.run(text + "\ns_waitcnt vmcnt(0) lgkmcnt(0)")
    assert list(bench.memory("x", kind)) == [100, 6]
    assert [int(x) for x in state.v[2 if space == "buffer" else 0, 0, :2]] == [5, 6]


def test_compare_and_swap():
    data = np.array([5, 6], np.uint32)
    bench = Bench(
        v={8: LANE % 2 * 4, 2: LANE + 100, 3: np.full(LANES, 5, np.uint32)}, buffers={"x": data}, place={"x": 0}
    )
    state = bench.run("global_atomic_cmpswap v0, v8, v[2:3], s[0:1] sc0\ns_waitcnt vmcnt(0)")
    assert list(bench.memory("x", np.uint32)) == [100, 6]
    assert [int(x) for x in state.v[0, 0, :4]] == [5, 6, 100, 6]


# ---------------------------------------------------------------- scratch and scalar memory
@pytest.mark.parametrize("name", ("dword", "dwordx2", "dwordx3", "dwordx4", "short", "byte"))
def test_scratch_keeps_each_lane_apart(name):
    element = STORES[name]
    values = rng.integers(0, 1 << 32, (4, LANES), dtype=np.uint64).astype(np.uint32)
    load = {"short": "ushort", "byte": "ubyte"}.get(name, name)
    registers = {n: values[n] for n in range(4)} | {10: LANE % 3 * 16, **dict.fromkeys(range(4, 8), OLD)}
    bench = Bench(v=registers, exec_mask=PARTIAL, scratch=96, s={32: 16})
    state = bench.run(
        f"scratch_store_{name} v10, {span(0, element.registers)}, s32 offset:16\n"
        f"scratch_load_{load} {span(4, element.registers)}, v10, s32 offset:16\ns_waitcnt vmcnt(0)"
    )
    for r in range(element.registers):
        keep = np.uint32((1 << (8 * min(element.nbytes, 4))) - 1)
        assert (state.v[4 + r, 0] == np.where(ON, values[r] & keep, OLD)).all()
    assert bench.kinds() == []


def test_scratch_fixed_slots_bounds_and_first_use():
    bench = Bench(v={0: LANE, 1: OLD}, scratch=32)
    state = bench.run(
        "scratch_store_dword off, v0, off offset:12\nscratch_load_dword v1, off, off offset:12\ns_waitcnt vmcnt(0)"
    )
    assert (state.v[1, 0] == LANE).all() and bench.kinds() == []
    bench.run("scratch_load_dword v1, off, off offset:8")
    assert bench.kinds() == ["scratch-uninitialised"]
    with pytest.raises(SimulationError, match="scratch address"):
        bench.run("scratch_load_dword v1, off, off offset:32")


@pytest.mark.parametrize("count", (1, 2, 4, 8, 16))
def test_scalar_loads(count):
    data = rng.integers(0, 1 << 32, 24, dtype=np.uint64).astype(np.uint32)
    name = "s_load_dword" + (f"x{count}" if count > 1 else "")
    out = "s16" if count == 1 else f"s[16:{15 + count}]"
    for text in (f"{name} {out}, s[0:1], 0x8", f"{name} {out}, s[0:1], s4", f"{name} {out}, s[0:1], s4 offset:0x4"):
        state = Bench(buffers={"x": data}, place={"x": 0}, s={4: 8}).run(text + "\ns_waitcnt lgkmcnt(0)")
        start = 3 if "offset" in text else 2
        assert [int(x) for x in state.s[0, 16 : 16 + count]] == [int(x) for x in data[start : start + count]]


def test_scalar_load_out_of_bounds_and_through_a_buffer():
    bench = Bench(buffers={"x": np.arange(4, dtype=np.uint32)}, place={"x": 0})
    bench.run("s_load_dwordx4 s[16:19], s[0:1], 0x4\ns_waitcnt lgkmcnt(0)")
    assert bench.kinds() == ["global-bounds"]
    state = bench.run(
        "s_mov_b32 s2, 8\ns_mov_b32 s3, 0\ns_buffer_load_dwordx4 s[16:19], s[0:3], 0x0\ns_waitcnt lgkmcnt(0)"
    )
    assert [int(x) for x in state.s[0, 16:20]] == [0, 1, 0, 0] and bench.kinds() == []
