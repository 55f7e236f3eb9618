"""Vector ALU instructions: operand modifiers, DPP and SDWA around the functions of `lane_ops`, and the odd ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import VCC
from .isa import Builder, Handler, as_getter, lane_dtype
from .lane_ops import COMPARE, DOT2, FLOAT_ONLY, OPS, PACKED_16, PACKED_F32, LaneOp, dot2, fma, pack
from .state import DTYPES, LANES, WIDTH, Getter, bits_to_lanes, f32, flush_denormals, i32, i64, u16, u32, u64

FLOATS = ("f16", "f32", "f64", "bf16")
SDWA_SELECT = {"DWORD": (0, 32)} | {f"WORD_{n}": (16 * n, 16) for n in (0, 1)} | {f"BYTE_{n}": (8 * n, 8) for n in range(4)}
DPP_MODIFIERS = (
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_newbcast", "row_bcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror",
    "row_mirror", "row_half_mirror", "row_mask", "bank_mask", "bound_ctrl",
)  # fmt: skip
SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel", "clamp")
OUTPUT_MODIFIERS = ("clamp", "mul", "div")

Run = Callable[[], "int | None"]


# ---------------------------------------------------------------------- sources
def source(b: Builder, position: int, kind: str, half: int = 0) -> np.ndarray | Getter:
    """Source `position` with neg and abs applied, and denormals flushed where the mode says so."""
    operand = b.operands[position]
    if operand.sign_extend:
        raise b.fail("sext() outside SDWA")
    value = b.lane(position, kind, half)
    value = signed(b, value, operand.negate, operand.absolute, kind)
    return flushed(b, value, kind)


def signed(b: Builder, value: np.ndarray | Getter, negate: bool, absolute: bool, kind: str) -> np.ndarray | Getter:
    """Apply neg and abs, which only float operands (and 32-bit moves, as f32) can carry."""
    if not negate and not absolute:
        return value
    get = as_getter(value)
    if kind == "u32" and b.instruction.opcode in ("v_mov_b32", "v_cndmask_b32"):
        keep, flip = u32(0x7FFFFFFF if absolute else 0xFFFFFFFF), u32(0x80000000 if negate else 0)
        return lambda: (get() & keep) ^ flip
    if kind not in FLOATS:
        raise b.fail(f"neg or abs on a {kind} source")

    def modified() -> np.ndarray:
        array = np.abs(get()) if absolute else get()
        return -array if negate else array

    return modified


def flushed(b: Builder, value: np.ndarray | Getter, kind: str) -> np.ndarray | Getter:
    """Flush f32 source denormals in waves whose mode asks for it."""
    if kind != "f32" or not b.state.may_flush32:
        return value
    get, state = as_getter(value), b.state
    return lambda: np.where(state.flush32[:, None], flush_denormals(np.asarray(get())), get())


# ---------------------------------------------------------------------- results
def adjust(b: Builder, kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """Output modifiers (omod, then clamp) and denormal flushing of a result, or None when nothing is to be done."""
    steps = []
    for name, factors in (("mul", {2: 2.0, 4: 4.0}), ("div", {2: 0.5})):
        if name in b.modifiers:
            factor = factors.get(b.integer(name))
            if kind not in FLOATS or factor is None:
                raise b.fail(f"output modifier {name}:{b.modifiers[name]}")
            steps.append(lambda v, factor=lane_dtype(kind)(factor): v * factor)
    if "clamp" in b.modifiers:
        if kind not in FLOATS:
            raise b.fail("clamp (saturation) of an integer result")
        steps.append(lambda v: np.clip(np.where(np.isnan(v), v.dtype.type(0), v), v.dtype.type(0), v.dtype.type(1)))
    if kind == "f32" and b.state.may_flush32:
        flags = b.state.flush32
        steps.append(lambda v: np.where(flags[:, None], flush_denormals(np.asarray(v)), v))
    if not steps:
        return None

    def apply(value: np.ndarray) -> np.ndarray:
        for step in steps:
            value = step(value)
        return value

    return apply


# ---------------------------------------------------------------------- the general lane operation
def lane_handler(op: LaneOp) -> Handler:
    """Handler of one row of the table, in any encoding."""

    def build(b: Builder) -> Run:
        explicit = len(op.sources) - op.accumulates
        b.expect(explicit + 1)
        encoding = b.instruction.encoding
        if encoding == "sdwa":
            return _sdwa(b, op)
        if encoding == "dpp":
            return _dpp(b, op)
        b.allow("op_sel", *OUTPUT_MODIFIERS)
        narrow = any(DTYPES.get(k, f32)().itemsize == 2 for k in (op.result, *op.sources))
        if "op_sel" in b.modifiers and not narrow:
            raise b.fail("op_sel on an instruction without 16-bit operands")
        halves = b.bits("op_sel", explicit + 1, 0)
        positions = [*range(1, explicit + 1), *([0] if op.accumulates else [])]
        sources = [source(b, p, k, halves[p - 1] if p else 0) for p, k in zip(positions, op.sources, strict=True)]
        return _emit(b, op, sources, halves[-1] if "op_sel" in b.modifiers or op.keeps_high else None)

    return build


def _emit(b: Builder, op: LaneOp, sources: list, half: int | None) -> Run:
    state, function, post = b.state, op.function, adjust(b, op.result)
    target = b.write(b.operands[0], WIDTH[op.result])
    dtype = lane_dtype(op.result)
    if isinstance(function, np.ufunc) and post is None and dtype().itemsize == 4 and not any(map(callable, sources)):
        out = state.block(target, 1)[0].view(dtype)

        def direct() -> None:
            if state.full:
                function(*sources, out=out)
            else:
                function(*sources, out=out, where=state.mask)

        return direct
    write = state.lane_writer(target, op.result, half if dtype().itemsize == 2 else None)
    return _call(function, [as_getter(s) for s in sources], post, write)


def _call(function: Callable, getters: list[Getter], post: Callable | None, write: Callable) -> Run:
    if post is not None:
        return lambda: write(post(function(*[g() for g in getters])))
    if len(getters) == 1:
        (first,) = getters
        return lambda: write(function(first()))
    if len(getters) == 2:
        first, second = getters
        return lambda: write(function(first(), second()))
    return lambda: write(function(*[g() for g in getters]))


# ---------------------------------------------------------------------- DPP
def dpp_lanes(b: Builder) -> tuple[np.ndarray, np.ndarray]:
    """Source lane of every lane, and whether that lane exists."""
    lane = np.arange(LANES)
    row, place = lane & ~15, lane & 15
    shifts = {
        "row_shl": lambda n: (row + ((place + n) & 15), place + n < 16),
        "row_shr": lambda n: (row + ((place - n) & 15), place >= n),
        "row_ror": lambda n: (row + ((place - n) & 15), lane >= 0),
        "row_newbcast": lambda n: (row + n, lane >= 0),
        "row_bcast": lambda n: ((row - 1) & 63, row > 0) if n == 15 else (np.full(LANES, 31), lane > 31),
        "wave_shl": lambda n: ((lane + 1) & 63, lane < 63),
        "wave_shr": lambda n: ((lane - 1) & 63, lane > 0),
        "wave_rol": lambda n: ((lane + 1) & 63, lane >= 0),
        "wave_ror": lambda n: ((lane - 1) & 63, lane >= 0),
    }
    named = [name for name in DPP_MODIFIERS[:12] if name in b.modifiers]
    if len(named) != 1:
        raise b.fail(f"DPP needs exactly one lane pattern, found {named}")
    name = named[0]
    if name == "quad_perm":
        order = np.array([int(x) for x in str(b.modifiers[name]).strip("[]").split(",")])
        if order.shape != (4,) or (order < 0).any() or (order > 3).any():
            raise b.fail(f"quad_perm:{b.modifiers[name]}")
        return (lane & ~3) | order[lane & 3], lane >= 0
    if name == "row_mirror":
        return row + 15 - place, lane >= 0
    if name == "row_half_mirror":
        return (lane & ~7) | (7 - (lane & 7)), lane >= 0
    count = b.integer(name)
    limits = {"row_bcast": (15, 31), "row_newbcast": range(16), "row_ror": range(1, 16), "row_shl": range(1, 16), "row_shr": range(1, 16)}
    if count not in limits.get(name, (1,)):
        raise b.fail(f"{name}:{count}")
    return shifts[name](count)


def _dpp(b: Builder, op: LaneOp) -> Run:
    b.allow(*DPP_MODIFIERS)
    if any(WIDTH[k] == 2 for k in (op.result, *op.sources)):
        raise b.fail("64-bit DPP")
    state = b.state
    lanes, exists = dpp_lanes(b)
    lane = np.arange(LANES)
    rows, banks = b.integer("row_mask", 15), b.integer("bank_mask", 15)
    enabled = ((rows >> (lane >> 4)) & 1).astype(bool) & ((banks >> ((lane >> 2) & 3)) & 1).astype(bool)
    zero_fill = "bound_ctrl" in b.modifiers
    first = b.operands[1]
    raw = b.lane(1, op.sources[0])
    shape = (state.waves, LANES)

    def shuffled() -> np.ndarray:
        moved = np.broadcast_to(raw() if callable(raw) else raw, shape)[:, lanes]
        return np.where(valid(), moved, moved.dtype.type(0)) if zero_fill else moved

    def valid() -> np.ndarray:
        return np.broadcast_to(exists, shape) if state.full else exists & lanes_active()[:, lanes]

    def lanes_active() -> np.ndarray:
        return state.mask

    explicit = len(op.sources) - op.accumulates
    get0 = as_getter(flushed(b, signed(b, shuffled, first.negate, first.absolute, op.sources[0]), op.sources[0]))
    rest = [source(b, p, op.sources[p - 1]) for p in range(2, explicit + 1)]
    if op.accumulates:
        rest.append(source(b, 0, op.sources[-1]))
    getters, post = [get0, *map(as_getter, rest)], adjust(b, op.result)
    write = state.lane_writer(b.write(b.operands[0], WIDTH[op.result]), op.result)
    b.read(b.operands[0])  # lanes that are switched off keep the old value

    def run() -> None:
        value = op.function(*[g() for g in getters])
        value = post(value) if post else value
        keep_full, keep_mask = state.full, state.mask
        narrowed = enabled if zero_fill else enabled & valid()
        state.full, state.mask = False, keep_mask & narrowed
        write(np.asarray(value))
        state.full, state.mask = keep_full, keep_mask

    return run


# ---------------------------------------------------------------------- SDWA
def sdwa_source(b: Builder, position: int, kind: str) -> Getter:
    """Source of an SDWA instruction: a byte or word of the register, sign- or zero-extended."""
    operand = b.operands[position]
    name = str(b.modifiers.get(f"src{position - 1}_sel", "DWORD"))
    if name not in SDWA_SELECT or WIDTH[kind] == 2:
        raise b.fail(f"src{position - 1}_sel:{name}")
    start, width = SDWA_SELECT[name]
    raw = as_getter(b.lane(position, "u32"))
    if width == 32:
        select = raw
    elif operand.sign_extend:
        select = lambda: (((raw() << u32(32 - start - width)).view(i32)) >> i32(32 - width)).view(u32)
    else:
        select = lambda: (raw() >> u32(start)) & u32((1 << width) - 1)
    dtype = lane_dtype(kind)
    if dtype().itemsize == 2:
        typed = lambda: select().astype(u16).view(dtype)
    else:
        typed = lambda: select().view(dtype)
    return as_getter(flushed(b, signed(b, typed, operand.negate, operand.absolute, kind), kind))


def sdwa_writer(b: Builder, kind: str) -> Callable[[np.ndarray], None]:
    """Destination of an SDWA instruction: place the low bits of the result and treat the rest as dst_unused says."""
    name, unused = str(b.modifiers.get("dst_sel", "DWORD")), str(b.modifiers.get("dst_unused", "UNUSED_PAD"))
    if name not in SDWA_SELECT or unused not in ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"):
        raise b.fail(f"dst_sel:{name} dst_unused:{unused}")
    start, width = SDWA_SELECT[name]
    write = b.state.lane_writer(b.write(b.operands[0]), "u32")
    old = b.lane(0, "u32") if unused == "UNUSED_PRESERVE" and width < 32 else None
    wide = DTYPES.get(kind, f32)().itemsize == 4

    def place(value: np.ndarray) -> None:
        value = np.asarray(value).view(u32) if wide else np.asarray(value).view(u16).astype(u32)
        if width < 32:
            keep = u32((1 << width) - 1)
            value = (value & keep) << u32(start)
            if old is not None:
                value = value | (old & ~(keep << u32(start)))
            elif unused == "UNUSED_SEXT":
                value = ((value << u32(32 - start - width)).view(i32) >> i32(32 - start - width)).view(u32)
        write(value)

    return place


def _sdwa(b: Builder, op: LaneOp) -> Run:
    b.allow(*SDWA_MODIFIERS)
    explicit = len(op.sources) - op.accumulates
    getters = [sdwa_source(b, p, op.sources[p - 1]) for p in range(1, explicit + 1)]
    if op.accumulates:
        getters.append(as_getter(source(b, 0, op.sources[-1])))
    return _call(op.function, getters, adjust(b, op.result), sdwa_writer(b, op.result))


# ---------------------------------------------------------------------- comparisons
def compare_handler(condition: str, kind: str, writes_exec: bool) -> Handler:
    """v_cmp and v_cmpx: a lane mask into a scalar pair; inactive lanes give 0."""
    function = COMPARE[condition]

    def build(b: Builder) -> Run:
        b.expect(3)
        if b.instruction.encoding == "sdwa":
            b.allow("src0_sel", "src1_sel")
            sources = [sdwa_source(b, 1, kind), sdwa_source(b, 2, kind)]
        else:
            b.allow()
            sources = [source(b, 1, kind), source(b, 2, kind)]
        write, pack_lanes, state = b.scalar_out(0, 2), b.state.pack, b.state
        first, second = map(as_getter, sources)
        exec_mask = state.exec

        def run() -> None:
            write(pack_lanes(function(first(), second())))

        def run_exec() -> None:
            bits = pack_lanes(function(first(), second()))
            write(bits)
            np.copyto(exec_mask, bits, where=state.group)
            state.exec_changed()

        if writes_exec:
            b.writes.update((512 + 126, 512 + 127))
        return run_exec if writes_exec else run

    return build


def _compare_class(b: Builder) -> Run:
    b.expect(3)
    b.allow()
    value, mask = as_getter(source(b, 1, "f32")), as_getter(b.lane(2, "u32"))
    write = b.mask_out(0)

    def run() -> None:
        x, wanted = np.asarray(value()), mask()
        bits = x.view(u32)
        magnitude, negative = bits & u32(0x7FFFFFFF), (bits >> u32(31)).astype(bool)
        kind = np.select(
            [magnitude > 0x7F800000, magnitude == 0x7F800000, magnitude >= 0x00800000, magnitude > 0],
            [np.where(bits & u32(0x00400000), 1, 0), np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)],
            np.where(negative, 5, 6),
        ).astype(u32)  # fmt: skip
        write((wanted >> kind) & u32(1) != 0)

    return run


# ---------------------------------------------------------------------- packed
def packed_f32_handler(count: int, function: Callable) -> Handler:
    """v_pk_*_f32: two words a lane, each source picking its words by op_sel and op_sel_hi."""

    def build(b: Builder) -> Run:
        b.expect(count + 1)
        b.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
        low, high = b.bits("op_sel", count, 0), b.bits("op_sel_hi", count, 1)
        flip = list(zip(b.bits("neg_lo", count, 0), b.bits("neg_hi", count, 0), strict=True))
        getters = [as_getter(_word_pair(b, p + 1, low[p], high[p], flip[p])) for p in range(count)]
        state, post = b.state, adjust(b, "f32")
        out = state.block(b.write(b.operands[0], 2), 2).view(f32)

        def run() -> None:
            value = function(*[g() for g in getters])
            np.copyto(out, post(value) if post else value, where=state.mask)

        def direct() -> None:
            function(*[g() for g in getters], out=out, where=True if state.full else state.mask)

        return direct if isinstance(function, np.ufunc) and post is None else run

    return build


def _word_pair(b: Builder, position: int, low: int, high: int, flip: tuple[int, int]) -> np.ndarray | Getter:
    """The two f32 words that a packed source contributes, shape [2 or 1, waves or 1, lanes or 1]."""
    operand, state = b.plain(b.operands[position]), b.state
    if operand.kind in "va":
        words = state.block(b.read(operand, 2), 2).view(f32)
    elif operand.kind == "s":
        b.read(operand, 2)
        words = state.s[:, operand.index : operand.index + 2].view(f32).T[:, :, None]
    else:
        words = np.broadcast_to(state.lanes(operand, "f32"), (2, 1, 1))
    order = {(0, 1): slice(None), (1, 0): slice(None, None, -1), (0, 0): slice(0, 1), (1, 1): slice(1, 2)}[low, high]
    view = words[order]
    if any(flip):
        sign = np.where(flip, f32(-1), f32(1)).astype(f32).reshape(2, 1, 1)
        return flushed_words(b, lambda: view * sign)
    return flushed_words(b, view)


def flushed_words(b: Builder, value: np.ndarray | Getter) -> np.ndarray | Getter:
    """Denormal flushing for packed sources."""
    return flushed(b, value, "f32")


def packed_16_handler(kind: str, count: int, function: Callable) -> Handler:
    """v_pk_* on 16-bit halves."""

    def build(b: Builder) -> Run:
        b.expect(count + 1)
        b.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
        write = b.lane_out(0, "u32")
        results = []
        for halves, flips in ((b.bits("op_sel", count, 0), "neg_lo"), (b.bits("op_sel_hi", count, 1), "neg_hi")):
            flip = b.bits(flips, count, 0)
            sources = [b.lane(p + 1, kind, halves[p]) for p in range(count) if b.plain(b.operands[p + 1])]
            results.append([as_getter(signed(b, s, bool(flip[p]), False, kind)) for p, s in enumerate(sources)])
        low, high = results
        dtype = DTYPES[kind]
        half = lambda getters: np.asarray(function(*[g() for g in getters])).astype(dtype)
        return lambda: write(pack(half(low), half(high)))

    return build


def _packed_move(b: Builder) -> Run:
    b.expect(3)
    b.allow("op_sel", "op_sel_hi")
    select = b.bits("op_sel", 2, 0)
    words = [_word_pair(b, p, select[p - 1], select[p - 1], (0, 0)) for p in (1, 2)]
    out, state = b.state.block(b.write(b.operands[0], 2), 2), b.state

    def run() -> None:
        low, high = (np.array(as_getter(w)()).view(u32)[0] for w in words)
        np.copyto(out[0], low, where=state.mask)
        np.copyto(out[1], high, where=state.mask)

    return run


def mix_handler(result: str, half: int | None) -> Handler:
    """v_fma_mix: each source is f32, or an f16 half picked by op_sel where op_sel_hi is set."""

    def build(b: Builder) -> Run:
        b.expect(4)
        b.allow("op_sel", "op_sel_hi", "clamp")
        select, narrow = b.bits("op_sel", 3, 0), b.bits("op_sel_hi", 3, 0)
        getters = [as_getter(source(b, p + 1, "f16" if narrow[p] else "f32", select[p] if narrow[p] else 0)) for p in range(3)]
        post = adjust(b, result)
        write = b.state.lane_writer(b.write(b.operands[0]), result, half)
        dtype = lane_dtype(result)

        def run() -> None:
            value = fma(*[g().astype(f32) for g in getters]).astype(dtype)
            write(post(value) if post else value)

        return run

    return build


# ---------------------------------------------------------------------- masks, carries, lanes
def _cndmask(b: Builder) -> Run:
    b.expect(4)
    if b.instruction.encoding == "sdwa":
        b.allow(*SDWA_MODIFIERS)
        no, yes = sdwa_source(b, 1, "u32"), sdwa_source(b, 2, "u32")
        write = sdwa_writer(b, "u32")
    else:
        b.allow()
        no, yes = as_getter(source(b, 1, "u32")), as_getter(source(b, 2, "u32"))
        write = b.lane_out(0, "u32")
    choose = b.mask(3)
    return lambda: write(np.where(choose(), yes(), no()))


def carry_handler(subtract: bool, reverse: bool, with_carry: bool) -> Handler:
    """v_add_co_u32 and its relatives: sum into a vector register, carry into a lane mask."""

    def build(b: Builder) -> Run:
        b.expect(5 if with_carry else 4)
        b.allow()
        first, second = as_getter(b.lane(2, "u32")), as_getter(b.lane(3, "u32"))
        if reverse:
            first, second = second, first
        carry_in = b.mask(4) if with_carry else None
        write, write_carry = b.lane_out(0, "u32"), b.mask_out(1)

        def run() -> None:
            x, y = first().astype(i64), second().astype(i64)
            total = x - y if subtract else x + y
            if carry_in is not None:
                total = total - carry_in() if subtract else total + carry_in()
            write_carry(total < 0 if subtract else total > 0xFFFFFFFF)
            write((total & i64(0xFFFFFFFF)).astype(u32))

        return run

    return build


def mad64_handler(kind: str) -> Handler:
    """v_mad_u64_u32 and v_mad_i64_i32, with the overflow mask."""
    narrow, wide = ("u32", u64) if kind == "u64" else ("i32", i64)

    def build(b: Builder) -> Run:
        b.expect(5)
        b.allow()
        x, y, c = as_getter(b.lane(2, narrow)), as_getter(b.lane(3, narrow)), as_getter(b.lane(4, kind))
        write, write_carry = b.lane_out(0, kind), b.mask_out(1)

        def run() -> None:
            product, addend = x().astype(wide) * y().astype(wide), c()
            total = product + addend
            overflow = total < product if kind == "u64" else ((product ^ total) & (addend ^ total)) < 0
            write_carry(overflow)
            write(np.asarray(total))

        return run

    return build


def _readfirstlane(b: Builder) -> Run:
    b.expect(2)
    b.allow()
    state, waves = b.state, np.arange(b.state.waves)
    value, write = b.lane(1, "u32"), b.scalar_out(0)
    if callable(value) or value.ndim < 2 or value.shape[1] == 1:
        get = as_getter(value)
        return lambda: write(np.broadcast_to(np.asarray(get()).reshape(-1), (state.waves,)))
    return lambda: write(value[:, 0] if state.full else value[waves, state.first_active_lane()])


def _readlane(b: Builder) -> Run:
    b.expect(3)
    b.allow()
    waves = np.arange(b.state.waves)
    value, lane, write = b.lane(1, "u32"), b.scalar(2), b.scalar_out(0)
    fixed = None if b.operands[2].is_register else int(lane()) & 63
    if fixed is not None:
        return lambda: write(value[:, fixed])
    return lambda: write(value[waves, lane() & u32(63)])


def _writelane(b: Builder) -> Run:
    b.expect(3)
    b.allow()
    state = b.state
    out = state.block(b.write(b.operands[0]), 1)[0]
    value, lane = b.scalar(1), b.scalar(2)
    waves = np.arange(state.waves)

    def run() -> None:
        index = np.broadcast_to(lane() & u32(63), (state.waves,))
        new = np.broadcast_to(value(), (state.waves,))
        group = state.group
        out[waves[group], index[group]] = new[group]

    return run


def mbcnt_handler(high: bool) -> Handler:
    """v_mbcnt_lo and _hi: bits of the mask below this lane, added to src1."""

    def build(b: Builder) -> Run:
        b.expect(3)
        b.allow()
        mask, base, write = as_getter(b.lane(1, "u32")), as_getter(b.lane(2, "u32")), b.lane_out(0, "u32")
        lane = np.arange(LANES, dtype=i64) - (32 if high else 0)
        below = ((1 << np.clip(lane, 0, 32)) - 1).astype(u32)
        ones = OPS["v_bcnt_u32_b32"].function
        return lambda: write(ones(mask() & below, base()))

    return build


def _bitop3(b: Builder) -> Run:
    b.expect(4)
    b.allow("bitop3")
    table = b.integer("bitop3")
    getters = [as_getter(b.lane(p, "u32")) for p in (1, 2, 3) if b.plain(b.operands[p])]
    write = b.lane_out(0, "u32")
    terms = [n for n in range(8) if table >> n & 1]

    def run() -> None:
        x = [g() for g in getters]
        out = u32(0)
        for n in terms:
            part = [v if n >> (2 - i) & 1 else ~v for i, v in enumerate(x)]
            out = out | (part[0] & part[1] & part[2])
        write(np.asarray(out))

    return run


def permlane_swap_handler(rows: int) -> Handler:
    """v_permlane16_swap, v_permlane32_swap: exchange odd groups of vdst with even groups of src0."""

    def build(b: Builder) -> Run:
        b.expect(2)
        b.allow("bound_ctrl")
        state = b.state
        for operand in b.operands:
            b.read(b.write(operand))
        vdst, src = (state.block(o, 1)[0].reshape(state.waves, LANES // rows // 2, 2, rows) for o in b.operands)

        def run() -> None:
            mask = state.mask.reshape(vdst.shape)
            upper, lower = vdst[:, :, 1].copy(), src[:, :, 0].copy()
            np.copyto(vdst[:, :, 1], lower, where=mask[:, :, 1])
            np.copyto(src[:, :, 0], upper, where=mask[:, :, 0])

        return run

    return build


def _swap(b: Builder) -> Run:
    b.expect(2)
    b.allow()
    state = b.state
    first, second = (state.block(b.read(b.write(o)), 1)[0] for o in b.operands)

    def run() -> None:
        old = first.copy()
        np.copyto(first, second, where=state.mask)
        np.copyto(second, old, where=state.mask)

    return run


def _div_scale(b: Builder) -> Run:
    """v_div_scale_f32: scale numerator or denominator so that the division steps neither overflow nor lose bits."""
    b.expect(5)
    b.allow()
    scaled, denominator, numerator = (as_getter(source(b, p, "f32")) for p in (2, 3, 4))
    write, write_mask, shape = b.lane_out(0, "f32"), b.mask_out(1), (b.state.waves, LANES)

    def run() -> None:
        s0, den, num = (np.broadcast_to(g(), shape) for g in (scaled, denominator, numerator))
        exponent = lambda x: ((x.view(u32) >> u32(23)) & u32(255)).astype(i32)
        denormal = lambda x: (x != 0) & (np.abs(x) < np.finfo(f32).tiny)
        den, num = np.ascontiguousarray(den), np.ascontiguousarray(num)
        inverse_tiny = np.abs(1.0 / den.astype(np.float64)) < np.finfo(f32).tiny
        ratio_tiny = denormal(num / den)
        far = exponent(num) - exponent(den) >= 96
        up, down, same = np.ldexp(s0, 64), np.ldexp(s0, -64), s0
        cases = [
            ((num == 0) | (den == 0), f32(np.nan), False),
            (far, np.where(s0 == den, up, same), True),
            (denormal(den), up, False),
            (inverse_tiny & ratio_tiny, np.where(s0 == den, down, same), True),
            (inverse_tiny, down, False),
            (ratio_tiny, np.where(s0 == num, up, same), True),
            (exponent(num) <= 23, up, False),
        ]
        conditions = [c for c, _, _ in cases]
        write_mask(np.select(conditions, [np.broadcast_to(np.bool_(f), shape) for _, _, f in cases], False))
        write(np.select(conditions, [np.broadcast_to(v, shape) for _, v, _ in cases], same).astype(f32))

    return run


def _div_fmas(b: Builder) -> Run:
    """v_div_fmas_f32: the scaling of v_div_scale undone. The CDNA pseudocode says 2^32 where its own v_div_scale scales by
    2^64; the rule here (2^64, or 2^-64 for small quotients) is RDNA's, and the one that divides right.
    """
    b.expect(4)
    b.allow()
    getters = [as_getter(source(b, p, "f32")) for p in (1, 2, 3)]
    write, state = b.lane_out(0, "f32"), b.state
    b.reads.update((512 + VCC, 513 + VCC))
    vcc = state.pair(VCC)

    def run() -> None:
        addend = np.asarray(getters[2]())
        value = fma(getters[0](), getters[1](), addend)
        scale = np.where(np.abs(addend) >= 2, f32(2.0**64), f32(2.0**-64))
        write(np.where(bits_to_lanes(vcc), value * scale, value).astype(f32))

    return run


def dot2_handler(kind: str, accumulates: bool) -> Handler:
    """v_dot2: two 16-bit products added to an f32."""

    def build(b: Builder) -> Run:
        b.expect(3 if accumulates else 4)
        b.allow("op_sel", "op_sel_hi")
        if any(b.bits("op_sel", 2, 0)) or not all(b.bits("op_sel_hi", 2, 1)):
            raise b.fail("dot2 with op_sel")
        parts = [as_getter(b.lane(p, kind, half)) for p in (1, 2) for half in (0, 1) if b.plain(b.operands[p])]
        addend = as_getter(source(b, 0 if accumulates else 3, "f32"))
        write = b.lane_out(0, "f32")
        return lambda: write(dot2(*[p() for p in parts], addend()))

    return build


def _nop(b: Builder) -> Run:
    return lambda: None


def handlers() -> dict[str, Handler]:
    """Opcode to handler for every vector ALU instruction."""
    table: dict[str, Handler] = {name: lane_handler(op) for name, op in OPS.items()}
    for condition in COMPARE:
        kinds = ("f16", "f32", "f64") if condition != "ne" else ()
        if condition not in FLOAT_ONLY:
            kinds += ("i16", "u16", "i32", "u32", "i64", "u64")
        for kind in kinds:
            table[f"v_cmp_{condition}_{kind}"] = compare_handler(condition, kind, False)
            table[f"v_cmpx_{condition}_{kind}"] = compare_handler(condition, kind, True)
    table |= {name: packed_f32_handler(n, f) for name, (n, f) in PACKED_F32.items()}
    table |= {name: packed_16_handler(k, n, f) for name, (k, n, f) in PACKED_16.items()}
    table |= {name: dot2_handler(*row) for name, row in DOT2.items()}
    for stem, subtract, reverse in (("add", False, False), ("sub", True, False), ("subrev", True, True)):
        table[f"v_{stem}_co_u32"] = carry_handler(subtract, reverse, False)
    for stem, subtract, reverse in (("addc", False, False), ("subb", True, False), ("subbrev", True, True)):
        table[f"v_{stem}_co_u32"] = carry_handler(subtract, reverse, True)
    table |= {
        "v_nop": _nop, "v_cndmask_b32": _cndmask, "v_cmp_class_f32": _compare_class, "v_pk_mov_b32": _packed_move,
        "v_fma_mix_f32": mix_handler("f32", None), "v_fma_mixlo_f16": mix_handler("f16", 0), "v_fma_mixhi_f16": mix_handler("f16", 1),
        "v_mad_u64_u32": mad64_handler("u64"), "v_mad_i64_i32": mad64_handler("i64"),
        "v_readfirstlane_b32": _readfirstlane, "v_readlane_b32": _readlane, "v_writelane_b32": _writelane,
        "v_mbcnt_lo_u32_b32": mbcnt_handler(False), "v_mbcnt_hi_u32_b32": mbcnt_handler(True), "v_bitop3_b32": _bitop3,
        "v_permlane16_swap_b32": permlane_swap_handler(16), "v_permlane32_swap_b32": permlane_swap_handler(32), "v_swap_b32": _swap,
        "v_div_scale_f32": _div_scale, "v_div_fmas_f32": _div_fmas,
    }  # fmt: skip
    return table
