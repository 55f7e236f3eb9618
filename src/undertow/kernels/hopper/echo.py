"""Whether what was built and launched is what the config resolved, as the objects and launches themselves say it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from ...problem import Problem
from .. import watch
from ..spec import Built, Config
from .build import Entry, object_name
from .geometry import Geometry, dq_tiles, key_tiles, launches

STAGES = ("prepare", "main", "dq", "finish")
NAME = re.compile(r"(main|dq)_(\d+)_(\d+)_([a-z]+\d+)_q(\d+)_kv(\d+)_(\w+)")
NAMED = ("kind", "head_dim_qk", "head_dim_v", "dtype", "tile_q", "tile_kv", "build")
CUDA_ELF = re.compile(rb"\x7fELF.{14}\xbe\x00", re.DOTALL)
INFO = {0x2F: ("registers", 1), 0x11: ("stack_bytes", 1), 0x10: ("threads", 0)}
"""Attribute of a .nv.info section -> what it is, and which of its words holds it (EIATTR_* of NVIDIA's ELF)."""
REGISTERS = 64 * 1024


def built(problem: Problem, config: Config, seen: list[tuple[str, Any]]) -> Built:
    """The figures of a backward's launches, and how they differ from the config.

    A main kernel's name, registers and threads are those of the object or the cubin that ran: 240 registers for the
    consumers exist only where the kernel begins with `REGISTERS` shared out evenly, else it hangs.
    """
    ran = [(stage, what) for stage, what in seen if stage in STAGES]
    wanted = list(_wanted(problem, config))
    orders = [" ".join(stage for stage, _ in x) for x in (ran, wanted)]
    found = [] if orders[0] == orders[1] else [f"launched {orders[0] or 'nothing'}, wanted {orders[1]}"]
    stages: dict[str, dict[str, Any]] = {}
    for n, (stage, what) in enumerate(ran):
        label = stage if stage not in stages else f"{stage} {n}"
        have = stages[label] = _figures(*what) if isinstance(what, tuple) else watch.figures(what)
        resolved = wanted[n][1] if n < len(wanted) and wanted[n][0] == stage else {}
        wrong = {name: value for name, value in resolved.items() if have.get(name) != value}
        found += [f"{label} has {name} {have.get(name)}, wanted {value}" for name, value in wrong.items()]
    return Built(stages, tuple(found))


def _wanted(problem: Problem, config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """(stage, figures) of every launch in order; UNIT is that of contiguous tensors, head dims being multiples of 8."""
    g: Geometry = config.switch("geometry")
    yield "prepare", {
        "TILE_Q": g.tile_q, "TILE_KV": g.tile_kv, "TILE_ELEMENTS": g.tile_q * g.d_qk,
        "HEAD_DIM_V": problem.head_dim_v, "TOP_LEFT": problem.band.align == "top_left",
        "UNIT": 8,
    }  # fmt: skip
    for kind, own in launches(g) if problem.total_q and problem.total_k else ():
        yield kind, _resolved(problem, config, kind, own)
    if g.dq:
        yield "finish", {"HEAD_DIM_QK": problem.head_dim_qk, "D_QK": g.d_qk, "TILE_Q": g.tile_q, "UNIT": 8}


def _resolved(problem: Problem, config: Config, kind: str, own: Geometry) -> dict[str, Any]:
    tiles, heads = (key_tiles, problem.nheads_kv) if kind == "main" else (dq_tiles, problem.nheads_q)
    threads, blocks = 32 * config.num_warps, min(tiles(problem, own) * heads, config.switch("blocks"))
    launch = {"threads": threads, "registers": REGISTERS // threads // 8 * 8, "blocks": blocks}
    return _named(object_name(own, kind)) | launch


def _figures(entry: Entry, blocks: int) -> dict[str, Any]:
    return _named(entry.name) | _machine(entry.code()) | {"blocks": blocks}


def _named(name: str) -> dict[str, Any]:
    parts = zip(NAMED, NAME.fullmatch(name).groups(), strict=True)
    return {key: int(value) if value.isdecimal() and key != "build" else value for key, value in parts}


def _machine(code: bytes) -> dict[str, int]:
    """Registers, stack and threads of the one kernel in an object or a cubin."""
    elf = code[CUDA_ELF.search(code).start() :]
    (table,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<3H", elf, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", elf, table + n * size) for n in range(count)]
    infos = (elf[at : at + n] for name, at, n in sections if elf.startswith(b".nv.info", sections[names][1] + name))
    return dict(pair for info in infos for pair in _attributes(info))


def _attributes(info: bytes) -> Iterator[tuple[str, int]]:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # `size` bytes follow; else the value is in the place of the size
            if attribute in INFO:
                name, word = INFO[attribute]
                yield name, struct.unpack_from("<I", info, at + 4 * word)[0]
            at += size
