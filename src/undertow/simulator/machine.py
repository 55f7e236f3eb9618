"""Run all waves of a batch of workgroups in lock-step.

Waves at the same instruction form a group and execute together; waves that diverge form several groups. The group with
the lowest program counter runs, which brings diverged waves together again. With a seed, waves of a workgroup get
random priorities at the start and after every barrier, and lanes that touch the same memory do so in random order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import control, lane_moves, local_memory, matrix, packed, salu, small_memory, valu, vector_memory
from .arena import Arena
from .asm import Instruction, Module
from .checks import Checks
from .isa import BARRIER, BRANCH, END, NEXT, Handler, Step, compile_step
from .local_memory import LocalMemory, bank_conflicts
from .report import Collector
from .state import LANES, State

TABLE: dict[str, Handler] = {}
for _part in (valu, packed, lane_moves, salu, control, matrix, vector_memory, small_memory, local_memory):
    TABLE |= _part.handlers()
MAX_STEPS = 20_000_000
PATIENCE = 256  # backward jumps of one group before waiting groups get a turn
REGISTER_BYTES = 384 << 20
MAX_WAVES = 2048
LDS_LIMITS = {"gfx950": 160 << 10}


class SimulationError(RuntimeError):
    """The program cannot go on: it ran too long, left its code, or broke a limit."""


@dataclass(frozen=True, slots=True)
class Program:
    """The static part of a launch."""

    module: Module
    entry: int
    target: str
    vgprs: int
    agprs: int
    lds_bytes: int
    scratch_bytes: int
    flush32: bool
    granule: int  # smallest LDS access of the code, at most 4


@dataclass(slots=True)
class _Group:
    priority: int
    pc: int
    waves: np.ndarray


class Machine:
    """One batch of workgroups. Built once, run for every batch."""

    def __init__(
        self, program: Program, arena: Arena, report: Collector, options: object, *, waves: int, waves_per_group: int
    ) -> None:
        self.program, self.arena, self.report = program, arena, report
        self.instructions = program.module.instructions
        has_setreg = any(x.opcode.startswith("s_setreg") for x in self.instructions)
        self.state = State(waves, program.vgprs, program.agprs, program.flush32, has_setreg)
        self.waves_per_group = waves_per_group
        self.lds_limit = LDS_LIMITS.get(program.target, 64 << 10)
        self.lds = LocalMemory(self.state, waves_per_group, program.lds_bytes, self)
        words = -(-program.scratch_bytes // 4)
        self.scratch = np.zeros((words, waves, LANES), np.uint32)
        self.scratch_written = np.zeros((words, waves, LANES), bool)
        self.checks = (
            Checks(self.lds.octets, self.state, waves_per_group, program.granule, report) if options.checks else None
        )
        self.bank_model = options.bank_model
        self.bank_cycles = 0
        self.rng = None if options.seed is None else np.random.default_rng(options.seed)
        self.max_steps = options.max_steps
        count = len(self.instructions)
        self.executed, self.traffic = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.compiled: list[Step | None] = [None] * count
        self.steps = 0
        self.taken: bool | np.ndarray = False

    # ------------------------------------------------------------------ services for instructions
    def error(self, x: Instruction, why: str) -> SimulationError:
        """An error that stops the launch."""
        return SimulationError(f"{x.where()}: {why}")

    def lane_order(self, count: int) -> np.ndarray | None:
        """A random order of `count` accesses, or None without a seed."""
        return None if self.rng is None else self.rng.permutation(count)

    def count_banks(self, x: Instruction, index: np.ndarray, nbytes: int, lanes: np.ndarray | None) -> None:
        """Add to the modelled bank conflict cycles."""
        self.bank_cycles += bank_conflicts(index, nbytes, lanes)

    # ------------------------------------------------------------------ running
    def restart(self) -> None:
        """Make ready for another batch: nothing in registers, LDS or scratch carries over."""
        self.state.reset()
        self.lds.octets.fill(0)
        self.scratch.fill(0xDEADBEEF)
        self.scratch_written.fill(0)
        if self.checks is not None:
            self.checks.reset()

    def step(self, pc: int) -> Step:
        """The compiled instruction at `pc`."""
        if not 0 <= pc < len(self.instructions):
            raise SimulationError(f"execution left the code (instruction {pc} of {len(self.instructions)})")
        step = self.compiled[pc]
        if step is None:
            step = self.compiled[pc] = compile_step(self.instructions[pc], self, TABLE)
        return step

    def run(self, alive: np.ndarray) -> None:
        """Run the waves in `alive` (bool [waves]) from the entry to their ends."""
        self.waiting = np.zeros(alive.shape, bool)
        self.resume = np.zeros(alive.shape, np.int64)
        self.done = ~alive
        self.ready: list[_Group] = []
        self._enqueue(self.program.entry, alive)
        last: Instruction | None = None
        while self.ready:
            group = self._next_group()
            last = self._run_group(group)
        if self.waiting.any():
            stuck = int(self.waiting.sum())
            self.report.add("deadlock", last, self.waiting, f"{stuck} waves wait at a barrier that others never reach")

    def _enqueue(self, pc: int, waves: np.ndarray) -> None:
        """Waves that start or leave a barrier: one group, or two of random priority with a seed."""
        if self.rng is None:
            self.ready.append(_Group(0, pc, waves))
            return
        first = waves & self.rng.integers(0, 2, waves.shape).astype(bool)
        for priority, part in enumerate((first, waves & ~first)):
            if part.any():
                self.ready.append(_Group(priority, pc, part))

    def _next_group(self) -> _Group:
        best = min(self.ready, key=lambda g: (g.priority, g.pc))
        same = [g for g in self.ready if g.pc == best.pc and g.priority == best.priority]
        self.ready = [g for g in self.ready if g.pc != best.pc or g.priority != best.priority]
        for other in same:
            if other is not best:
                best.waves = best.waves | other.waves
        return best

    def _run_group(self, group: _Group) -> Instruction:
        """Run one group until it ends, waits, splits, or meets another group."""
        state, checks, executed, compiled = self.state, self.checks, self.executed, self.compiled
        state.set_group(group.waves)
        size = int(np.count_nonzero(group.waves))
        pending = checks.waits.pending if checks else {}
        pc, limit, self.patience = group.pc, self._meeting_point(group, group.pc), PATIENCE
        while True:
            step = (compiled[pc] if pc < len(compiled) else None) or self.step(pc)
            executed[pc] += size
            self.steps += 1
            if pending and not pending.keys().isdisjoint(step.touched):
                checks.waits.check(step, pending.keys() & step.touched)
            outcome = step.run()
            if outcome is NEXT:
                pc += 1
                if pc < limit:
                    continue
            elif outcome == BRANCH:
                pc = self._branch(step.instruction, group, pc)
                if pc is not None and pc < limit and (self.patience > 0 or not self.ready):
                    continue
            else:
                self._pause(outcome, step.instruction, group, pc + 1)
                return step.instruction
            if pc is not None:
                self._park(group, pc, behind=self.patience <= 0)
            return step.instruction

    def _meeting_point(self, group: _Group, pc: int) -> int:
        """The nearest program counter where a group of the same priority waits to be joined."""
        return min((g.pc for g in self.ready if g.priority == group.priority and g.pc > pc), default=1 << 60)

    def _pause(self, outcome: int, x: Instruction, group: _Group, pc: int) -> None:
        """The group stops at a barrier, at its end, or at an s_sleep."""
        if outcome == BARRIER:
            self._barrier(x, group.waves, pc)
        elif outcome == END:
            self.done |= group.waves
            self._release(x)
        else:
            self._park(group, pc, behind=True)

    def _park(self, group: _Group, pc: int, behind: bool = False) -> None:
        """Put a group back; `behind` lets every other ready group go first once."""
        if behind and self.ready:
            lowest = max(g.priority for g in self.ready)
            group.priority = lowest + 1
            if group.priority > 1_000:
                for other in self.ready:
                    other.priority = 0
                group.priority = 1
        group.pc = pc
        self.ready.append(group)

    def _branch(self, x: Instruction, group: _Group, pc: int) -> int | None:
        """The next pc, or None when the group split (its parts are then ready)."""
        if self.steps > self.max_steps:
            raise self.error(x, f"more than max_steps={self.max_steps} steps; a runaway loop, or raise max_steps")
        self.patience -= x.target <= pc
        taken = self.taken
        if taken is True:
            return x.target
        jump = taken & group.waves
        if not jump.any():
            return pc + 1
        stay = group.waves & ~taken
        if not stay.any():
            return x.target
        self.ready += [_Group(group.priority, x.target, jump), _Group(group.priority, pc + 1, stay)]
        return None

    def _barrier(self, x: Instruction, waves: np.ndarray, pc: int) -> None:
        self.waiting |= waves
        self.resume[waves] = pc
        self._release(x)

    def _release(self, x: Instruction) -> None:
        """Let go every workgroup whose waves have all arrived (ended waves do not count)."""
        if not self.waiting.any():
            return
        arrived = (self.waiting | self.done).reshape(-1, self.waves_per_group).all(1)
        free = np.repeat(arrived, self.waves_per_group) & self.waiting
        if not free.any():
            return
        self.waiting &= ~free
        if self.checks is not None:
            self.checks.barrier(free)
        places = np.unique(self.resume[free])
        if len(places) > 1:
            self._report_mixed(x, free)
        for pc in places:
            self._enqueue(int(pc), free & (self.resume == pc))

    def _report_mixed(self, x: Instruction, free: np.ndarray) -> None:
        """A barrier that waves of one workgroup reached at different instructions."""
        places = np.where(free, self.resume, -1).reshape(-1, self.waves_per_group)
        low = np.where(places < 0, 1 << 60, places).min(1)
        mixed = (places.max(1) != low) & (places.max(1) >= 0)
        if mixed.any() and self.checks is not None:
            waves = np.repeat(mixed, self.waves_per_group) & free
            self.report.add(
                "barrier-divergence", x, waves, "waves of one workgroup meet at different s_barrier instructions"
            )


def batch_size(program: Program, waves_per_group: int, groups: int) -> int:
    """How many workgroups to run at once, by the memory that their registers, LDS and scratch take."""
    registers = (program.vgprs + program.agprs) * LANES * 4 + program.scratch_bytes * LANES
    per_group = waves_per_group * registers + program.lds_bytes * 12
    return max(1, min(groups, MAX_WAVES // waves_per_group, REGISTER_BYTES // max(per_group, 1)))
