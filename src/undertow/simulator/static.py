"""Loops of machine code, found without running it, and what each of them executes a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from .asm import Instruction, Module
from .report import group_of

GROUPS = ("mfma", "accvgpr", "spill", "lds", "vmem", "atomic", "smem", "barrier", "wait", "valu", "salu")


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop: its first and last line of the text, whether it holds no other loop, and static counts of its body."""

    first_line: int
    last_line: int
    innermost: bool
    counts: dict[str, int]
    source: str | None = None
    compare_and_swap: bool = False


def natural_loops(successors: Sequence[Sequence[int]], entry: int = 0) -> list[tuple[int, set[int]]]:
    """(header, body) of every natural loop of a block graph; loops with one header are one loop."""
    order = _reverse_postorder(successors, entry)
    position = {block: n for n, block in enumerate(order)}
    predecessors: dict[int, list[int]] = {b: [] for b in order}
    for block in order:
        for target in successors[block]:
            predecessors[target].append(block)
    dominator = _dominators(order, position, predecessors)
    bodies: dict[int, set[int]] = {}
    for block in order:
        for header in successors[block]:
            if _dominates(dominator, header, block):
                _grow(bodies.setdefault(header, {header}), block, predecessors)
    return sorted(bodies.items())


def _grow(body: set[int], latch: int, predecessors: dict[int, list[int]]) -> None:
    """Add everything that reaches the latch without passing the header."""
    stack = [latch]
    while stack:
        inner = stack.pop()
        if inner not in body:
            body.add(inner)
            stack.extend(predecessors[inner])


def _reverse_postorder(successors: Sequence[Sequence[int]], entry: int) -> list[int]:
    seen, out, stack = {entry}, [], [(entry, iter(successors[entry]))]
    while stack:
        block, rest = stack[-1]
        target = next(rest, None)
        if target is None:
            out.append(block)
            stack.pop()
        elif target not in seen:
            seen.add(target)
            stack.append((target, iter(successors[target])))
    return out[::-1]


def _dominators(order: list[int], position: dict[int, int], predecessors: dict[int, list[int]]) -> dict[int, int]:
    """Immediate dominators by the iterative two-finger intersection."""
    dominator = {order[0]: order[0]}

    def meet(first: int, second: int) -> int:
        while first != second:
            if position[first] > position[second]:
                first = dominator[first]
            else:
                second = dominator[second]
        return first

    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = reduce(meet, [p for p in predecessors[block] if p in dominator])
            if dominator.get(block) != new:
                dominator[block], changed = new, True
    return dominator


def _dominates(dominator: dict[int, int], first: int, second: int) -> bool:
    while second != first:
        if dominator[second] == second:
            return False
        second = dominator[second]
    return True


def basic_blocks(instructions: Sequence[Instruction], entry: int) -> tuple[list[range], list[list[int]]]:
    """Blocks of instruction indices that can be reached from `entry`, and their successors."""
    leaders, work, seen = {entry}, [entry], set()
    while work:
        at = work.pop()
        while at < len(instructions) and at not in seen:
            seen.add(at)
            x = instructions[at]
            if x.target is not None:
                leaders.add(x.target)
                work.append(x.target)
                if x.opcode == "s_branch":
                    break
                leaders.add(at + 1)
            elif x.opcode in ("s_endpgm", "s_setpc_b64", "s_swappc_b64"):
                break
            at += 1
    starts = sorted(leader for leader in leaders if leader < len(instructions) and leader in seen)
    blocks, number = [], {}
    for n, start in enumerate(starts):
        stop = start + 1
        limit = starts[n + 1] if n + 1 < len(starts) else len(instructions)
        while stop < limit and instructions[stop - 1].target is None and instructions[stop - 1].opcode != "s_endpgm":
            stop += 1
        number[start] = n
        blocks.append(range(start, stop))
    edges = []
    for block in blocks:
        last = instructions[block[-1]]
        targets = [] if last.target is None else [last.target]
        if last.opcode not in ("s_branch", "s_endpgm", "s_setpc_b64"):
            targets.append(block[-1] + 1)
        edges.append([number[t] for t in targets if t in number])
    return blocks, edges


def find_loops(module: Module, entry: int) -> tuple[Loop, ...]:
    """Every loop of a kernel, in text order, with what its body holds."""
    blocks, edges = basic_blocks(module.instructions, entry)
    start = next(n for n, block in enumerate(blocks) if block[0] == entry)
    found = natural_loops(edges, start)
    headers = {header for header, _ in found}
    loops = []
    for header, body in found:
        inside = [module.instructions[i] for b in sorted(body) for i in blocks[b]]
        lines = [x.line for x in inside]
        loops.append(
            Loop(
                min(lines),
                max(lines),
                not (headers & body - {header}),
                count_groups(inside),
                _common_source(inside),
                any("cmpswap" in x.opcode for x in inside),
            )
        )
    return tuple(sorted(loops, key=lambda x: (x.first_line, -x.last_line)))


def count_groups(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Static counts by group; SGPR spills to lanes of a vector register count apart."""
    counts = Counter(group_of(x.opcode) for x in instructions)
    out = {name: counts.get(name, 0) for name in GROUPS}
    out["lane_moves"] = sum(x.opcode in ("v_readlane_b32", "v_writelane_b32") for x in instructions)
    return out


def _common_source(instructions: Sequence[Instruction]) -> str | None:
    """The source line that most instructions of a loop carry."""
    names = Counter(x.source for x in instructions if x.source)
    return names.most_common(1)[0][0] if names else None
