"""Private memory of a lane (scratch) and loads of one value a wave (scalar memory)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .isa import Builder, Handler, as_getter
from .memory import LOADS, STORES, Element, narrow_source, place_narrow
from .state import LANES, i64, u32
from .vector_memory import CACHE, issue

Run = Callable[[], "int | None"]


# ---------------------------------------------------------------------- scratch
def scratch_handler(element: Element, is_load: bool) -> Handler:
    """Private memory: one slot of `private_segment_fixed_size` bytes a lane."""

    def build(b: Builder) -> Run:
        b.expect(3)
        b.allow("offset", *CACHE)
        if element.nbytes < 4:
            return _narrow_scratch(b, element, is_load)
        data, vaddr, saddr = (b.operands[p] for p in ((0, 1, 2) if is_load else (1, 0, 2)))
        state, machine, offset = b.state, b.machine, b.integer("offset")
        block = state.block((b.write if is_load else b.read)(data, element.registers), element.registers)
        done = issue(b, "vmcnt", frozenset(b.numbers(data, element.registers)) if is_load else frozenset())
        locate = _scratch_address(b, vaddr, saddr, offset)
        memory, written, x = machine.scratch, machine.scratch_written, b.instruction
        fixed = vaddr.kind == "off" and saddr.kind == "off"
        waves = np.arange(state.waves)[:, None]
        lanes = np.arange(LANES)[None]

        def run() -> None:
            where = locate()
            machine.traffic[x.index] += int(np.count_nonzero(state.mask)) * element.nbytes
            executing = where[state.mask]
            if executing.size == 0:
                done()
                return
            if executing.min() < 0 or executing.max() + element.nbytes > memory.shape[0] * 4 or (executing & 3).any():
                raise machine.error(
                    x, f"scratch address {int(executing.min())}..{int(executing.max())} of {memory.shape[0] * 4} bytes"
                )
            for j, register in enumerate(block):
                index = (int(executing[0]) // 4 + j,) if fixed else (where // 4 + j, waves, lanes)
                if is_load:
                    if machine.checks and not written[index][state.mask].all():
                        machine.report.add(
                            "scratch-uninitialised", x, state.group, "private memory is read before anything wrote it"
                        )
                    np.copyto(register, memory[index], where=state.mask)
                elif fixed:
                    np.copyto(memory[index[0]], register, where=state.mask)
                    written[index[0]] |= state.mask
                else:
                    active = tuple(np.broadcast_to(i, state.mask.shape)[state.mask] for i in index)
                    memory[active] = register[state.mask]
                    written[active] = True
            done()

        return run

    return build


def _scratch_address(b: Builder, vaddr: object, saddr: object, offset: int) -> Callable[[], np.ndarray]:
    state = b.state
    shape = (state.waves, LANES)
    parts: list[Callable[[], np.ndarray]] = []
    if vaddr.kind != "off":
        register = state.block(b.read(vaddr), 1)[0]
        parts.append(lambda: register.astype(i64))
    if saddr.kind != "off":
        scalar = as_getter(state.scalar(b.read(saddr)))
        parts.append(lambda: np.broadcast_to(scalar(), (state.waves,)).astype(i64)[:, None])
    return lambda: np.broadcast_to(sum((p() for p in parts), np.full((1, 1), offset, i64)), shape)


def _narrow_scratch(b: Builder, element: Element, is_load: bool) -> Run:
    data, vaddr, saddr = (b.operands[p] for p in ((0, 1, 2) if is_load else (1, 0, 2)))
    state, machine = b.state, b.machine
    register = state.block((b.write if is_load else b.read)(data), 1)[0]
    if is_load:
        b.read(data)
    done = issue(b, "vmcnt", frozenset(b.numbers(data, 1)) if is_load else frozenset())
    locate = _scratch_address(b, vaddr, saddr, b.integer("offset"))
    kind = np.uint8 if element.nbytes == 1 else np.uint16
    per_word = 4 // element.nbytes
    memory = machine.scratch.view(kind).reshape(*machine.scratch.shape, per_word)
    x = b.instruction

    def run() -> None:
        where = locate()
        waves, lanes = np.nonzero(state.mask)
        byte = where[state.mask]
        if byte.size and (
            byte.min() < 0 or byte.max() + element.nbytes > memory.shape[0] * 4 or (byte & (element.nbytes - 1)).any()
        ):
            raise machine.error(x, "scratch address out of bounds or misaligned")
        index = (byte // 4, waves, lanes, (byte % 4) // element.nbytes)
        if is_load:
            register[state.mask] = place_narrow(element, memory[index], register[state.mask])
        else:
            memory[index] = narrow_source(element, register[state.mask])
            machine.scratch_written[index[:3]] = True
        machine.traffic[x.index] += byte.size * element.nbytes
        done()

    return run


def scalar_load_handler(count: int, through_buffer: bool) -> Handler:
    """s_load and s_buffer_load: one address a wave."""

    def build(b: Builder) -> Run:
        b.allow("offset", "glc")
        state, machine = b.state, b.machine
        registers = frozenset(b.numbers(b.operands[0], count))
        b.write(b.operands[0], count)
        first = b.operands[0].index
        if b.operands[0].kind != "s" or first + count > 128:
            raise b.fail("scalar load destination")
        start, records = _scalar_base(b, through_buffer)
        offset = _scalar_offset(b)
        done = issue(b, "lgkmcnt", registers, scalar=True)
        arena, report, x = machine.arena, machine.report, b.instruction
        target, words = state.s[:, first : first + count], np.arange(count)

        def run() -> None:
            group = state.group
            inner = np.broadcast_to(offset(), (state.waves,))[group]
            addresses = (start()[group] + inner) & ~3
            where, valid, _ = arena.locate(addresses, 4 * count)
            value = arena.words[(where >> 2)[:, None] + words]
            if valid is not None:
                wave, address = int(np.flatnonzero(group)[np.flatnonzero(~valid)[0]]), int(addresses[~valid][0])
                text = f"scalar load out of bounds: {arena.describe(address)}"
                report.add_at("global-bounds", x, wave, address=address, text=text, key="bounds")
                value[~valid] = 0
            if records is not None:
                value[inner[:, None] + 4 * words + 4 > records[group].astype(i64)[:, None]] = 0
            target[group] = value
            machine.traffic[x.index] += int(group.sum()) * 4 * count
            done()

        return run

    return build


def _scalar_base(b: Builder, through_buffer: bool) -> tuple[Callable[[], np.ndarray], np.ndarray | None]:
    """The base address of each wave, and the num_records of its descriptor when there is one."""
    base, state = b.operands[1], b.state
    if not through_buffer:
        pair = state.pair(b.read(base, 2).index).view(i64)
        return lambda: pair, None
    b.read(base, 4)
    low, high, records = (state.s[:, base.index + j] for j in range(3))
    return lambda: low.astype(i64) | ((high & u32(0xFFFF)).astype(i64) << 32), records


def _scalar_offset(b: Builder) -> Callable[[], np.ndarray]:
    immediate = b.integer("offset")
    if len(b.operands) > 2 and b.operands[2].kind == "int":
        total = np.array(immediate + int(b.operands[2].value), i64)
        return lambda: total
    register = b.scalar(2) if len(b.operands) > 2 else None
    return lambda: (register().astype(i64) if register else np.array(0, i64)) + immediate


def handlers() -> dict[str, Handler]:
    """Opcode to handler for scratch and scalar loads."""
    table: dict[str, Handler] = {}
    table |= {f"scratch_load_{name}": scratch_handler(row, is_load=True) for name, row in LOADS.items()}
    table |= {f"scratch_store_{name}": scratch_handler(row, is_load=False) for name, row in STORES.items()}
    for count in (1, 2, 4, 8, 16):
        suffix = "" if count == 1 else f"x{count}"
        table[f"s_load_dword{suffix}"] = scalar_load_handler(count, through_buffer=False)
        table[f"s_buffer_load_dword{suffix}"] = scalar_load_handler(count, through_buffer=True)
    return table
