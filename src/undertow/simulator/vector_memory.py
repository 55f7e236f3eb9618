"""Global, flat and buffer memory instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .asm import M0
from .isa import Builder, Handler, as_getter
from .memory import (
    ATOMICS,
    LOADS,
    STORES,
    Atomic,
    Element,
    apply_atomic,
    join_words,
    narrow_source,
    place_narrow,
    split_words,
)
from .state import LANES, i64, u32

Run = Callable[[], "int | None"]
Address = Callable[[], "tuple[np.ndarray, np.ndarray | None]"]  # addresses [waves, lanes], lanes in bounds or None

CACHE = ("sc0", "sc1", "nt", "glc", "slc")


# ---------------------------------------------------------------------- addresses
def global_address(b: Builder, vaddr: int, saddr: int) -> Address:
    """64-bit vector address, or 32-bit vector offset on a scalar base; signed immediate offset."""
    offset = b.integer("offset")
    shape = (b.state.waves, LANES)
    if saddr < len(b.operands) and b.operands[saddr].kind != "off":
        base, index = b.scalar(saddr, "i64"), as_getter(b.lane(vaddr, "u32"))
        return lambda: (np.broadcast_to(index().astype(i64) + base()[:, None] + offset, shape), None)
    wide = as_getter(b.lane(vaddr, "i64"))
    return lambda: (np.broadcast_to(wide() + i64(offset), shape), None)


def buffer_address(b: Builder, vaddr: int, nbytes: int) -> Address:
    """Address through a buffer descriptor (V#), with the bounds that its num_records field sets."""
    state, offset = b.state, b.integer("offset")
    offen, idxen = "offen" in b.modifiers, "idxen" in b.modifiers
    vector, descriptor = b.operands[vaddr], b.operands[vaddr + 1]
    if descriptor.kind != "s" or descriptor.count != 4 or (vector.kind == "off") == (offen or idxen):
        raise b.fail("buffer operands")
    b.read(descriptor, 4)
    words = [state.s[:, descriptor.index + j] for j in range(4)]
    scalar_offset = b.scalar(vaddr + 2)
    registers = state.block(b.read(vector, offen + idxen), offen + idxen) if offen or idxen else None
    shape = (state.waves, LANES)

    def address() -> tuple[np.ndarray, np.ndarray | None]:
        group = state.group
        if ((words[1] >> u32(31)) & u32(1))[group].any() or ((words[3] >> u32(23)) & u32(1))[group].any():
            raise b.fail("swizzled or thread-id buffers are not modelled")
        base = words[0].astype(i64) | ((words[1] & u32(0xFFFF)).astype(i64) << 32)
        stride = ((words[1] >> u32(16)) & u32(0x3FFF)).astype(i64)
        records = words[2].astype(i64)[:, None]
        start = (base + scalar_offset())[:, None]
        inner = registers[-1].astype(i64) + offset if offen else np.full((1, 1), offset, i64)
        raw_limit = records - np.broadcast_to(scalar_offset(), (state.waves,)).astype(i64)[:, None]
        if not idxen:
            inside = inner + nbytes <= raw_limit
            return np.broadcast_to(start + inner, shape), np.broadcast_to(inside, shape)
        index = registers[0].astype(i64)
        inside = np.where((stride != 0)[:, None], index < records, inner + nbytes <= raw_limit)
        return np.broadcast_to(start + index * stride[:, None] + inner, shape), np.broadcast_to(inside, shape)

    return address


# ---------------------------------------------------------------------- who accesses what
class Access:
    """Finds the arena bytes of one instruction's accesses and reports those that are wrong."""

    def __init__(self, b: Builder, address: Address, nbytes: int, what: str) -> None:
        self.b, self.address, self.nbytes, self.what = b, address, nbytes, what
        self.x, self.machine, self.state = b.instruction, b.machine, b.state
        self.arena, self.report = b.machine.arena, b.machine.report
        self.align = min(nbytes, 4)

    def lanes(self) -> tuple[np.ndarray | None, np.ndarray]:
        """Mask of lanes that access memory (None for all) and their arena offsets, [waves, lanes] or [active]."""
        addresses, inside = self.address()
        state = self.state
        active = None if state.full else state.mask
        if inside is not None and not inside.all():
            active = inside if active is None else inside & active
        chosen = addresses if active is None else addresses[active]
        if chosen.size == 0:
            return active, chosen
        offsets, valid, number = self.arena.locate(chosen, self.nbytes)
        if valid is not None:
            active = state.mask if active is None else active
            self._report_bounds(active, chosen.reshape(-1), valid.reshape(-1))
            lanes = np.zeros_like(active)
            lanes[active] = valid.reshape(-1)
            active, offsets = lanes, offsets.reshape(-1)[valid.reshape(-1)]
        if self.align > 1 and int(np.bitwise_or.reduce(offsets, axis=None)) & (self.align - 1):
            self._report_alignment(active, offsets)
        self._count(offsets, number)
        return active, offsets

    def _report_bounds(self, active: np.ndarray, addresses: np.ndarray, valid: np.ndarray) -> None:
        place = int(np.flatnonzero(~valid)[0])
        wave, lane = (int(v[place]) for v in np.nonzero(active))
        address = int(addresses[place])
        text = f"{self.what} of {self.nbytes} bytes out of bounds: {self.arena.describe(address)}"
        self.report.add_at(
            "global-bounds",
            self.x,
            wave,
            lane=lane,
            address=address,
            text=text,
            count=int((~valid).sum()),
            key="bounds",
        )

    def _report_alignment(self, active: np.ndarray | None, offsets: np.ndarray) -> None:
        flat = offsets.reshape(-1)
        place = int(np.flatnonzero(flat & (self.align - 1))[0])
        wave, lane = divmod(place, LANES) if active is None else (int(v[place]) for v in np.nonzero(active))
        text = f"{self.what} of {self.nbytes} bytes is not aligned to {self.align} (arena offset {int(flat[place]):#x})"
        self.report.add_at(
            "misaligned",
            self.x,
            wave,
            lane=lane,
            text=text,
            count=int(np.count_nonzero(flat & (self.align - 1))),
            key="align",
        )

    def _count(self, offsets: np.ndarray, number: int) -> None:
        moved = offsets.size * self.nbytes
        self.machine.traffic[self.x.index] += moved
        if number >= 0:
            buffer = self.arena.buffers[number]
            if self.what == "load":
                buffer.loaded += moved
            else:
                buffer.stored += moved

    def written(self, active: np.ndarray | None, offsets: np.ndarray, mark: bool) -> None:
        """Note a store, or complain about reading what nothing wrote, in buffers declared as outputs."""
        arena = self.arena
        if not arena.tracked or offsets.size == 0:
            return
        halves = (offsets.reshape(-1)[:, None] >> 1) + np.arange(max(1, self.nbytes // 2))
        if mark:
            arena.written[halves] = True
        elif not arena.written[halves].all():
            place = int(np.flatnonzero(~arena.written[halves].all(1))[0])
            wave, lane = divmod(place, LANES) if active is None else (int(v[place]) for v in np.nonzero(active))
            self.report.add_at(
                "global-uninitialised",
                self.x,
                wave,
                lane=lane,
                text=f"{self.what} of an output before anything wrote it",
                key="uninit",
            )

    def zeroed(self, active: np.ndarray | None) -> np.ndarray | None:
        """Executing lanes whose access was out of bounds: a load gives them 0."""
        return None if active is None else self.state.mask & ~active


def issue(b: Builder, counter: str, registers: frozenset[int], scalar: bool = False) -> Run:
    """What tells the checks that a memory operation went out."""
    checks = b.machine.checks
    if checks is None:
        return lambda: None
    waits, x = checks.waits, b.instruction
    return lambda: waits.issue(x, counter, registers, scalar)


def _issued(b: Builder, registers: frozenset[int]) -> Run:
    first = issue(b, "vmcnt", registers)
    if not b.instruction.opcode.startswith("flat_"):
        return first
    second = issue(b, "lgkmcnt", frozenset())

    def both() -> None:
        first()
        second()

    return both


# ---------------------------------------------------------------------- loads, stores, atomics
def load(b: Builder, element: Element, address: Address) -> Run:
    """Memory to vector registers."""
    data = b.operands[0]
    registers = frozenset(b.numbers(data, element.registers))
    block = b.state.block(b.write(data, element.registers), element.registers)
    if element.half is not None:
        b.read(data)
    access, done = Access(b, address, element.nbytes, "load"), _issued(b, registers)
    arena = b.machine.arena
    narrow = element.nbytes < 4
    memory = (arena.octets if element.nbytes == 1 else arena.halves) if narrow else arena.words
    shift = {1: 0, 2: 1}.get(element.nbytes, 2)

    def run() -> None:
        active, offsets = access.lanes()
        zero = access.zeroed(active)
        index = offsets >> shift
        access.written(active, offsets, mark=False)
        for j, register in enumerate(block):
            if narrow:
                old = register if active is None else register[active]
                value = place_narrow(element, memory[index], old)
                blank = place_narrow(element, memory[:1] * 0, register)
            else:
                value, blank = memory[index + j], u32(0)
            if active is None:
                register[...] = value
                continue
            np.copyto(register, blank, where=zero)
            register[active] = value
        done()

    return run


def store(b: Builder, element: Element, address: Address, data: int) -> Run:
    """Vector registers to memory. Lanes store in a random order when the machine has a seed."""
    block = b.state.block(b.read(b.operands[data], element.registers), element.registers)
    access, done, machine = Access(b, address, element.nbytes, "store"), _issued(b, frozenset()), b.machine
    arena = machine.arena
    narrow = element.nbytes < 4
    memory = (arena.octets if element.nbytes == 1 else arena.halves) if narrow else arena.words
    shift = {1: 0, 2: 1}.get(element.nbytes, 2)

    def run() -> None:
        active, offsets = access.lanes()
        index = (offsets >> shift).reshape(-1)
        order = machine.lane_order(index.size)
        if order is not None:
            index = index[order]
        for j, register in enumerate(block):
            value = register.reshape(-1) if active is None else register[active]
            value = narrow_source(element, value) if narrow else value
            memory[index + j] = value if order is None else value[order]
        access.written(active, offsets, mark=True)
        done()

    return run


def atomic(b: Builder, row: Atomic, address: Address, data: int, out: int | None) -> Run:
    """Read-modify-write; the old value goes to operand `out` when there is one."""
    words = np.dtype(row.dtype).itemsize // 4
    block = b.state.block(b.read(b.operands[data], words * row.operands), words * row.operands)
    registers: frozenset[int] = frozenset()
    target = None
    if out is not None:
        operand = b.operands[out]
        if out == data:  # buffer atomics return into the first half of their data
            operand = replace(operand, count=words)
        registers = frozenset(b.numbers(operand, words))
        target = b.state.block(b.write(operand, words), words)
    access, done, machine = Access(b, address, words * 4, "atomic"), _issued(b, registers), b.machine
    memory = machine.arena.octets.view(row.dtype)
    shift = 2 if words == 1 else 3

    def run() -> None:
        active, offsets = access.lanes()
        index = (offsets >> shift).reshape(-1)
        access.written(active, offsets, mark=False)
        flat = block.reshape(block.shape[0], -1) if active is None else block[:, active]
        operands = [join_words(flat[k * words : (k + 1) * words], row.dtype) for k in range(row.operands)]
        order = machine.lane_order(index.size)
        if order is None:
            old = apply_atomic(row, memory, index, operands, target is not None)
        else:
            old = apply_atomic(row, memory, index[order], [o[order] for o in operands], target is not None)
            if old is not None:
                old[order] = old.copy()
        if target is not None:
            values = split_words(old)
            for j in range(words):
                if active is None:
                    target[j] = values[j].reshape(target[j].shape)
                else:
                    target[j][active] = values[j]
        done()

    return run


def load_to_lds(b: Builder, element: Element, address: Address) -> Run:
    """Memory straight to LDS: lane l goes to M0 + offset + l * size."""
    machine, state = b.machine, b.state
    b.reads.add(512 + M0)
    access, done = Access(b, address, element.nbytes, "load"), _issued(b, frozenset())
    words, count = machine.arena.words, element.registers
    m0, offset = state.s[:, M0], b.integer("offset")
    mask = u32(0xFFFF if machine.lds_limit <= 1 << 16 else 0x3FFFF)
    spread = np.arange(LANES, dtype=i64) * element.nbytes
    local = machine.lds

    def run() -> None:
        active, offsets = access.lanes()
        zero = access.zeroed(active)
        target = (m0 & mask).astype(i64)[:, None] + offset + spread
        inside = local.inside(b.instruction, target, element.nbytes, state.mask, "load to LDS")
        lanes = state.mask & inside
        local.shadow_write(b.instruction, target, element.nbytes, lanes, load=True)
        index = (target + local.base) >> 2
        value = np.zeros((state.waves, LANES), u32)
        for j in range(count):
            value[active if active is not None else ...] = words[(offsets >> 2) + j]
            if zero is not None:
                value[zero] = 0
            local.words[index[lanes] + j] = value[lanes]
        done()

    return run


# ---------------------------------------------------------------------- handlers by address space
def flat_handler(kind: str, row: Element | Atomic) -> Handler:
    """global_ and flat_ instructions (a flat address must be a global one)."""

    def build(b: Builder) -> Run:
        b.allow("offset", *CACHE)
        flat = b.instruction.opcode.startswith("flat_")
        if kind == "lds":
            b.expect(2)
            return load_to_lds(b, row, global_address(b, 0, 1))
        returns = kind == "atomic" and ("sc0" in b.modifiers or "glc" in b.modifiers)
        b.expect(3 + returns - flat)
        if kind == "load":
            return load(b, row, global_address(b, 1, 2))
        if kind == "store":
            return store(b, row, global_address(b, 0, 2), 1)
        return atomic(b, row, global_address(b, int(returns), 2 + returns), 1 + returns, 0 if returns else None)

    return build


def buffer_handler(kind: str, row: Element | Atomic) -> Handler:
    """buffer_ instructions."""

    def build(b: Builder) -> Run:
        b.allow("offset", "offen", "idxen", "lds", *CACHE)
        if "lds" in b.modifiers:
            b.expect(3)
            if kind != "load" or row.nbytes % 4:
                raise b.fail("only dword loads can go to LDS")
            return load_to_lds(b, row, buffer_address(b, 0, row.nbytes))
        b.expect(4)
        if kind == "load":
            return load(b, row, buffer_address(b, 1, row.nbytes))
        if kind == "store":
            return store(b, row, buffer_address(b, 1, row.nbytes), 0)
        returns = "sc0" in b.modifiers or "glc" in b.modifiers
        return atomic(b, row, buffer_address(b, 1, np.dtype(row.dtype).itemsize), 0, 0 if returns else None)

    return build


def handlers() -> dict[str, Handler]:
    """Opcode to handler for global, flat and buffer instructions."""
    table: dict[str, Handler] = {}
    for space, make in (("global", flat_handler), ("flat", flat_handler), ("buffer", buffer_handler)):
        table |= {f"{space}_load_{name}": make("load", row) for name, row in LOADS.items()}
        table |= {f"{space}_store_{name}": make("store", row) for name, row in STORES.items()}
        table |= {f"{space}_atomic_{name}": make("atomic", row) for name, row in ATOMICS.items()}
    table |= {f"global_load_lds_{name}": flat_handler("lds", LOADS[name]) for name in ("dword", "dwordx3", "dwordx4")}
    return table
