"""A bare machine for tests of single instructions: set registers, run a few lines, read registers."""

from dataclasses import dataclass, field

import numpy as np

from undertow.simulator import Options, asm
from undertow.simulator.arena import Arena
from undertow.simulator.launch import scan_registers
from undertow.simulator.machine import Machine, Program
from undertow.simulator.report import Collector

LANES = 64
FULL = (1 << 64) - 1


@dataclass
class Bench:
    """Registers in: v[n] arrays [waves, 64] or [64], s[n] ints. `buffers` are arrays; their addresses go to `place`."""

    v: dict = field(default_factory=dict)
    a: dict = field(default_factory=dict)
    s: dict = field(default_factory=dict)
    exec_mask: int = FULL
    waves: int = 1
    per_group: int = 1
    lds: int = 0
    scratch: int = 0
    flush32: bool = False
    target: str = "gfx942"
    buffers: dict = field(default_factory=dict)
    place: dict = field(default_factory=dict)  # buffer name -> first SGPR of its address
    options: Options = field(default_factory=Options)
    scc: int = 0

    def run(self, text):
        module = asm.parse(text + "\ns_endpgm\n")
        vgprs, agprs, granule = scan_registers(module)
        vgprs = max([vgprs, *(n + 1 for n in self.v)])
        agprs = max([agprs, *(n + 1 for n in self.a)])
        arena = Arena()
        addresses = {
            n: arena.add(np.ascontiguousarray(x).view(np.uint8), n, x.itemsize) for n, x in self.buffers.items()
        }
        arena.freeze()
        report = Collector(frozenset())
        program = Program(module, 0, self.target, max(vgprs, 1), agprs, self.lds, self.scratch, self.flush32, granule)
        machine = Machine(program, arena, report, self.options, waves=self.waves, waves_per_group=self.per_group)
        machine.restart()
        state = machine.state
        for bank, values in ((state.v, self.v), (state.a, self.a)):
            for number, value in values.items():
                bank[number] = (
                    np.asarray(value).view(np.uint32)
                    if np.asarray(value).itemsize == 4
                    else np.asarray(value, np.uint32)
                )
        for number, value in self.s.items():
            state.s[:, number] = value & 0xFFFFFFFF
        for name, number in self.place.items():
            state.s[:, number], state.s[:, number + 1] = addresses[name] & 0xFFFFFFFF, addresses[name] >> 32
        state.exec[...] = np.uint64(self.exec_mask)
        state.scc[...] = bool(self.scc)
        state.exec_changed()
        with np.errstate(all="ignore"):
            machine.run(np.ones(self.waves, bool))
        self.machine, self.report, self.addresses = machine, report, addresses
        return state

    def memory(self, name, dtype):
        number = list(self.buffers).index(name)
        return self.machine.arena.content(number).view(dtype)

    def kinds(self):
        return sorted({f.kind for f in self.report.findings()})


def bits_of(mask):
    return np.array([(mask >> lane) & 1 for lane in range(LANES)], bool)


PARTIAL = 0x0123_4567_89AB_CDEE  # lane 0 off, irregular
