"""How time is taken: device events behind a spin, all calls in turn, a matmul among them, idle between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

CYCLES_PER_MS = 2_000_000
"""Of a GPU at 2 GHz: a slower clock spins longer, which only hides more of the host."""

SPIN_CYCLES = 1_000_000
HOST_MARGIN = 1.5
LONG = 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how gently to time.

    `spin_ms` of device spin before a call hide the host's launch work; a call whose host work takes longer gets a
    longer spin. `idle` is the pause after a call, in its own durations. `sustained_s` asks for back-to-back runs of
    that many seconds as well, where a chip is limited by power.
    """

    rounds: int = 15
    warmup: int = 2
    spin_ms: float = 3.0
    idle: float = 2.0
    sustained_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Participant:
    """One call of the loop. `before` runs untimed ahead of every call, `check` after the last timed one."""

    call: Callable[[], None]
    before: Callable[[], None] = lambda: None
    check: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class Samples:
    """Milliseconds of every timed call, the spin they had, what `check` said, and the mean of a sustained run."""

    ms: tuple[float, ...]
    spin_ms: float
    fault: str = ""
    sustained_ms: float | None = None

    @property
    def median(self) -> float:
        """The middle of the timed calls."""
        return median(self.ms)

    @property
    def minimum(self) -> float:
        """The fastest timed call."""
        return min(self.ms)


def round_robin(loop: Mapping[str, Participant], device: torch.device, pace: Pace) -> dict[str, Samples]:
    """Time every participant once a round, in one process; each round starts one place later in the list."""
    names = list(loop)
    spins = {name: _warm(loop[name], device, pace) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    faults = dict.fromkeys(names, "")
    for turn in range(pace.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            loop[name].before()
            taken = _timed(loop[name].call, device, spins[name])
            times[name].append(taken)
            if turn == pace.rounds - 1:
                faults[name] = loop[name].check()
            time.sleep(pace.idle * taken / 1e3)
    samples = {name: Samples(tuple(times[name]), spins[name], faults[name]) for name in names}
    if not pace.sustained_s:
        return samples
    return {n: replace(s, sustained_ms=_sustained(loop[n].call, device, s.median, pace)) for n, s in samples.items()}


def sm_ghz(participant: Participant, device: torch.device, times: int = 5) -> float:
    """The SM clock right behind a call: of a spin of a known number of clocks, before the governor answers; 0 on a CPU.

    A GPU that is limited by power lowers the clock under load, and says so late; a spin counts it.
    """
    if device.type != "cuda":
        return 0.0
    found = []
    for _ in range(times):
        participant.before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        participant.call()
        start.record()
        torch.cuda._sleep(SPIN_CYCLES)
        end.record()
        end.synchronize()
        found.append(SPIN_CYCLES / start.elapsed_time(end) / 1e6)
    return median(found)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def yardstick(device: torch.device) -> tuple[str, Callable[[], None], int]:
    """(name, call, FLOPs) of the matmul in the loop: 8192^3 bf16 on a GPU, 512^3 fp32 on a CPU, random operands."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    generator = torch.Generator(device).manual_seed(1)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return f"matmul {size}^3 {str(dtype).removeprefix('torch.')}", lambda: torch.mm(a, b, out=product), 2 * size**3


def _warm(participant: Participant, device: torch.device, pace: Pace) -> float:
    """Warm-up calls; returns the spin that covers the host's share of the last one."""
    spin = pace.spin_ms
    for _ in range(max(1, pace.warmup)):
        participant.before()
        synchronize(device)
        start = time.perf_counter()
        participant.call()
        spin = max(pace.spin_ms, HOST_MARGIN * 1e3 * (time.perf_counter() - start))
        synchronize(device)
    return spin if device.type == "cuda" else 0.0


def _timed(call: Callable[[], None], device: torch.device, spin_ms: float) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(spin_ms * CYCLES_PER_MS))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _sustained(call: Callable[[], None], device: torch.device, ms: float, pace: Pace) -> float:
    """Mean milliseconds of calls queued back to back for `sustained_s`; short calls may be held up by the host."""
    times = max(3, int(1e3 * pace.sustained_s / max(ms, 1e-3)))
    synchronize(device)
    total = _timed(lambda: [call() for _ in range(min(times, LONG * 8))], device, pace.spin_ms)
    return total / min(times, LONG * 8)
