"""Packed vector instructions: two words or two halves a lane, mixed precision, and small dot products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .isa import Builder, Handler, as_getter, lane_dtype
from .lane_ops import DOT2, PACKED_16, PACKED_F32, dot2, fma, pack
from .state import DTYPES, Getter, f32, u32
from .valu import adjust, flushed, signed, source

Run = Callable[[], "int | None"]


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
            results.append(
                [as_getter(signed(b, s, bool(flip[p]), absolute=False, kind=kind)) for p, s in enumerate(sources)]
            )
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
        getters = [
            as_getter(source(b, p + 1, "f16" if narrow[p] else "f32", select[p] if narrow[p] else 0)) for p in range(3)
        ]
        post = adjust(b, result)
        write = b.state.lane_writer(b.write(b.operands[0]), result, half)
        dtype = lane_dtype(result)

        def run() -> None:
            value = fma(*[g().astype(f32) for g in getters]).astype(dtype)
            write(post(value) if post else value)

        return run

    return build


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


def handlers() -> dict[str, Handler]:
    """Opcode to handler for packed and mixed arithmetic."""
    table: dict[str, Handler] = {name: packed_f32_handler(n, f) for name, (n, f) in PACKED_F32.items()}
    table |= {name: packed_16_handler(k, n, f) for name, (k, n, f) in PACKED_16.items()}
    table |= {name: dot2_handler(*row) for name, row in DOT2.items()}
    return table | {
        "v_pk_mov_b32": _packed_move,
        "v_fma_mix_f32": mix_handler("f32", None),
        "v_fma_mixlo_f16": mix_handler("f16", 0),
        "v_fma_mixhi_f16": mix_handler("f16", 1),
    }
