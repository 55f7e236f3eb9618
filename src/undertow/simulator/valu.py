"""Vector ALU instructions: operand modifiers, DPP and SDWA around the functions of `lane_ops`, and the odd ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .isa import Builder, Handler, as_getter, lane_dtype
from .lane_ops import COMPARE, FLOAT_ONLY, OPS, LaneOp
from .state import DTYPES, LANES, WIDTH, Getter, f32, flush_denormals, i32, u16, u32

FLOATS = ("f16", "f32", "f64", "bf16")
SDWA_SELECT = (
    {"DWORD": (0, 32)} | {f"WORD_{n}": (16 * n, 16) for n in (0, 1)} | {f"BYTE_{n}": (8 * n, 8) for n in range(4)}
)
DPP_MODIFIERS = (
    "quad_perm",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_newbcast",
    "row_bcast",
    "wave_shl",
    "wave_shr",
    "wave_rol",
    "wave_ror",
    "row_mirror",
    "row_half_mirror",
    "row_mask",
    "bank_mask",
    "bound_ctrl",
)
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
            steps.append(partial(np.multiply, lane_dtype(kind)(factor)))
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
    limits = {
        "row_bcast": (15, 31),
        "row_newbcast": range(16),
        "row_ror": range(1, 16),
        "row_shl": range(1, 16),
        "row_shr": range(1, 16),
    }
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
    typed = (lambda: select().astype(u16).view(dtype)) if dtype().itemsize == 2 else (lambda: select().view(dtype))
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
            [
                np.where(bits & u32(0x00400000), 1, 0),
                np.where(negative, 2, 9),
                np.where(negative, 3, 8),
                np.where(negative, 4, 7),
            ],
            np.where(negative, 5, 6),
        ).astype(u32)
        write((wanted >> kind) & u32(1) != 0)

    return run


def _nop(b: Builder) -> Run:
    return lambda: None


def handlers() -> dict[str, Handler]:
    """Opcode to handler for lane-wise arithmetic, moves and comparisons."""
    table: dict[str, Handler] = {name: lane_handler(op) for name, op in OPS.items()}
    for condition in COMPARE:
        kinds = ("f16", "f32", "f64") if condition != "ne" else ()
        if condition not in FLOAT_ONLY:
            kinds += ("i16", "u16", "i32", "u32", "i64", "u64")
        for kind in kinds:
            table[f"v_cmp_{condition}_{kind}"] = compare_handler(condition, kind, writes_exec=False)
            table[f"v_cmpx_{condition}_{kind}"] = compare_handler(condition, kind, writes_exec=True)
    return table | {"v_nop": _nop, "v_cmp_class_f32": _compare_class}
