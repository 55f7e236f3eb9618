"""Mutants of a kernel's machine code, and what the simulator says about each over a matrix of problems.

`python tests/simulator/mutation.py` plants all of them (about ten minutes) and rewrites mutation_record.json.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from undertow.instruments import inputs
from undertow.instruments.verify import compare
from undertow.kernels import alloc
from undertow.kernels import triton as family
from undertow.kernels.triton import host
from undertow.layout import shapes
from undertow.problem import Band, Problem
from undertow.simulator import Options, SimulationError, UnsupportedError, asm, simulate_module
from undertow.simulator.machine import TABLE
from undertow.simulator.triton_front import compile_kernel
from undertow.target import TARGETS

OPTIONS = Options(max_steps=200_000)
# Tails in both directions, a segment of one row, an empty one, queries that see no key, more queries than keys.
LENGTHS = (((40, 70), (57, 70)), ((33, 1, 0, 65), (13, 40, 7, 130)), ((100, 37), (130, 77)))


@dataclass
class Case:
    """One problem with everything but the kernel under test computed."""

    problem: Problem
    tensors: dict
    launch: object
    values: dict
    text: str
    lds_bytes: int
    threads: int
    before: dict
    after: list


def make_case(lengths_q, lengths_k, target="gfx942"):
    """dk/dv kernel of a causal packed problem at 64/64 with two query heads a kv head."""
    problem = Problem.packed(
        lengths_q, lengths_k, nheads_q=2, nheads_kv=1, head_dim_qk=64, head_dim_v=64, band=Band(None, 0)
    )
    tensors = inputs.make(problem)
    cpu = torch.device("cpu")
    expected = shapes(problem)
    for name in ("out", "lse", "dq", "dk", "dv"):
        tensors[name] = alloc.output(
            expected[name], torch.float32 if name == "lse" else torch.bfloat16, cpu, poison=True
        )
    tensors["dsink"] = None
    config = family.config(problem, TARGETS[target], "backward")
    scratch = alloc.scratch(family.plan_workspace(problem, config), cpu)
    forward = list(host.forward_launches(problem, family.config(problem, TARGETS[target], "forward"), tensors))
    backward = list(host.backward_launches(problem, config, tensors, scratch))
    at = next(n for n, launch in enumerate(backward) if launch.stage == "dkdv")
    for launch in (*forward, *backward[:at]):
        run_launch(launch, target)
    launch, after = backward[at], backward[at + 1 :]
    compiled = compile_kernel(launch.kernel, launch.args, target, launch.meta)
    written = {"dk": tensors["dk"], "dv": tensors["dv"], "dq_acc": scratch["dq_acc"]}
    before = {n: t.clone() for n, t in written.items()}
    return Case(
        problem,
        tensors | {"dq_acc": scratch["dq_acc"]},
        launch,
        compiled.values,
        compiled.text,
        compiled.lds_bytes,
        compiled.threads,
        before,
        after,
    )


def run_launch(launch, target):
    from undertow import simulator

    report = simulator.triton(
        launch.kernel, (launch.programs,), launch.args, target, options=Options(checks=False), **launch.meta
    )
    assert report.ok


def run(case, module, options):
    """The report of one run of a module on a case."""
    for name, content in case.before.items():
        case.tensors[name].copy_(content)
    grid = (case.launch.programs,)
    return simulate_module(module, None, grid, case.threads, case.values, dynamic_lds=case.lds_bytes, options=options)


def gradients_right(case, target="gfx942"):
    """Whether dq, dk, dv pass the gates of verify."""
    for launch in case.after:
        run_launch(launch, target)
    got = {n: case.tensors[n] for n in ("out", "lse", "dq", "dk", "dv")}
    return all(p.ok for p in compare(case.problem, case.tensors, got))


# ---------------------------------------------------------------------- mutants
def edited(module, index, **changes):
    """The module with one instruction changed."""
    instructions = list(module.instructions)
    instructions[index] = replace(module.instructions[index], **changes)
    return replace(module, instructions=instructions)


def deleted(module, index):
    """Replaced by s_nop."""
    return edited(module, index, opcode="s_nop", encoding="", operands=(asm.Operand("int", value=0),), modifiers={})


def shifted(module, index):
    """An LDS access one element further."""
    old = module.instructions[index]
    paired = "2" in old.opcode.split("_")[1]
    key = "offset1" if paired else "offset"
    step = 1 if paired else 4
    return edited(module, index, modifiers=old.modifiers | {key: str(int(old.modifiers.get(key, 0)) + step)})


def swapped(module, index):
    """A matrix product with A and B exchanged."""
    out, a, b, c = module.instructions[index].operands
    return edited(module, index, operands=(out, b, a, c))


def unmasked(module, index):
    """A select that always takes the value of live lanes: the offset of a masked access, a score inside the band."""
    out, _, live, _ = module.instructions[index].operands
    return edited(module, index, opcode="v_mov_b32", encoding="e64", operands=(out, live))


def is_mask(module, index):
    """A v_cndmask that is not the NaN case of a rounding (whose deletion changes nothing without NaNs)."""
    x = module.instructions[index]
    if x.opcode != "v_cndmask_b32" or x.encoding == "sdwa":
        return False
    mask = x.operands[3]
    for before in reversed(module.instructions[:index]):
        if before.operands and before.operands[0] == mask:
            return not before.opcode.startswith("v_cmp_o_")
    return True


MUTANTS = {
    "s_barrier deleted": (deleted, lambda m, i: m.instructions[i].opcode == "s_barrier"),
    "s_waitcnt deleted": (deleted, lambda m, i: m.instructions[i].opcode == "s_waitcnt"),
    "LDS offset shifted": (shifted, lambda m, i: m.instructions[i].opcode.startswith(("ds_read", "ds_write"))),
    "MFMA operands swapped": (swapped, lambda m, i: m.instructions[i].opcode.startswith("v_mfma")),
    "mask dropped": (unmasked, is_mask),
}


def places(module, kind):
    """Instruction indices of the mutants of a kind."""
    return [x.index for x in module.instructions if MUTANTS[kind][1](module, x.index)]


def mutant(module, kind, index):
    """The module with the fault planted at `index`."""
    return MUTANTS[kind][0](module, index)


def verdict(cases, module, options=OPTIONS):
    """Why a mutant is caught: a finding, a stop, a wrong gradient; None when it survives every case."""
    for number, case in enumerate(cases):
        try:
            report = run(case, module, options)
        except (SimulationError, UnsupportedError, ValueError) as error:
            return f"case {number}: stopped: {error}"
        if not report.ok:
            return f"case {number}: {report.errors[0].kind}"
        if not gradients_right(case):
            return f"case {number}: wrong gradients"
    return None


# ---------------------------------------------------------------------- proofs of survivors, and the record
def effects_of_waits(cases, module):
    """(executions, executions that retired something) of every s_waitcnt over the matrix."""
    executed, useful = Counter(), Counter()
    original = TABLE["s_waitcnt"]

    def observed(builder):
        run_wait, index, waits, group = (
            original(builder),
            builder.instruction.index,
            builder.machine.checks.waits,
            builder.state,
        )

        def step():
            before = {c: done.copy() for c, done in waits.done.items()}
            run_wait()
            executed[index] += 1
            useful[index] += any((done > before[c])[group.group].any() for c, done in waits.done.items())

        return step

    TABLE["s_waitcnt"] = observed
    try:
        for case in cases:
            run(case, module, OPTIONS)
    finally:
        TABLE["s_waitcnt"] = original
    return executed, useful


def proof(index, module, cases, effects):
    """Why a surviving deletion changes nothing on the matrix."""
    executed, useful = effects
    if not executed[index]:
        return "never executed"
    if not useful[index]:
        return f"idle: in all {executed[index]} executions everything it waits for was already complete"
    for seed in (0, 1, 2):
        if verdict(cases, mutant(module, "s_waitcnt deleted", index), replace(OPTIONS, seed=seed)):
            return None
    return "covered: without it a later wait still guarantees every use, in lock-step and in three random wave orders"


def record():
    """Every mutant of the gfx942 dk/dv kernel over the matrix, as the table that the docs quote."""
    cases = [make_case(*lengths) for lengths in LENGTHS]
    module = asm.parse(cases[0].text)
    out = {
        "kernel": "dkdv, 64/64, bf16, causal, packed, 2 query heads a kv head, gfx942",
        "versions": {name: version(name) for name in ("triton", "torch", "numpy")},
        "lengths": LENGTHS,
        "unmodified": verdict(cases, module) or "no finding, gradients right",
        "instructions": len(module.instructions),
    }
    effects = effects_of_waits(cases, module)
    return out | {"mutants": {kind: record_kind(kind, module, cases, effects) for kind in MUTANTS}}


def record_kind(kind, module, cases, effects):
    """One row of the record: all deletions, about forty of the others."""
    every = places(module, kind)
    every = every if "deleted" in kind else every[:: max(1, len(every) // 40)]
    verdicts = {index: verdict(cases, mutant(module, kind, index)) for index in every}
    survivors = [index for index, why in verdicts.items() if why is None]
    return {
        "planted": len(every),
        "killed": len(every) - len(survivors),
        "by": dict(Counter(why.split(": ")[1] for why in verdicts.values() if why).most_common()),
        "survivors": [
            {
                "instruction": module.instructions[i].text,
                "index": i,
                "next": module.instructions[i + 1].text,
                "proof": proof(i, module, cases, effects) if "waitcnt" in kind else None,
            }
            for i in survivors
        ],
    }


def summary(recorded):
    """The record as the rows of a markdown table."""
    rows = ["| fault | planted | caught | by |", "|---|---|---|---|"]
    for kind, row in recorded["mutants"].items():
        rows.append(
            f"| {kind} | {row['planted']} | {row['killed']} | {', '.join(f'{k} {n}' for k, n in row['by'].items())} |"
        )
    return rows


if __name__ == "__main__":
    Path(__file__).with_name("mutation_record.json").write_text(json.dumps(record(), indent=1) + "\n")
