"""Program control: branches, barriers, waits, mode registers, and what has no effect on results."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .asm import VCC, Operand
from .isa import BARRIER, BRANCH, END, PAUSE, Builder, Handler
from .state import u32, u64

Run = Callable[[], "int | None"]

IGNORED = (
    "s_nop",
    "s_setprio",
    "s_sethalt",
    "s_icache_inv",
    "s_dcache_inv",
    "s_dcache_wb",
    "s_inst_prefetch",
    "s_ttracedata",
    "s_incperflevel",
    "s_decperflevel",
    "s_code_end",
    "buffer_wbl2",
    "buffer_inv",
    "buffer_wbinvl1",
    "buffer_wbinvl1_vol",
)


MODE_DENORM32 = (4, 2)  # offset and width of the f32 denormal field of HW_REG_MODE


# ---------------------------------------------------------------------- control
def branch_handler(condition: str | None) -> Handler:
    """Branches leave who jumps in machine.taken: True, False, or bool [waves]."""

    def build(b: Builder) -> Run:
        b.allow()
        machine, state = b.machine, b.state
        if condition is None:

            def always() -> int:
                machine.taken = True
                return BRANCH

            return always
        vcc = state.pair(VCC)
        if "vcc" in condition:
            b.reads.update((512 + VCC, 513 + VCC))
        tests = {
            "scc0": lambda: ~state.scc,
            "scc1": lambda: state.scc,
            "vccz": lambda: vcc == 0,
            "vccnz": lambda: vcc != 0,
            "execz": lambda: state.exec == 0,
            "execnz": lambda: state.exec != 0,
        }
        test = tests[condition]

        def conditional() -> int:
            machine.taken = test()
            return BRANCH

        return conditional

    return build


def _returns(code: int) -> Handler:
    return lambda b: lambda: code


def _ignored(b: Builder) -> Run:
    return lambda: None


def _waitcnt(b: Builder) -> Run:
    b.allow("vmcnt", "lgkmcnt", "expcnt")
    counters = {k: b.integer(k) for k in ("vmcnt", "lgkmcnt") if k in b.modifiers}
    checks = b.machine.checks
    if checks is None or not counters:
        return lambda: None
    return lambda: checks.waits.retire(counters)


def _hardware_register(b: Builder, operand: Operand) -> tuple[str, int, int]:
    match = re.match(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\)$", str(operand.value))
    if not match:
        raise b.fail(f"hardware register {operand.value!r}")
    name, offset, width = match.groups()
    return name, int(offset or 0), int(width or 32)


def _setreg(b: Builder) -> Run:
    b.expect(2)
    state = b.state
    name, offset, width = _hardware_register(b, b.operands[0])
    value = b.scalar(1)
    if name != "HW_REG_MODE" or (offset, width) != MODE_DENORM32:
        raise b.fail("only the f32 denormal field of HW_REG_MODE can be set")

    def run() -> None:
        field_value = np.broadcast_to(value() & u32(3), (state.waves,))
        if not np.isin(field_value[state.group], (0, 3)).all():
            raise b.fail("denormal modes that flush only one side")
        np.copyto(state.flush32, field_value == 0, where=state.group)

    return run


def _getreg(b: Builder) -> Run:
    b.expect(2)
    name, offset, width = _hardware_register(b, b.operands[1])
    state, write = b.state, b.scalar_out(0)
    if name != "HW_REG_MODE" or (offset, width) != MODE_DENORM32:
        raise b.fail(f"hardware register {name} is not modelled")
    return lambda: write(np.where(state.flush32, u32(0), u32(3)))


def _clock(b: Builder) -> Run:
    b.expect(1)
    machine, write = b.machine, b.scalar_out(0, 2)
    return lambda: write(np.array(machine.steps, u64))


def handlers() -> dict[str, Handler]:
    """Opcode to handler for program control."""
    table: dict[str, Handler] = {
        f"s_cbranch_{c}": branch_handler(c) for c in ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz")
    }
    table |= dict.fromkeys(IGNORED, _ignored)
    return table | {
        "s_branch": branch_handler(None),
        "s_barrier": _returns(BARRIER),
        "s_endpgm": _returns(END),
        "s_sleep": _returns(PAUSE),
        "s_waitcnt": _waitcnt,
        "s_setreg_b32": _setreg,
        "s_setreg_imm32_b32": _setreg,
        "s_getreg_b32": _getreg,
        "s_memtime": _clock,
        "s_memrealtime": _clock,
    }
