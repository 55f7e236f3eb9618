"""Mutants of a kernel's machine code, and what the simulator says about each over a matrix of problems."""

from dataclasses import dataclass, replace

import torch

from undertow.instruments import inputs
from undertow.instruments.verify import compare
from undertow.kernels import alloc
from undertow.kernels import triton as family
from undertow.kernels.triton import host
from undertow.layout import shapes
from undertow.problem import Band, Problem
from undertow.simulator import Options, SimulationError, UnsupportedError, asm, simulate_module
from undertow.simulator.triton_front import compile_kernel
from undertow.target import TARGETS

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
    rounding: object = None


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
    backward = {launch.stage: launch for launch in host.backward_launches(problem, config, tensors, scratch)}
    for launch in (*forward, backward["delta"]):
        run_launch(launch, target)
    launch = backward["dkdv"]
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
        backward["round_dq"],
    )


def run_launch(launch, target):
    from undertow import simulator

    report = simulator.triton(
        launch.kernel, (launch.programs,), launch.args, target, options=Options(checks=False), **launch.meta
    )
    assert report.ok


def run(case, module, options):
    """(kinds of findings, right gradients, report) of one run of a module on a case."""
    for name, content in case.before.items():
        case.tensors[name].copy_(content)
    report = simulate_module(
        module, None, (case.launch.programs,), case.threads, case.values, dynamic_lds=case.lds_bytes, options=options
    )
    return report


def gradients_right(case, target="gfx942"):
    """Whether dq, dk, dv pass the gates of verify."""
    run_launch(case.rounding, target)
    got = {n: case.tensors[n] for n in ("out", "lse", "dq", "dk", "dv")}
    return all(p.ok for p in compare(case.problem, case.tensors, got))


def nop(module, index):
    """The module with one instruction replaced by s_nop."""
    old = module.instructions[index]
    return edited(
        module, index, replace(old, opcode="s_nop", encoding="", operands=(asm.Operand("int", value=0),), modifiers={})
    )


def edited(module, index, instruction):
    instructions = list(module.instructions)
    instructions[index] = instruction
    return replace(module, instructions=instructions)


def shifted_offset(module, index, by):
    """An LDS or memory instruction with its offset moved."""
    old = module.instructions[index]
    key = "offset0" if "offset0" in old.modifiers or "offset1" in old.modifiers else "offset"
    return edited(
        module, index, replace(old, modifiers=old.modifiers | {key: str(int(old.modifiers.get(key, 0)) + by)})
    )


def swapped(module, index, first, second):
    """An instruction with two source operands exchanged."""
    old = module.instructions[index]
    operands = list(old.operands)
    operands[first], operands[second] = operands[second], operands[first]
    return edited(module, index, replace(old, operands=tuple(operands)))


def verdict(cases, module, options=Options(max_steps=200_000)):
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
