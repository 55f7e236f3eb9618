"""What hardware does not tell: shadow state that proves each access ordered, initialised and in bounds.

`Waits` follows the two memory counters: a register that a load will write may be used only after an s_waitcnt that
guarantees the load. `LdsShadow` follows every granule of LDS: who wrote and read it since which barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .asm import Instruction
from .isa import Step, register_name
from .state import LANES, State

i32, i64 = np.int32, np.int64
WAVE_BITS = 5  # waves of a workgroup in the low bits of a tag
NEVER = -(1 << 30)
ATOMIC_WAVE = (1 << WAVE_BITS) - 1  # the wave of a tag that atomics of any wave share


@dataclass(slots=True)
class Pending:
    """A register whose load has been issued: by which instruction, on which counter, as which number of each wave."""

    instruction: Instruction
    counter: str
    sequence: np.ndarray
    is_local: bool


@dataclass(slots=True)
class _Read:
    """An LDS read: granules [lanes, n], tag and wave of each lane, its number on the counter, the waves that did it."""

    cells: np.ndarray
    tags: np.ndarray
    waves: np.ndarray
    sequence: np.ndarray
    group: np.ndarray


class Waits:
    """Counters of outstanding memory operations of every wave."""

    def __init__(self, state: State, report: object) -> None:
        self.state, self.report = state, report
        waves = state.waves
        self.issued = {c: np.zeros(waves, i32) for c in ("vmcnt", "lgkmcnt")}
        self.done = {c: np.zeros(waves, i32) for c in ("vmcnt", "lgkmcnt")}
        self.at_barrier = {c: np.zeros(waves, i32) for c in ("vmcnt", "lgkmcnt")}
        self.last_scalar = np.zeros(waves, i32)
        self.pending: dict[int, Pending] = {}

    def reset(self) -> None:
        """Nothing is outstanding."""
        for counters in (self.issued, self.done, self.at_barrier):
            for values in counters.values():
                values.fill(0)
        self.last_scalar.fill(0)
        self.pending.clear()

    def issue(self, instruction: Instruction, counter: str, registers: frozenset[int], scalar: bool = False) -> None:
        """Count one operation of the waves of the group; `registers` are not valid until it retires."""
        state, count = self.state, self.issued[counter]
        if state.group_full:
            count += 1
            if scalar:
                self.last_scalar[...] = count
            sequence = count.copy()
        else:
            count += state.group
            if scalar:
                np.copyto(self.last_scalar, count, where=state.group)
            sequence = np.where(state.group, count, NEVER)
        local = counter == "lgkmcnt" and not scalar
        fresh = Pending(instruction, counter, sequence, local)
        for register in registers:
            old = self.pending.get(register)
            if old is None or state.group_full or old.counter != counter:
                self.pending[register] = fresh
            else:
                merged = np.where(state.group, sequence, old.sequence)
                self.pending[register] = Pending(instruction, counter, merged, local)

    def retire(self, counters: dict[str, int]) -> None:
        """s_waitcnt: all but the last n operations of each named counter are complete."""
        state = self.state
        for counter, left in counters.items():
            target = self.issued[counter] - left
            if counter == "lgkmcnt" and left:
                # scalar loads return out of order: while one is outstanding, only lgkmcnt(0) proves anything
                target = np.where(self.last_scalar > self.done[counter], NEVER, target)
            np.maximum(self.done[counter], target, out=self.done[counter], where=state.group)

    def check(self, step: Step, registers: set[int]) -> None:
        """Called when a step touches pending registers: complain about those not yet guaranteed."""
        group = self.state.group
        for register in registers:
            entry = self.pending[register]
            late = entry.sequence > self.done[entry.counter]
            if not late.any():
                del self.pending[register]
                continue
            late &= group
            if not late.any() or self._same_queue(step, register, entry):
                continue
            what = "read" if register in step.reads else "overwritten"
            source = entry.instruction
            self.report.add(
                "wait",
                step.instruction,
                late,
                f"{register_name(register)} is {what} before an s_waitcnt {entry.counter} guarantees"
                f" line {source.line}: {source.text}",
            )
            entry.sequence = np.where(late, NEVER, entry.sequence)

    @staticmethod
    def _same_queue(step: Step, register: int, entry: Pending) -> bool:
        """A later load of the same in-order queue may overwrite the destination of an earlier one."""
        opcode = step.instruction.opcode
        if register in step.reads or register not in step.writes:
            return False
        if opcode.startswith("ds_"):
            return entry.is_local
        return opcode.startswith(("global_load", "buffer_load", "scratch_load")) and entry.counter == "vmcnt"

    def barrier(self, released: np.ndarray) -> None:
        """Remember what was complete when these waves passed a barrier."""
        for counter, done in self.done.items():
            np.copyto(self.at_barrier[counter], done, where=released)


class LdsShadow:
    """Who touched each granule of LDS, in which barrier interval (epoch)."""

    def __init__(
        self, lds: np.ndarray, state: State, waits: Waits, report: object, *, waves_per_group: int, granule: int
    ) -> None:
        self.state, self.waits, self.report = state, waits, report
        self.granule, self.many_waves = granule, waves_per_group > 1
        groups = state.waves // waves_per_group
        self.contents = lds.view(f"u{granule}")
        size = self.contents.size
        self.per_group = size // groups
        self.epoch = np.zeros(state.waves, i32)
        self.wave = (np.arange(state.waves) % waves_per_group).astype(i32)
        self.base = (np.arange(state.waves) // waves_per_group * self.per_group).astype(i64)
        self.global_wave = np.broadcast_to(np.arange(state.waves, dtype=i32)[:, None], (state.waves, LANES))
        self.writer = np.full(size, NEVER, i32)  # epoch << WAVE_BITS | wave
        self.write_sequence = np.zeros(size, i32)
        self.write_wave = np.zeros(size, i32)
        self.by_load = np.zeros(size, bool)  # written by a load that goes straight to LDS (vmcnt)
        self.any_load = False
        self.reader = np.full(size, NEVER, i32)
        self.many_readers = np.full(size, NEVER, i32)  # epoch in which two or more waves read it
        self.unretired = np.full(size, -1, i32)  # wave whose read was outstanding at a barrier
        self.unretired_sequence = np.zeros(size, i32)
        self.any_unretired = False
        self.last_write = np.zeros(state.waves, i32)  # number of each wave's last LDS write
        self.any_unpublished = False
        self.read_log: list[_Read] = []  # since the last barrier
        self.unseen: list[_Read] = []  # those of them not yet entered in `reader`

    def reset(self) -> None:
        """Nothing was read or written."""
        self.epoch.fill(0)
        for tags in (self.writer, self.reader, self.many_readers):
            tags.fill(NEVER)
        self.unretired.fill(-1)
        self.by_load.fill(0)
        self.last_write.fill(0)
        self.any_load = self.any_unretired = self.any_unpublished = False
        self.read_log, self.unseen = [], []

    def _cells(
        self, address: np.ndarray, nbytes: int, lanes: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Granule numbers [lanes, granules], and tag, epoch and global wave [lanes, 1] of the accesses."""
        tag = (self.epoch << WAVE_BITS) | self.wave
        cell = address // self.granule + self.base[:, None]
        self.active = lanes
        tags = np.broadcast_to(tag[:, None], cell.shape)
        waves = self.global_wave
        if lanes is not None:
            cell, tags, waves = cell[lanes], tags[lanes], waves[lanes]
        else:
            cell, tags, waves = cell.reshape(-1), tags.reshape(-1), waves.reshape(-1)
        count = max(1, nbytes // self.granule)
        cells = cell[:, None] + np.arange(count) if count > 1 else cell[:, None]
        return cells, tags[:, None], tags[:, None] >> WAVE_BITS, waves[:, None]

    def _complain(
        self, kind: str, x: Instruction, bad: np.ndarray, waves: np.ndarray, cells: np.ndarray, *, text: str
    ) -> None:
        if bad.any():
            lane, part = (int(v[0]) for v in np.nonzero(np.broadcast_to(bad, cells.shape)))
            wave = int(np.broadcast_to(waves, cells.shape)[lane, part])
            address = int(cells[lane, part] - self.base[wave]) * self.granule
            number = lane % LANES if self.active is None else int(np.nonzero(self.active)[1][lane])
            self.report.add_at(kind, x, wave, lane=number, address=address, text=text, count=int(bad.sum()))

    def read(self, x: Instruction, address: np.ndarray, nbytes: int, lanes: np.ndarray | None) -> None:
        """Check an LDS read of `nbytes` at [waves, lanes] addresses (lanes: bool mask, None for all)."""
        cells, tags, epochs, waves = self._cells(address, nbytes, lanes)
        writer = self.writer[cells]
        if int(writer.min()) == NEVER:
            self._complain(
                "lds-uninitialised", x, writer == NEVER, waves, cells, text="LDS is read before anything wrote it"
            )
        foreign = writer != tags
        now = foreign & (writer >> WAVE_BITS == epochs)
        text = "read after write (RAW): another wave wrote this LDS since the last barrier"
        self._complain("lds-race", x, now, waves, cells, text=text)
        if self.any_load or self.any_unpublished:
            self._check_published(x, cells, waves, foreign & ~now & (writer != NEVER))
        entry = _Read(cells, tags, waves, self.waits.issued["lgkmcnt"] + 1, self.state.group.copy())
        self.read_log.append(entry)
        self.unseen.append(entry)

    def _check_published(self, x: Instruction, cells: np.ndarray, waves: np.ndarray, foreign: np.ndarray) -> None:
        """Writes of earlier intervals: were they complete when their wave passed the barrier?"""
        owner, sequence = self.write_wave[cells], self.write_sequence[cells]
        open_write = foreign & (sequence > self.waits.at_barrier["lgkmcnt"][owner])
        if self.any_load:
            load = self.by_load[cells]
            open_write &= ~load
            limit = np.where(owner == waves, self.waits.done["vmcnt"][owner], self.waits.at_barrier["vmcnt"][owner])
            text = "read before an s_waitcnt vmcnt guarantees the load that writes this LDS"
            self._complain("lds-load", x, load & (sequence > limit), waves, cells, text=text)
        text = "another wave's write was not retired by s_waitcnt lgkmcnt before the barrier"
        self._complain("lds-publish", x, open_write, waves, cells, text=text)

    def _enter_reads(self) -> None:
        """Bring `reader` up to date: done only when a write needs it."""
        for entry in self.unseen:
            cells, tags = entry.cells, entry.tags
            old = self.reader[cells]
            self.reader[cells] = tags
            epochs = tags >> WAVE_BITS
            shared = ((old != tags) & (old >> WAVE_BITS == epochs)) | (self.reader[cells] != tags)
            if shared.any():
                self.many_readers[cells[shared]] = np.broadcast_to(epochs, cells.shape)[shared]
        self.unseen = []

    def write(
        self,
        x: Instruction,
        address: np.ndarray,
        nbytes: int,
        lanes: np.ndarray | None,
        *,
        values: np.ndarray | None = None,
        load: bool = False,
    ) -> None:
        """Check an LDS write, before it happens.

        `values` [lanes, granules] are the new contents where they are known: two waves that write the same value do not
        race.
        """
        self._enter_reads()
        cells, tags, epochs, waves = self._cells(address, nbytes, lanes)
        writer, reader = self.writer[cells], self.reader[cells]
        clash = (writer != tags) & (writer >> WAVE_BITS == epochs)
        if clash.any() and values is not None:
            clash &= self.contents[cells] != values
        self.writer[cells] = tags
        together = self.writer[cells] != tags
        if together.any() and values is not None:
            probe = np.zeros(self.writer.size, values.dtype)
            probe[cells] = values
            winner = probe[cells]
            together = np.zeros(cells.shape, bool)
            np.logical_or(together, winner != values, out=together)
        text = "write after write (WAW): another wave wrote this LDS since the last barrier"
        self._complain("lds-race", x, clash | together, waves, cells, text=text)
        read_by_other = ((reader != tags) & (reader >> WAVE_BITS == epochs)) | (self.many_readers[cells] == epochs)
        text = "write after read (WAR): another wave read this LDS since the last barrier"
        self._complain("lds-race", x, read_by_other, waves, cells, text=text)
        if self.any_unretired:
            holder = self.unretired[cells]
            late = self.unretired_sequence[cells] > self.waits.at_barrier["lgkmcnt"][holder]
            text = "another wave's read was not retired by s_waitcnt lgkmcnt before the barrier that frees this LDS"
            self._complain("lds-recycle", x, (holder >= 0) & (holder != waves) & late, waves, cells, text=text)
        self.write_wave[cells] = waves
        self.write_sequence[cells] = (self.waits.issued["vmcnt" if load else "lgkmcnt"] + 1)[waves]
        if not load:
            np.copyto(self.last_write, self.waits.issued["lgkmcnt"] + 1, where=self.state.group)
        if load or self.any_load:
            self.any_load = True
            self.by_load[cells] = load

    def atomic(self, x: Instruction, address: np.ndarray, lanes: np.ndarray | None) -> None:
        """Check an LDS atomic of 4 bytes: atomics do not race with each other, only with plain reads and writes."""
        self._enter_reads()
        cells, tags, epochs, waves = self._cells(address, 4, lanes)
        shared = (epochs << WAVE_BITS) | ATOMIC_WAVE if self.many_waves else tags
        writer, reader = self.writer[cells], self.reader[cells]
        text = "LDS is updated before anything wrote it"
        self._complain("lds-uninitialised", x, writer == NEVER, waves, cells, text=text)
        clash = (writer != tags) & (writer != shared) & (writer >> WAVE_BITS == epochs)
        clash |= ((reader != tags) & (reader >> WAVE_BITS == epochs)) | (self.many_readers[cells] == epochs)
        text = "atomic on LDS that another wave read or wrote since the last barrier"
        self._complain("lds-race", x, clash, waves, cells, text=text)
        self.writer[cells] = shared
        self.write_wave[cells] = waves
        self.write_sequence[cells] = (self.waits.issued["lgkmcnt"] + 1)[waves]
        np.copyto(self.last_write, self.waits.issued["lgkmcnt"] + 1, where=self.state.group)

    def barrier(self, released: np.ndarray) -> None:
        """These waves passed a barrier: note reads still outstanding, open a new epoch."""
        done = self.waits.done["lgkmcnt"]
        self.any_unpublished |= bool((self.last_write > done)[released].any())
        if (self.waits.issued["lgkmcnt"] > done)[released].any():
            for entry in self.read_log:
                open_read = np.broadcast_to(
                    released[entry.waves] & (entry.sequence > done)[entry.waves], entry.cells.shape
                )
                if open_read.any():
                    self.any_unretired = True
                    where, holder = entry.cells[open_read], np.broadcast_to(entry.waves, entry.cells.shape)[open_read]
                    self.unretired[where] = holder
                    self.unretired_sequence[where] = entry.sequence[holder]
        self.read_log = [e for e in self.read_log if (e.group & ~released).any()]
        self.unseen = [e for e in self.unseen if (e.group & ~released).any()]
        self.epoch[released] += 1


class Checks:
    """All shadow state of one batch of workgroups."""

    def __init__(self, lds: np.ndarray, state: State, waves_per_group: int, granule: int, report: object) -> None:
        self.report = report
        self.waits = Waits(state, report)
        self.lds = LdsShadow(lds, state, self.waits, report, waves_per_group=waves_per_group, granule=granule)

    def reset(self) -> None:
        """Ready for another batch."""
        self.waits.reset()
        self.lds.reset()

    def barrier(self, released: np.ndarray) -> None:
        """Waves [waves] bool that a barrier let go."""
        self.lds.barrier(released)
        self.waits.barrier(released)
