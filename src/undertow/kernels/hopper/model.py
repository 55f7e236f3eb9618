"""What a step of the Hopper kernels should take by the walls of the chip: clocks of one SM, the standard library only.

A step is one query tile against one key tile. The walls were measured on one H200 on 2026-11-29: an m64nNk16 product of
16-bit operands takes N / 2 clocks or as long as its operands in shared memory take at 128 B a clock; the special
function units give 16 exponentials a clock, the schedulers issue 128 lanes a clock; and fp32 sums reach memory at
3.8 TB/s from all SMs together while what is summed stays in the L2 cache, at 2.1 TB/s when it does not.

The model knows no latency, no barrier, no mask and no epilogue: what is measured beyond it is theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from .geometry import Geometry, launches

WARPGROUPS = 2
SHARED_RATE, EXP2_RATE, ISSUE_RATE = 128, 16, 128
IN_L2, BEYOND_L2 = 3.8e12, 2.1e12
L2_BYTES = 50 << 20
P_SLOTS, DS_SLOTS = 2.5, 3.5
"""Issue slots a score takes on its way to P (FMA, exp2, half a conversion) and to dS."""
ITEM = 2


class Cost(NamedTuple):
    """Clocks of the unit itself, and bytes it moves through shared memory."""

    clocks: float
    nbytes: float

    @property
    def alone(self) -> float:
        """Clocks when nothing runs beside it."""
        return max(self.clocks, self.nbytes / SHARED_RATE)


def product(n: int, k: int, *, registers: bool = False) -> Cost:
    """Both warpgroups' products of 64 rows by n over k; A comes from `registers` or from shared memory."""
    blocks = WARPGROUPS * k / 16
    nbytes = (0 if registers else 64 * 16 * ITEM) + n * 16 * ITEM
    return Cost(blocks * max(n / 2, nbytes / SHARED_RATE), blocks * nbytes)


def exponentials(elements: int) -> Cost:
    """exp2 of the scores: by the special function unit, or by what issues the instructions around it."""
    return Cost(max(elements / EXP2_RATE, elements * P_SLOTS / ISSUE_RATE), 0)


def reduction(nbytes: int, live: int, ghz: float, sms: int) -> float:
    """Clocks that adding nbytes takes when every SM does, `live` bytes being summed at a time."""
    return nbytes * sms / (IN_L2 if live <= L2_BYTES else BEYOND_L2) * ghz * 1e9


def beside(tensor: Cost, *others: Cost) -> Cost:
    """The tensor cores beside other units that follow one another; all share the shared memory."""
    nbytes = tensor.nbytes + sum(o.nbytes for o in others)
    return Cost(max(tensor.clocks, sum(o.alone for o in others), nbytes / SHARED_RATE), nbytes)


def clocks(geometry: Geometry, *, live: int = 0, ghz: float = 1.75, sms: int = 132) -> dict[str, float]:
    """Clocks of one step of the plan by phase, and of what bounds it: "step" is the largest of the bounds.

    "scores" is S and the exponentials, "gradients" dP, dV and dS, "dq" dQ and its way out, which `late` moves beside S;
    "phases" their sum. "shared" is all traffic of shared memory, the copies in and out included, "tensor" all products,
    "reduction" the sums of dQ in global memory while `live` bytes of it are in flight. A plan of several kernels is the
    sum of its steps.
    """
    plans = [_main(g, live, ghz, sms) if kind == "main" else _dq(g) for kind, g in launches(geometry)]
    return {name: sum(plan.get(name, 0.0) for plan in plans) for name in plans[0]}


def _main(g: Geometry, live: int, ghz: float, sms: int) -> dict[str, float]:
    elements, qk, v = g.tile_q * g.tile_kv, g.d_qk, g.d_v
    s, dp = product(g.tile_q, qk), product(g.tile_q, v) if g.dk else Cost(0, 0)
    dv = product(v, g.tile_q, registers=True) if g.dv else Cost(0, 0)
    dk = product(qk, g.tile_q, registers=not g.dq) if g.dk else Cost(0, 0)
    p = exponentials(elements)
    last = dk if g.dk else dv  # what the exponentials run beside
    out = Cost(0, 4 * g.tile_q * qk if g.dq else 0)
    ds = Cost(elements * DS_SLOTS / ISSUE_RATE if g.dk else 0, 0)
    share = Cost(0, elements * ITEM if g.dq else 0)
    parts = {
        "scores": (beside(s, out) if g.late else s, beside(last, p)),
        "gradients": (dp, beside(dv, ds, share)) if g.dk else (),
        "dq": (),
    }
    tensor = s.clocks + dp.clocks + dv.clocks + dk.clocks
    if g.dq:
        dq = product(g.dq_columns, g.tile_kv)
        parts["dq"] = (dq,) if g.late else (dq, out)
        tensor += dq.clocks
    phases = {name: sum(c.alone for c in costs) for name, costs in parts.items()}
    copies = ITEM * g.tile_q * (qk + v) + (4 * g.tile_q * qk if g.dq else 0)
    shared = (sum(c.nbytes for costs in parts.values() for c in costs) + copies) / SHARED_RATE
    reduced = reduction(4 * g.tile_q * qk, live, ghz, sms) if g.dq else 0.0
    total = sum(phases.values())
    bounds = {"phases": total, "shared": shared, "tensor": tensor, "reduction": reduced}
    return phases | bounds | {"step": max(bounds.values())}


def _dq(g: Geometry) -> dict[str, float]:
    """dQ alone, for as many pairs as a step of the main kernel has; its warpgroups run free of one another."""
    elements = g.tile_q * g.tile_kv
    tiles = elements / (64 * WARPGROUPS * 64)  # of 64 keys for both warpgroups' 64 query rows
    products = (product(64, g.d_qk), product(64, g.d_v), product(g.d_qk, 64, registers=True))
    copies = ITEM * 64 * (g.d_qk + g.d_v)
    bounds = {
        "phases": exponentials(elements).alone + elements * DS_SLOTS / ISSUE_RATE,
        "shared": (sum(p.nbytes for p in products) + copies) * tiles / SHARED_RATE,
        "tensor": sum(p.clocks for p in products) * tiles,
    }
    return {"dq": max(bounds.values())} | bounds | {"step": max(bounds.values())}
