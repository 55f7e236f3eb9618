"""LDS: the memory of a workgroup, its reads, writes and atomics, and the lane shuffles that go through its hardware."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .asm import Instruction
from .isa import Builder, Handler
from .memory import (
    Atomic,
    Element,
    _compare_swap,
    _exchange,
    _packed_bf16_add,
    _packed_f16_add,
    apply_atomic,
    narrow_source,
    place_narrow,
)
from .state import LANES, State, f32, i32, i64, u32
from .vector_memory import issue

Run = Callable[[], "int | None"]
BANKS = 32

READS = {
    "b32": Element(4),
    "b64": Element(8),
    "b96": Element(12),
    "b128": Element(16),
    "u8": Element(1),
    "i8": Element(1, signed=True),
    "u16": Element(2),
    "i16": Element(2, signed=True),
    "u8_d16": Element(1, half=0),
    "u8_d16_hi": Element(1, half=1),
    "i8_d16": Element(1, signed=True, half=0),
    "i8_d16_hi": Element(1, signed=True, half=1),
    "u16_d16": Element(2, half=0),
    "u16_d16_hi": Element(2, half=1),
}
WRITES = {
    "b32": Element(4),
    "b64": Element(8),
    "b96": Element(12),
    "b128": Element(16),
    "b8": Element(1),
    "b16": Element(2),
    "b8_d16_hi": Element(1, half=1),
    "b16_d16_hi": Element(2, half=1),
}
LDS_ATOMICS = {
    "add_u32": Atomic(u32, np.add),
    "sub_u32": Atomic(u32, np.subtract),
    "min_i32": Atomic(i32, np.minimum),
    "max_i32": Atomic(i32, np.maximum),
    "min_u32": Atomic(u32, np.minimum),
    "max_u32": Atomic(u32, np.maximum),
    "and_b32": Atomic(u32, np.bitwise_and),
    "or_b32": Atomic(u32, np.bitwise_or),
    "xor_b32": Atomic(u32, np.bitwise_xor),
    "add_f32": Atomic(f32, np.add),
    "min_f32": Atomic(f32, np.fmin),
    "max_f32": Atomic(f32, np.fmax),
    "pk_add_f16": Atomic(u32, _packed_f16_add),
    "pk_add_bf16": Atomic(u32, _packed_bf16_add),
}


class LocalMemory:
    """LDS of every workgroup of the batch, one after the other."""

    def __init__(self, state: State, waves_per_group: int, nbytes: int, machine: object) -> None:
        groups = state.waves // waves_per_group
        self.nbytes = nbytes
        self.stride = max(64, -(-nbytes // 64) * 64)
        self.octets = np.zeros(groups * self.stride, np.uint8)
        self.halves, self.words = self.octets.view(np.uint16), self.octets.view(u32)
        self.base = (np.arange(state.waves) // waves_per_group * self.stride).astype(i64)[:, None]
        self.machine, self.state = machine, state

    def inside(self, x: Instruction, address: np.ndarray, nbytes: int, lanes: np.ndarray, what: str) -> np.ndarray:
        """Lanes [waves, lanes] whose access is in bounds; the others are reported."""
        valid = (address >= 0) & (address + nbytes <= self.nbytes)
        bad = lanes & ~valid
        if bad.any():
            wave, lane = (int(v[0]) for v in np.nonzero(bad))
            place = int(address[wave, lane])
            text = f"{what} of {nbytes} bytes at LDS address {place}; the kernel has {self.nbytes} bytes"
            self.machine.report.add_at(
                "lds-bounds",
                x,
                wave,
                lane=lane,
                address=place,
                text=text,
                count=int(bad.sum()),
                key=what,
            )
        return valid

    def locate(
        self, x: Instruction, address: np.ndarray, nbytes: int, what: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Absolute byte index [waves, lanes] of u32 addresses, and the lanes that execute (None for all)."""
        state = self.state
        lanes = None if state.full else state.mask
        used = address if lanes is None else np.where(lanes, address, 0)
        if int(used.max()) + nbytes > self.nbytes:
            everyone = state.mask
            lanes = self.inside(x, address.astype(i64), nbytes, everyone, what) & everyone
            used = np.where(lanes, address, 0)
        align = min(nbytes, 4)
        if align > 1 and int(np.bitwise_or.reduce(used, axis=None)) & (align - 1):
            bad = (used & u32(align - 1)) != 0
            wave, lane = (int(v[0]) for v in np.nonzero(bad))
            text = f"{what} of {nbytes} bytes at LDS address {int(used[wave, lane])} is not aligned to {align}"
            self.machine.report.add_at(
                "misaligned",
                x,
                wave,
                lane=lane,
                address=int(used[wave, lane]),
                text=text,
                count=int(bad.sum()),
                key=what,
            )
            used = used & ~u32(align - 1)
        self._count(x, lanes, nbytes)
        return used.astype(i64) + self.base, lanes

    def _count(self, x: Instruction, lanes: np.ndarray | None, nbytes: int) -> None:
        active = self.state.waves * LANES if lanes is None else int(np.count_nonzero(lanes))
        self.machine.traffic[x.index] += active * nbytes

    def shadow_read(self, x: Instruction, index: np.ndarray, nbytes: int, lanes: np.ndarray | None) -> None:
        """Tell the checks about a read of absolute byte indices."""
        if self.machine.bank_model:
            self.machine.count_banks(x, index, nbytes, lanes)
        if self.machine.checks is not None and (lanes is None or lanes.any()):
            self.machine.checks.lds.read(x, index - self.base, nbytes, lanes)

    def shadow_write(
        self,
        x: Instruction,
        address: np.ndarray,
        nbytes: int,
        lanes: np.ndarray | None,
        *,
        values: np.ndarray | None = None,
        load: bool = False,
    ) -> None:
        """Tell the checks about a write of LDS addresses [waves, lanes], before it happens."""
        if self.machine.checks is not None and (lanes is None or lanes.any()):
            self.machine.checks.lds.write(x, address, nbytes, lanes, values=values, load=load)


def ds_address(b: Builder, position: int, offset: int) -> Callable[[], np.ndarray]:
    """LDS address (vgpr + offset) modulo 2^32: compilers fold offsets onto negative bases."""
    register = b.state.block(b.read(b.operands[position]), 1)[0]
    offset = u32(offset)
    return lambda: register + offset


def _offsets(b: Builder, element: Element, stride: int) -> list[int]:
    if not stride:
        return [b.integer("offset")]
    unit = element.nbytes * stride
    return [b.integer("offset0") * unit, b.integer("offset1") * unit]


def read_handler(element: Element, stride: int = 0) -> Handler:
    """ds_read, and ds_read2 with offsets in units of `stride` elements."""

    def build(b: Builder) -> Run:
        b.expect(2)
        b.allow(*(("offset0", "offset1") if stride else ("offset",)))
        offsets = _offsets(b, element, stride)
        total = element.registers * len(offsets)
        registers = frozenset(b.numbers(b.operands[0], total))
        block = b.state.block(b.write(b.operands[0], total), total)
        if element.half is not None:
            b.read(b.operands[0])
        locators = [ds_address(b, 1, o) for o in offsets]
        local, x, done = b.machine.lds, b.instruction, issue(b, "lgkmcnt", registers)
        narrow = element.nbytes < 4
        memory = (local.octets if element.nbytes == 1 else local.halves) if narrow else local.words
        shift = {1: 0, 2: 1}.get(element.nbytes, 2)
        checked = b.machine.checks is not None or b.machine.bank_model

        def run() -> None:
            addresses = [locate() for locate in locators]
            for part, address in enumerate(addresses):
                where, lanes = local.locate(x, address, element.nbytes, "read")
                if checked:
                    local.shadow_read(x, where, element.nbytes, lanes)
                index = where >> shift
                for j in range(element.registers):
                    register = block[part * element.registers + j]
                    if narrow:
                        value = place_narrow(element, memory[index], register)
                    elif lanes is None:
                        np.take(memory, index + j, out=register, mode="clip")
                        continue
                    else:
                        value = memory[index + j]
                    if lanes is None:
                        register[...] = value
                    else:
                        np.copyto(register, u32(0), where=b.state.mask & ~lanes)
                        np.copyto(register, value, where=lanes)
            done()

        return run

    return build


def write_handler(element: Element, stride: int = 0) -> Handler:
    """ds_write, and ds_write2 with offsets in units of `stride` elements."""

    def build(b: Builder) -> Run:
        b.expect(3 if stride else 2)
        b.allow(*(("offset0", "offset1") if stride else ("offset",)))
        offsets = _offsets(b, element, stride)
        blocks = [
            b.state.block(b.read(b.operands[1 + p], element.registers), element.registers) for p in range(len(offsets))
        ]
        locators = [ds_address(b, 0, o) for o in offsets]
        machine, local, x, done = b.machine, b.machine.lds, b.instruction, issue(b, "lgkmcnt", frozenset())
        narrow = element.nbytes < 4
        memory = (local.octets if element.nbytes == 1 else local.halves) if narrow else local.words
        shift = {1: 0, 2: 1}.get(element.nbytes, 2)
        checks = machine.checks

        def run() -> None:
            for locate, block in zip(locators, blocks, strict=True):
                where, lanes = local.locate(x, locate(), element.nbytes, "write")
                if machine.bank_model:
                    machine.count_banks(x, where, element.nbytes, lanes)
                if checks is not None:
                    granules = written_granules(block, element, lanes, checks.lds.granule)
                    local.shadow_write(x, where - local.base, element.nbytes, lanes, values=granules)
                index = where >> shift
                for j, register in enumerate(block):
                    value = narrow_source(element, register) if narrow else register
                    if lanes is None:
                        memory[index + j] = value
                    else:
                        memory[index[lanes] + j] = value[lanes]
            done()

        return run

    return build


def written_granules(block: np.ndarray, element: Element, lanes: np.ndarray | None, granule: int) -> np.ndarray:
    """Values [lanes, granules] that a write puts into LDS."""
    flat = block.reshape(block.shape[0], -1) if lanes is None else block[:, lanes]
    if element.nbytes < 4:
        narrow = narrow_source(element, flat[0])
        return narrow[:, None].view(f"u{granule}") if granule < element.nbytes else narrow[:, None]
    return np.ascontiguousarray(flat.T).view(f"u{granule}")


def atomic_handler(row: Atomic, returns: bool) -> Handler:
    """ds_add_u32 and relatives; _rtn gives the old value."""

    def build(b: Builder) -> Run:
        b.expect(1 + row.operands + returns)
        b.allow("offset")
        registers = frozenset(b.numbers(b.operands[0], 1)) if returns else frozenset()
        target = b.state.block(b.write(b.operands[0]), 1)[0] if returns else None
        locate = ds_address(b, int(returns), b.integer("offset"))
        data = [b.state.block(b.read(b.operands[1 + returns + k]), 1)[0] for k in range(row.operands)]
        machine, local, x, done = b.machine, b.machine.lds, b.instruction, issue(b, "lgkmcnt", registers)
        memory = local.octets.view(row.dtype)

        def run() -> None:
            where, lanes = local.locate(x, locate(), 4, "atomic")
            if machine.checks is not None and (lanes is None or lanes.any()):
                machine.checks.lds.atomic(x, where - local.base, lanes)
            index = (where if lanes is None else where[lanes]).reshape(-1) >> 2
            operands = [(d if lanes is None else d[lanes]).reshape(-1).view(row.dtype) for d in data]
            order = machine.lane_order(index.size)
            pick = slice(None) if order is None else order
            old = apply_atomic(row, memory, index[pick], [o[pick] for o in operands], returns)
            if returns:
                values = np.empty_like(old)
                values[pick] = old
                if lanes is None:
                    target[...] = values.view(u32).reshape(target.shape)
                else:
                    target[lanes] = values.view(u32)
            done()

        return run

    return build


# ---------------------------------------------------------------------- shuffles
def shuffle_handler(direction: str) -> Handler:
    """ds_bpermute (pull from a lane) and ds_permute (push to a lane)."""

    def build(b: Builder) -> Run:
        b.expect(3)
        b.allow("offset")
        state, offset = b.state, u32(b.integer("offset"))
        registers = frozenset(b.numbers(b.operands[0], 1))
        write = b.lane_out(0, "u32")
        address = state.block(b.read(b.operands[1]), 1)[0]
        data = state.block(b.read(b.operands[2]), 1)[0]
        done = issue(b, "lgkmcnt", registers)
        waves = np.arange(state.waves)[:, None]

        def pull() -> None:
            lane = ((address + offset) >> u32(2)) & u32(63)
            value = data[waves, lane]
            write(value if state.full else np.where(state.mask[waves, lane], value, u32(0)))
            done()

        def push() -> None:
            lane = ((address + offset) >> u32(2)) & u32(63)
            value = np.zeros_like(data)
            for source in range(LANES):  # the highest lane wins
                active = state.mask[:, source]
                value[waves[active, 0], lane[active, source]] = data[active, source]
            write(value)
            done()

        return pull if direction == "pull" else push

    return build


def swizzle_lanes(b: Builder) -> np.ndarray:
    """Source lane of every lane of ds_swizzle_b32, from the number or from LLVM's swizzle(...) spelling."""
    lane = np.arange(LANES)
    text = str(b.modifiers.get("offset", "0"))
    match = re.match(r'swizzle\((\w+),\s*"?([\w, ]+)"?\)$', text)
    if match:
        lanes = _named_swizzle(*match.groups(), lane)
        if lanes is None:
            raise b.fail(f"offset:{text}")
        return lanes
    code = b.integer("offset")
    if code & 0x8000:
        if code & 0x7F00:
            raise b.fail(f"swizzle mode of offset {code:#x}")
        return (lane & ~3) | ((code >> (2 * (lane & 3))) & 3)
    return (lane & 32) | ((((lane & 31) & (code & 31)) | ((code >> 5) & 31)) ^ ((code >> 10) & 31))


def _named_swizzle(mode: str, values: str, lane: np.ndarray) -> np.ndarray | None:
    """Source lanes of swizzle(mode, values); None for what LLVM does not write."""
    if mode == "BITMASK_PERM":
        if not re.match(r"[01pi]{5}$", values):
            return None
        picks = lambda letters: sum((c in letters) << i for i, c in enumerate(reversed(values)))
        return (lane & 32) | ((((lane & 31) & picks("pi")) | picks("1")) ^ picks("i"))
    numbers = [int(v) for v in values.split(",")]
    first = numbers[0]
    if mode == "QUAD_PERM" and len(numbers) == 4 and max(numbers) < 4:
        return (lane & ~3) | np.array(numbers)[lane & 3]
    power = first > 0 and first & (first - 1) == 0 and first <= 32
    patterns = {
        "SWAP": lambda: lane ^ first,
        "REVERSE": lambda: lane ^ (first - 1),
        "BROADCAST": lambda: (lane & ~(first - 1)) | numbers[1],
    }
    return patterns[mode]() if power and mode in patterns and len(numbers) == 1 + (mode == "BROADCAST") else None


def _swizzle(b: Builder) -> Run:
    b.expect(2)
    b.allow("offset")
    state, lanes = b.state, swizzle_lanes(b)
    registers = frozenset(b.numbers(b.operands[0], 1))
    write, data = b.lane_out(0, "u32"), state.block(b.read(b.operands[1]), 1)[0]
    done = issue(b, "lgkmcnt", registers)

    def run() -> None:
        value = data[:, lanes]
        write(value if state.full else np.where(state.mask[:, lanes], value, u32(0)))
        done()

    return run


def _read_transposed(b: Builder) -> Run:
    """ds_read_b64_tr_b16 (gfx950): 16 lanes fetch four rows of 16 halves, and lane l gets column l of them."""
    b.expect(2)
    b.allow("offset")
    state, local, x = b.state, b.machine.lds, b.instruction
    registers = frozenset(b.numbers(b.operands[0], 2))
    block = state.block(b.write(b.operands[0], 2), 2)
    locate, done = ds_address(b, 1, b.integer("offset")), issue(b, "lgkmcnt", registers)
    lane = np.arange(LANES)
    group, column = lane & ~15, lane & 15
    checked = b.machine.checks is not None or b.machine.bank_model

    def run() -> None:
        where, lanes = local.locate(x, locate(), 8, "read")
        if checked:
            local.shadow_read(x, where, 8, lanes)
        halves = local.halves[(where >> 1)[:, :, None] + np.arange(4)]  # [waves, lane, element]
        rows = [halves[:, group + 4 * j + (column >> 2), column & 3].astype(u32) for j in range(4)]
        for k in (0, 1):
            np.copyto(block[k], rows[2 * k] | (rows[2 * k + 1] << u32(16)), where=state.mask)
        done()

    return run


def bank_conflicts(index: np.ndarray, nbytes: int, lanes: np.ndarray | None) -> int:
    """Extra LDS cycles of one instruction under a model, which is not validated against hardware counters.

    32 banks of 4 bytes, 128 bytes a cycle, lanes served in order, equal addresses broadcast.
    """
    words = max(1, nbytes // 4)
    address = index >> 2
    if lanes is not None:
        rows = lanes.any(1)
        address, lanes = address[rows], lanes[rows]
        if not len(address):
            return 0
        address = np.where(lanes, address, address[np.arange(len(address)), lanes.argmax(1)][:, None])
    phase = max(1, BANKS // words)
    parts = address.reshape(len(address), LANES // phase, phase)
    cells = (parts[..., None] + np.arange(words)).reshape(len(address), LANES // phase, -1)
    cells = np.sort(cells, axis=-1)
    fresh = np.ones(cells.shape, bool)
    fresh[..., 1:] = cells[..., 1:] != cells[..., :-1]
    rows = np.arange(cells.shape[0] * cells.shape[1]).repeat(cells.shape[2])
    counts = np.bincount(
        rows[fresh.reshape(-1)] * BANKS + (cells & (BANKS - 1)).reshape(-1)[fresh.reshape(-1)],
        minlength=rows[-1] * BANKS + BANKS,
    )
    return int((counts.reshape(-1, BANKS).max(1) - 1).sum())


def handlers() -> dict[str, Handler]:
    """Opcode to handler for LDS instructions."""
    table: dict[str, Handler] = {f"ds_read_{name}": read_handler(row) for name, row in READS.items()}
    table |= {f"ds_write_{name}": write_handler(row) for name, row in WRITES.items()}
    for name in ("b32", "b64"):
        for suffix, stride in (("", 1), ("st64", 64)):
            table[f"ds_read2{suffix}_{name}"] = read_handler(READS[name], stride)
            table[f"ds_write2{suffix}_{name}"] = write_handler(WRITES[name], stride)
    for name, row in LDS_ATOMICS.items():
        stem, _, kind = name.rpartition("_")
        table[f"ds_{name}"] = atomic_handler(row, returns=False)
        table[f"ds_{stem}_rtn_{kind}"] = atomic_handler(row, returns=True)
    table |= {
        "ds_wrxchg_rtn_b32": atomic_handler(Atomic(u32, _exchange), returns=True),
        "ds_cmpst_rtn_b32": atomic_handler(
            Atomic(u32, lambda old, expected, new: _compare_swap(old, new, expected), 2), returns=True
        ),
        "ds_bpermute_b32": shuffle_handler("pull"),
        "ds_permute_b32": shuffle_handler("push"),
        "ds_swizzle_b32": _swizzle,
        "ds_read_b64_tr_b16": _read_transposed,
    }
    return table
