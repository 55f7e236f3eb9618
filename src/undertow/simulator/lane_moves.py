"""Vector instructions that work on lane masks, on single lanes, between lanes, or in the steps of a division."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import VCC
from .isa import Builder, Handler, as_getter
from .lane_ops import OPS, fma
from .state import LANES, bits_to_lanes, f32, i32, i64, u32, u64
from .valu import SDWA_MODIFIERS, sdwa_source, sdwa_writer, source

Run = Callable[[], "int | None"]


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
        write_mask(np.select(conditions, [np.broadcast_to(np.bool_(f), shape) for _, _, f in cases], default=False))
        write(np.select(conditions, [np.broadcast_to(v, shape) for _, v, _ in cases], same).astype(f32))

    return run


def _div_fmas(b: Builder) -> Run:
    """v_div_fmas_f32: the scaling of v_div_scale undone.

    The CDNA pseudocode says 2^32 where its own v_div_scale scales by
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


def handlers() -> dict[str, Handler]:
    """Opcode to handler for masks, carries, lane moves and division steps."""
    table: dict[str, Handler] = {}
    for stem, carrying, subtract, reverse in (
        ("add", "addc", 0, 0),
        ("sub", "subb", 1, 0),
        ("subrev", "subbrev", 1, 1),
    ):
        table[f"v_{stem}_co_u32"] = carry_handler(bool(subtract), bool(reverse), with_carry=False)
        table[f"v_{carrying}_co_u32"] = carry_handler(bool(subtract), bool(reverse), with_carry=True)
    return table | {
        "v_cndmask_b32": _cndmask,
        "v_mad_u64_u32": mad64_handler("u64"),
        "v_mad_i64_i32": mad64_handler("i64"),
        "v_readfirstlane_b32": _readfirstlane,
        "v_readlane_b32": _readlane,
        "v_writelane_b32": _writelane,
        "v_mbcnt_lo_u32_b32": mbcnt_handler(high=False),
        "v_mbcnt_hi_u32_b32": mbcnt_handler(high=True),
        "v_bitop3_b32": _bitop3,
        "v_permlane16_swap_b32": permlane_swap_handler(16),
        "v_permlane32_swap_b32": permlane_swap_handler(32),
        "v_swap_b32": _swap,
        "v_div_scale_f32": _div_scale,
        "v_div_fmas_f32": _div_fmas,
    }
