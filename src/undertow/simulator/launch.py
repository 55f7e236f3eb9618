"""Front doors: run a Triton kernel, assembly text, or a code object on CPU tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import asm
from .arena import MAX_BYTES, Arena
from .bind import Binding
from .machine import LDS_LIMITS, MAX_STEPS, Machine, Program, batch_size
from .report import Collector, Report, count
from .state import LANES, u32

MAX_THREADS = 1024
MAX_WORKGROUPS = 1 << 20
KNOWN_TARGETS = ("gfx942", "gfx950")
LIMITS = {
    "user_sgpr_count": 32,
    "user_sgpr_kernarg_preload_length": 16,
    "user_sgpr_kernarg_preload_offset": 1 << 10,
    "kernarg_size": 1 << 16,
    "private_segment_fixed_size": 1 << 17,
}
LDS_SIZES = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2}


@dataclass(frozen=True, slots=True)
class Options:
    """How to simulate.

    `outputs` names tensors whose every element the launch must write. `seed` shuffles the order of waves and of lanes
    that share memory. `allow` demotes kinds of findings to notes. `bank_model` counts LDS bank conflicts (slower).
    """

    checks: bool = True
    seed: int | None = None
    outputs: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    bank_model: bool = False
    max_steps: int = MAX_STEPS
    max_bytes: int = MAX_BYTES


DEFAULT = Options()
Grid = int | Sequence[int]
Arguments = Mapping[str, object] | Sequence[object]


def isa(
    text: str,
    kernel: str | None,
    grid: Grid,
    block: Grid,
    args: Arguments,
    *,
    dynamic_lds: int = 0,
    target: str | None = None,
    options: Options = DEFAULT,
) -> Report:
    """Run a kernel from LLVM assembly text with `.amdgpu_metadata` (what Triton, FlyDSL and hipcc write).

    grid: workgroups (int or up to 3); block: threads; args: one value per kernel argument, in order or by name: CPU
    torch tensors and numpy arrays (written back), numbers, bytes for structs, None for a null pointer. dynamic_lds:
    bytes of LDS that the launch adds to what the kernel declares.

    Raises ValueError for bad arguments, NotImplementedError for an instruction that is not modelled, SimulationError
    for a runaway program.
    """
    module = asm.parse(text)
    return simulate_module(module, kernel, grid, block, args, dynamic_lds=dynamic_lds, target=target, options=options)


def code_object(
    path: str | Path,
    kernel: str | None,
    grid: Grid,
    block: Grid,
    args: Arguments,
    *,
    dynamic_lds: int = 0,
    options: Options = DEFAULT,
) -> Report:
    """Run a kernel of an AMD ELF code object (.co, .hsaco); arguments as for `isa`.

    Needs the `simulator` extra (tinygrad) or llvm-objdump 19 or later; RuntimeError names both when neither is there.
    """
    from .disassemble import load

    return simulate_module(
        load(Path(path).read_bytes()), kernel, grid, block, args, dynamic_lds=dynamic_lds, options=options
    )


def triton(
    jit_fn: object,
    grid: Grid | Callable,
    args: Arguments,
    target: str = "gfx942",
    *,
    options: Options = DEFAULT,
    **constexprs: object,
) -> Report:
    """Compile a @triton.jit function for an AMD target without a GPU, and run it on CPU tensors (written back).

    args: the run-time arguments in order or by name; constexprs: tl.constexpr parameters and launch options such as
    num_warps. grid: a tuple, or a function of the constexprs. Raises as `isa` does.
    """
    from .triton_front import compile_kernel

    compiled = compile_kernel(jit_fn, args, target, constexprs)
    if callable(grid):
        grid = grid(compiled.meta)
    return isa(
        compiled.text,
        compiled.name,
        grid,
        compiled.threads,
        compiled.values,
        dynamic_lds=compiled.lds_bytes,
        target=target,
        options=options,
    )


def three(name: str, value: Grid) -> tuple[int, int, int]:
    """Normalise a grid or block size."""
    items = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(items) <= 3 or any(not isinstance(v, int | np.integer) or v < 0 for v in items):
        raise ValueError(f"{name}={value!r}: one to three non-negative integers are wanted")
    return tuple(int(v) for v in (*items, 1, 1)[:3])


def scan_registers(module: asm.Module) -> tuple[int, int, int]:
    """Vector and accumulator registers that the text uses, and its smallest LDS access in bytes (at most 4)."""
    top = {"v": 0, "a": 0}
    granule = 4
    for x in module.instructions:
        for operand in x.operands:
            if operand.kind in top:
                top[operand.kind] = max(top[operand.kind], operand.index + operand.count)
        if x.opcode.startswith(("ds_read_", "ds_write_")):
            granule = min(granule, LDS_SIZES.get(x.opcode.split("_")[2], 4))
    return top["v"], top["a"], granule


def make_program(module: asm.Module, kernel: asm.Kernel, target: str | None, extra_lds: int = 0) -> Program:
    """Collect what a launch needs to know about the code."""
    chosen = target or module.target or "gfx942"
    if chosen not in KNOWN_TARGETS:
        raise NotImplementedError(f"target={chosen!r}: the simulator models {', '.join(KNOWN_TARGETS)}")
    d = kernel.directives
    if "user_sgpr_count" not in d:
        raise ValueError(f"kernel {kernel.name!r}: the text has no .amdhsa_* directives, which say how registers start")
    for name, limit in LIMITS.items():
        if not 0 <= d.get(name, 0) <= limit:
            raise ValueError(f"kernel {kernel.name!r}: .amdhsa_{name} {d[name]}; the limit is {limit}")
    reach = max((a.offset + a.size for a in kernel.arguments), default=0)
    if reach > LIMITS["kernarg_size"] or any(a.size < 0 or a.offset < 0 for a in kernel.arguments):
        raise ValueError(f"kernel {kernel.name!r}: arguments reach byte {reach}; the limit is {LIMITS['kernarg_size']}")
    if d.get("float_denorm_mode_16_64", 3) != 3:
        raise NotImplementedError(f".amdhsa_float_denorm_mode_16_64 {d['float_denorm_mode_16_64']}: only 3 is modelled")
    mode = d.get("float_denorm_mode_32", 0)
    if mode not in (0, 3):
        raise NotImplementedError(f".amdhsa_float_denorm_mode_32 {mode}: only 0 (flush) and 3 (keep) are modelled")
    vgprs, agprs, granule = scan_registers(module)
    lds = d.get("group_segment_fixed_size", 0) + extra_lds
    limit = LDS_LIMITS.get(chosen, 64 << 10)
    if lds > limit:
        raise ValueError(f"kernel {kernel.name!r} uses {lds} bytes of LDS; {chosen} has {limit}")
    return Program(
        module,
        kernel.entry,
        chosen,
        max(vgprs, 1),
        agprs,
        lds,
        d.get("private_segment_fixed_size", 0),
        mode == 0,
        granule,
    )


def simulate_module(
    module: asm.Module,
    kernel: str | None,
    grid: Grid,
    block: Grid,
    args: Arguments,
    *,
    dynamic_lds: int = 0,
    target: str | None = None,
    options: Options = DEFAULT,
) -> Report:
    """Run a kernel of a parsed module; see `isa`."""
    chosen = module.kernel(kernel)
    program = make_program(module, chosen, target, dynamic_lds)
    grid3, block3 = three("grid", grid), three("block", block)
    threads = int(np.prod(block3))
    groups = int(np.prod(grid3))
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"block={block!r}: {threads} threads; 1 to {MAX_THREADS} are wanted")
    if groups > MAX_WORKGROUPS:
        raise ValueError(f"grid={grid!r}: {groups} workgroups; the limit is {MAX_WORKGROUPS}")
    arena = Arena(options.max_bytes)
    binding = Binding(arena, _named(args, chosen))
    _check_outputs(options.outputs, binding)
    hidden = {
        f"hidden_{k}_{a}": v
        for k, s in (("block_count", grid3), ("group_size", block3))
        for a, v in zip("xyz", s, strict=True)
    }
    hidden["hidden_grid_dims"] = 3
    segment = binding.pack(chosen.arguments, chosen.directives.get("kernarg_size", 0), hidden)
    kernarg = arena.add(segment, "kernarg")
    packet = arena.add(_dispatch_packet(grid3, block3), "dispatch packet")
    arena.freeze()
    for name in options.outputs:
        arena.expect_writes(binding.halves(binding.tensors[name]))
    collector = Collector(frozenset(options.allow))
    start = time.perf_counter()
    with np.errstate(all="ignore"):
        totals = _run_batches(
            program, chosen, arena, collector, options=options, launch=(grid3, block3, segment, kernarg, packet)
        )
    seconds = time.perf_counter() - start
    if options.checks:
        _check_written(options.outputs, binding, collector)
    binding.write_back()
    steps, executed, traffic, banks = totals
    opcodes, families, sources, moved = count(module.instructions, executed, traffic)
    buffers = {b.name: {"bytes": b.nbytes, "loaded": b.loaded, "stored": b.stored} for b in arena.buffers}
    resources = {k: v for k, v in chosen.metadata.items() if k in RESOURCES}
    return Report(
        chosen.name,
        program.target,
        grid3,
        threads,
        steps,
        seconds,
        collector.findings(),
        opcodes,
        families,
        sources,
        moved,
        buffers,
        banks if options.bank_model else None,
        resources,
    )


RESOURCES = (
    "vgpr_count",
    "agpr_count",
    "sgpr_count",
    "vgpr_spill_count",
    "sgpr_spill_count",
    "group_segment_fixed_size",
    "private_segment_fixed_size",
)


def _named(args: Arguments, kernel: asm.Kernel) -> dict[str, object]:
    if isinstance(args, Mapping):
        return dict(args)
    visible = [a for a in kernel.arguments if not a.kind.startswith("hidden_")]
    names = [a.name or f"arg{n}" for n, a in enumerate(visible)]
    if len(args) != len(names):
        raise ValueError(f"args: {len(args)} values for the {len(names)} arguments of {kernel.name!r}")
    return dict(zip(names, args, strict=True))


def _check_outputs(outputs: Sequence[str], binding: Binding) -> None:
    for name in outputs:
        if name not in binding.tensors:
            raise ValueError(
                f"outputs: {name!r} is not a tensor argument; those are {', '.join(binding.tensors) or 'none'}"
            )


def _check_written(outputs: Sequence[str], binding: Binding, collector: Collector) -> None:
    for name in outputs:
        tensor = binding.tensors[name]
        missing = np.flatnonzero(~binding.arena.written[binding.halves(tensor)].all(1))
        if missing.size:
            first = tuple(int(i) for i in np.unravel_index(missing[0], tensor.shape))
            total = int(np.prod(tensor.shape))
            text = f"{missing.size} of {total} elements of {name} were never written; the first is {list(first)}"
            collector.add_at("output-unwritten", None, None, text=text, count=int(missing.size), key=name)


def _dispatch_packet(grid: tuple[int, int, int], block: tuple[int, int, int]) -> np.ndarray:
    """The AQL dispatch packet fields that kernels read: workgroup and grid sizes."""
    packet = np.zeros(64, np.uint8)
    packet[4:10] = np.array(block, np.uint16).view(np.uint8)
    packet[12:24] = np.array([g * b for g, b in zip(grid, block, strict=True)], u32).view(np.uint8)
    return packet


def _run_batches(
    program: Program, kernel: asm.Kernel, arena: Arena, collector: Collector, *, options: Options, launch: tuple
) -> tuple[int, np.ndarray, np.ndarray, int]:
    """Steps, executions and bytes of every instruction, modelled bank conflict cycles."""
    grid, block, segment, kernarg, packet = launch
    threads = int(np.prod(block))
    waves = -(-threads // LANES)
    count = int(np.prod(grid))
    size = batch_size(program, waves, count) if count else 0
    machine = None
    for first in range(0, count, max(size, 1)):
        if machine is None:
            machine = Machine(program, arena, collector, options, waves=size * waves, waves_per_group=waves)
        machine.restart()
        numbers = first + np.arange(size)
        ids = np.stack([numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])])
        alive = np.repeat(numbers < count, waves)
        collector.place = lambda wave, ids=ids: (tuple(int(v) for v in ids[:, wave // waves]), wave % waves)
        initialise(machine, kernel, np.repeat(ids, waves, axis=1), block, (segment, kernarg, packet))
        machine.run(alive)
    if machine is None:
        zero = np.zeros(len(program.module.instructions), np.int64)
        return 0, zero, zero, 0
    return machine.steps, machine.executed, machine.traffic, machine.bank_cycles


def initialise(
    machine: Machine, kernel: asm.Kernel, ids: np.ndarray, block: tuple[int, int, int], memory: tuple
) -> None:
    """Registers as the hardware hands them to a wave: user SGPRs, workgroup ids, packed thread ids, EXEC."""
    segment, kernarg, packet = memory
    state, d = machine.state, kernel.directives
    at = 0
    for name, words, value in (
        ("private_segment_buffer", 4, 0),
        ("dispatch_ptr", 2, packet),
        ("queue_ptr", 2, 0),
        ("kernarg_segment_ptr", 2, kernarg),
        ("dispatch_id", 2, 0),
        ("flat_scratch_init", 2, 0),
        ("private_segment_size", 1, 0),
    ):
        if d.get(f"user_sgpr_{name}", 0):
            for j in range(words):
                state.s[:, at + j] = (value >> (32 * j)) & 0xFFFFFFFF
            at += words
    length, skip = d.get("user_sgpr_kernarg_preload_length", 0), d.get("user_sgpr_kernarg_preload_offset", 0)
    if length:
        preload = np.zeros(4 * (skip + length), np.uint8)
        taken = segment[: preload.size]
        preload[: taken.size] = taken
        state.s[:, at : at + length] = preload.view(u32)[skip:]
    at = d["user_sgpr_count"]
    for axis, name in enumerate("xyz"):
        if d.get(f"system_sgpr_workgroup_id_{name}", int(axis == 0)):
            state.s[:, at] = ids[axis]
            at += 1
    waves = machine.waves_per_group
    thread = np.arange(waves * LANES)
    x, y, z = thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1])
    packed = x | (y << 10) | (z << 20) if d.get("system_vgpr_workitem_id", 0) else x
    state.v[0] = np.tile(packed.astype(u32).reshape(waves, LANES), (state.waves // waves, 1))
    live = (thread < block[0] * block[1] * block[2]).reshape(waves, LANES)
    bits = np.packbits(live, axis=1, bitorder="little").view(np.uint64)[:, 0]
    state.exec[...] = np.tile(bits, state.waves // waves)
    state.exec_changed()
