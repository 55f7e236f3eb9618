"""Turn one parsed instruction into a step that the machine can run.

The meaning of an instruction lives in the tables of `valu`, `salu`, `matrix`, `vector_memory` and `local_memory`. Each
table entry takes its operands through a `Builder`, which records what is read and what is written: the read and write
sets of an instruction are therefore exactly what its implementation touches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .asm import Instruction, Operand
from .state import DTYPES, WIDTH, Getter, State, UnsupportedError, Writer, describe

# Numbers of registers in read and write sets: vector 0-255, accumulator 256-511, scalar 512 and up.
REGISTER_BASE = {"v": 0, "a": 256, "s": 512}

NEXT, BRANCH, BARRIER, END, PAUSE = None, 1, 2, 3, 4  # what a step returns


def register_name(number: int) -> str:
    """v3, a17, s40 or vcc_lo of a read or write set member."""
    kind = "sav"[(number < 512) + (number < 256)]
    return f"{kind}{number - REGISTER_BASE[kind]}"


@dataclass(slots=True)
class Step:
    """A runnable instruction."""

    instruction: Instruction
    run: Callable[[], int | None]
    reads: frozenset[int]
    writes: frozenset[int]
    touched: frozenset[int]


class Builder:
    """Hands out operand accessors of one instruction and remembers them."""

    def __init__(self, instruction: Instruction, machine: object) -> None:
        self.instruction = instruction
        self.machine = machine
        self.state: State = machine.state
        self.operands = instruction.operands
        self.modifiers = instruction.modifiers
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def fail(self, why: str) -> UnsupportedError:
        """The error to raise when the instruction is not modelled."""
        return UnsupportedError(f"{self.instruction.where()}: {why}")

    def expect(self, count: int) -> None:
        """Refuse a wrong number of operands."""
        if len(self.operands) != count:
            raise self.fail(f"{len(self.operands)} operands, expected {count}")

    def allow(self, *names: str) -> None:
        """Refuse modifiers that the caller does not handle."""
        for name in self.modifiers:
            if name not in names:
                raise self.fail(f"modifier {name!r} is not supported here")

    def plain(self, operand: Operand) -> Operand:
        """Refuse neg, abs and sext on an operand whose reader ignores them."""
        if operand.negate or operand.absolute or operand.sign_extend:
            raise self.fail(f"source modifier on {describe(operand)}")
        return operand

    def integer(self, name: str, default: int = 0) -> int:
        """An integer modifier."""
        value = self.modifiers.get(name, default)
        try:
            return int(str(value), 0)
        except ValueError:
            raise self.fail(f"modifier {name}:{value} is not an integer") from None

    def bits(self, name: str, count: int, default: int) -> list[int]:
        """A bracketed modifier such as op_sel:[0,1]."""
        if name not in self.modifiers:
            return [default] * count
        values = [int(x) for x in str(self.modifiers[name]).strip("[]").split(",")]
        if len(values) < count or any(v not in (0, 1) for v in values):
            raise self.fail(f"modifier {name}:{self.modifiers[name]}")
        return values

    # ------------------------------------------------------------------ register sets
    def numbers(self, operand: Operand, count: int) -> range:
        """Register numbers of an operand that is `count` registers wide."""
        if not operand.is_register:
            return range(0)
        if operand.count != count:
            raise self.fail(f"{describe(operand)} is {operand.count} registers wide, expected {count}")
        start = REGISTER_BASE[operand.kind] + operand.index
        return range(start, start + count)

    def read(self, operand: Operand, count: int = 1) -> Operand:
        """Add to the read set."""
        self.reads.update(self.numbers(operand, count))
        return operand

    def write(self, operand: Operand, count: int = 1) -> Operand:
        """Add to the write set."""
        self.writes.update(self.numbers(operand, count))
        return operand

    # ------------------------------------------------------------------ accessors
    def lane(self, position: int, kind: str, half: int = 0) -> np.ndarray | Getter:
        """Vector source `position`; the caller deals with neg and abs."""
        return self.state.lanes(self.read(self.operands[position], WIDTH[kind]), kind, half)

    def lane_out(self, position: int, kind: str) -> Writer:
        """Vector destination `position`."""
        return self.state.lane_writer(self.write(self.operands[position], WIDTH[kind]), kind)

    def scalar(self, position: int, kind: str = "u32") -> Getter:
        """Scalar source `position` as a function."""
        return as_getter(self.state.scalar(self.read(self.plain(self.operands[position]), WIDTH[kind]), kind))

    def scalar_out(self, position: int, width: int = 1) -> Writer:
        """Scalar destination `position`."""
        return self.state.scalar_writer(self.write(self.operands[position], width), width)

    def mask(self, position: int) -> Getter:
        """Lane mask source `position`."""
        return self.state.lane_bits(self.read(self.operands[position], 2))

    def mask_out(self, position: int) -> Writer:
        """Lane mask destination `position`; takes bool [waves, lanes]."""
        write = self.scalar_out(position, 2)
        pack = self.state.pack
        return lambda lanes: write(pack(lanes))

    def finish(self, run: Callable[[], int | None]) -> Step:
        """The step, with its register sets."""
        reads, writes = frozenset(self.reads), frozenset(self.writes)
        return Step(self.instruction, run, reads, writes, reads | writes)


Handler = Callable[[Builder], Callable[[], "int | None"]]


def as_getter(source: np.ndarray | Getter) -> Getter:
    """A function for a view or a function."""
    return source if callable(source) else lambda: source


def lane_dtype(kind: str) -> type:
    """The numpy type in which a lane operand of `kind` is computed (bf16 as f32)."""
    return DTYPES.get(kind, np.float32)


def compile_step(instruction: Instruction, machine: object, table: dict[str, Handler]) -> Step:
    """Look the opcode up and build its step. Raises UnsupportedError with the line."""
    handler = table.get(instruction.opcode)
    builder = Builder(instruction, machine)
    if handler is None:
        raise builder.fail(f"opcode {instruction.opcode!r} is not in the simulator's tables")
    try:
        return builder.finish(handler(builder))
    except UnsupportedError as error:
        if str(error).startswith("line "):
            raise
        raise builder.fail(str(error)) from None
    except (IndexError, ValueError) as error:
        raise builder.fail(f"malformed: {error}") from error
