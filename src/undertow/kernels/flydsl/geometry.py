"""The shape of one build: the knobs a person turns, everything that follows from them, and what does not fit.

Plain Python. A `Geometry` is frozen and hashable: with the features of a call it is the compile key, and `echo()` is
what the launch and the probe must agree on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...target import TARGETS

WAVE = 64
TILE = 16  # rows and columns of a 16x16 matrix instruction
MFMA_K = {"gfx942": 16, "gfx950": 32}
ROW_PAD = {"gfx942": 4, "gfx950": 8}  # elements behind each LDS row: 8-byte reads there, 16-byte reads here
ACCUMULATIONS = ("fp32", "bf16", "none", "owner")
SCHEDULES = ("compiler", "interleave")
MAX_THREADS = 1024
DTYPES = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The knobs. Each changes the shape of the code or its instructions.

    qk_head_dim       columns of Q and K, so of dQ and dK
    v_head_dim        columns of V and dO, so of dV
    block_m           query rows a step of the loop takes
    block_n           keys a workgroup owns
    num_waves         waves of 64 lanes a workgroup has
    dq_groups         parts of the key block that are summed into dQ apart from one another, each by its own waves
    transposed_tiles  whether Q and dO are stored in LDS a second time, transposed, for the dK and dV products
    pipeline          whether the next query tile is fetched, and stored to a second LDS buffer, behind the current one
    schedule          who orders the score products: the compiler, or hints and a raised priority ("interleave")
    sched_steps       how many (LDS reads, MFMA) groups the hints of schedule "interleave" ask for
    kv_major          whether the key tile is the slowest axis of the grid, so that the longest blocks start first

    `accumulate` is where dQ is summed: "fp32" or "bf16" atomics into scratch, or "none" where another kernel owns dQ.
    That kernel's geometry says "owner": it owns block_n query rows and takes block_m keys a step.
    """

    qk_head_dim: int = 192
    v_head_dim: int = 128
    block_m: int = 32
    block_n: int = 128
    num_waves: int = 8
    dq_groups: int = 1
    transposed_tiles: bool = False
    pipeline: bool = True
    schedule: str = "compiler"
    sched_steps: int = 1
    kv_major: bool = True
    accumulate: str = "fp32"
    arch: str = "gfx942"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(fault)

    def _faults(self) -> list[str]:
        found = [text for text, bad in self._names() if bad]
        if not found:
            found = [text for text, bad in self._divisions() if bad]
        if not found and self.lds_bytes > TARGETS[self.arch].lds_bytes:
            found = [f"LDS: {self.lds_text()}, {self.arch} has {TARGETS[self.arch].lds_bytes}"]
        return found

    def _names(self) -> list[tuple[str, bool]]:
        checks = [
            (f"arch is {self.arch!r}, wanted one of {tuple(MFMA_K)}", self.arch not in MFMA_K),
            (f"dtype is {self.dtype!r}, wanted one of {DTYPES}", self.dtype not in DTYPES),
            (f"accumulate is {self.accumulate!r}, wanted one of {ACCUMULATIONS}", self.accumulate not in ACCUMULATIONS),
            (f"schedule is {self.schedule!r}, wanted one of {SCHEDULES}", self.schedule not in SCHEDULES),
            ("accumulate='bf16' needs dtype='bf16'", self.accumulate == "bf16" and self.dtype != "bf16"),
        ]
        for name in ("qk_head_dim", "v_head_dim"):
            dim = getattr(self, name)
            checks.append((f"{name}={dim}, wanted a multiple of 32 up to 256", dim % 32 != 0 or not 32 <= dim <= 256))
        for name in ("block_m", "block_n", "num_waves", "dq_groups", "sched_steps"):
            checks.append((f"{name}={getattr(self, name)}, wanted at least 1", getattr(self, name) < 1))
        return checks

    def _divisions(self) -> list[tuple[str, bool]]:
        nw, groups, wide = self.num_waves, self.dq_groups, MFMA_K[self.arch]
        tiles, row = self.q_tiles * self.qk_tiles, self.threads_per_row
        checks = [
            (f"num_waves={nw} is {nw * WAVE} threads, at most {MAX_THREADS}", nw * WAVE > MAX_THREADS),
            (f"block_m={self.block_m} % {wide} != 0", self.block_m % wide != 0),
            (f"block_n={self.block_n} % (num_waves={nw} * 16) != 0", self.block_n % (nw * TILE) != 0),
            (f"block_m={self.block_m} rows do not divide {nw * WAVE} threads", (nw * WAVE) % self.block_m != 0),
        ]
        if not self.makes_dq:
            return checks
        checks += [
            (f"num_waves={nw} % dq_groups={groups} != 0", nw % groups != 0),
            (
                f"block_n={self.block_n} % (dq_groups={groups} * {wide}) != 0",
                self.block_n % (groups * wide) != 0,
            ),
        ]
        if not any(bad for _, bad in checks):
            waves = nw // groups
            share = f"(block_m={self.block_m}/16)*(qk_head_dim={self.qk_head_dim}/16) = {tiles} dQ tiles"
            checks.append((f"{share} % (num_waves={nw}/dq_groups={groups}) = {tiles % waves}", tiles % waves != 0))
            each = max(1, tiles // waves)
            checks.append((
                f"{share}: {each} a wave do not stay inside one row of {self.qk_tiles}", self.qk_tiles % each != 0,
            ))
            checks.append((
                f"accumulate='bf16' adds pairs of dQ tiles, a wave has {each}: wanted an even number (dq_groups=2?)",
                self.accumulate == "bf16" and each % 2 != 0,
            ))
        narrow = [d for d in (self.qk_head_dim, self.v_head_dim) if d % (row * 2) != 0]
        checks.append((f"head dim {narrow} % ({row} threads a row * 2) != 0", bool(narrow)))
        return checks

    @property
    def makes_dq(self) -> bool:
        """Whether this kernel adds to dQ through LDS and atomics."""
        return self.accumulate in ("fp32", "bf16")

    @property
    def gemms(self) -> tuple[int, int]:
        """Products over (qk_head_dim, v_head_dim): S, dP, dV, dK, dQ; without dQ; or S, dP, dQ of the owner."""
        return {"none": (2, 2), "owner": (2, 1)}.get(self.accumulate, (3, 2))

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.num_waves * WAVE

    @property
    def mfma_k(self) -> int:
        """Contraction length of a matrix instruction."""
        return MFMA_K[self.arch]

    @property
    def lane_elems(self) -> int:
        """Elements of an operand that one lane holds."""
        return self.mfma_k // 4

    @property
    def key_tiles(self) -> int:
        """16-key tiles of a wave."""
        return self.block_n // (TILE * self.num_waves)

    @property
    def q_tiles(self) -> int:
        """16-row query tiles of a step."""
        return self.block_m // TILE

    @property
    def qk_tiles(self) -> int:
        """16-column tiles of Q and K."""
        return self.qk_head_dim // TILE

    @property
    def v_tiles(self) -> int:
        """16-column tiles of V and dO."""
        return self.v_head_dim // TILE

    @property
    def dq_tiles(self) -> int:
        """16x16 dQ tiles of a wave."""
        return self.q_tiles * self.qk_tiles * self.dq_groups // self.num_waves if self.makes_dq else 0

    @property
    def threads_per_row(self) -> int:
        """Threads that stage one query row."""
        return self.threads // self.block_m

    @property
    def buffers(self) -> int:
        """Copies of the staged tiles in LDS."""
        return 2 if self.pipeline else 1

    @property
    def barriers(self) -> int:
        """Workgroup barriers of a step: none is spent on dS where dQ is made elsewhere."""
        return (2 if self.pipeline else 3) - (0 if self.makes_dq else 1)

    @property
    def resident_registers(self) -> int:
        """32-bit registers a lane holds through the whole loop: K, V, K^T, the dK and dV sums, and the next tile."""
        qk, v, keys = self.qk_head_dim, self.v_head_dim, self.key_tiles * TILE
        operands = keys * (qk + v) // 128  # 16-bit elements of [keys, D] over 64 lanes
        sums = keys * (qk + v) // 64
        turned = self.dq_tiles * self.block_n // self.dq_groups // 8 if self.makes_dq else 0
        staged = (self.block_m * (qk + v) // (2 * self.threads) + 2) if self.pipeline else 0
        return operands + sums + turned + staged

    def row_elems(self, columns: int) -> int:
        """Elements of an LDS row that holds `columns` of them."""
        return columns + ROW_PAD[self.arch]

    def lds(self) -> dict[str, int]:
        """Bytes of each LDS array; "wide" is the staged tensor of qk_head_dim columns, "slim" that of v_head_dim."""
        rows, n = self.block_m, self.buffers
        stats = 0 if self.accumulate == "owner" else 4 * n * rows
        arrays = {
            "wide": 2 * n * rows * self.row_elems(self.qk_head_dim),
            "slim": 2 * n * rows * self.row_elems(self.v_head_dim),
            "ds": 2 * rows * self.row_elems(self.block_n) if self.makes_dq else 0,
            "wide_t": 2 * n * self.qk_head_dim * self.row_elems(rows) if self.transposed_tiles else 0,
            "slim_t": 2 * n * self.v_head_dim * self.row_elems(rows) if self.transposed_tiles else 0,
            "lse": stats,
            "delta": stats,
        }
        return {name: nbytes for name, nbytes in arrays.items() if nbytes}

    @property
    def lds_bytes(self) -> int:
        """Bytes of LDS of a workgroup."""
        return sum(self.lds().values())

    def lds_text(self) -> str:
        """The LDS budget, spelled out."""
        return " + ".join(f"{name} {nbytes}" for name, nbytes in self.lds().items()) + f" = {self.lds_bytes} bytes"

    def mfma_per_wave(self) -> int:
        """Matrix instructions of one wave for one step."""
        wide, slim = self.gemms
        products = wide * self.qk_head_dim + slim * self.v_head_dim
        return self.block_m * self.block_n * products // (TILE * TILE * self.mfma_k * self.num_waves)

    def sections(self, dim: int) -> tuple[tuple[int, int], ...]:
        """How the threads of a row fetch `dim` columns: (first column, elements a thread), widest first."""
        found, at = [], 0
        while at < dim:
            width = next(w for w in (8, 4, 2) if at + w * self.threads_per_row <= dim)
            found.append((at, width))
            at += width * self.threads_per_row
        return tuple(found)

    def turned(self, dim: int) -> tuple[tuple[int, int], ...]:
        """How `dim` columns are read for a product that contracts rows: (first column, columns a lane).

        Lane l of a 16-lane group holds `columns` neighbouring ones; gfx950's transposed LDS read gives it one.
        """
        if self.arch == "gfx950" and not self.transposed_tiles:
            return tuple((at, 1) for at in range(0, dim, TILE))
        whole = dim // 64 * 64
        return tuple((at, 4) for at in range(0, whole, 64)) + (((whole, 2),) if whole < dim else ())

    def grid(self, batch: int, heads_kv: int, max_seqlen_k: int) -> tuple[int, int, int]:
        """Workgroups along x, y, z."""
        key_blocks = -(-max_seqlen_k // self.block_n)
        return (heads_kv, batch, key_blocks) if self.kv_major else (key_blocks, heads_kv, batch)

    def echo(self) -> dict[str, object]:
        """The resolved geometry: every knob and what follows from it."""
        knobs = {f.name: getattr(self, f.name) for f in fields(self)}
        derived = ("threads", "mfma_k", "key_tiles", "q_tiles", "dq_tiles", "barriers", "lds_bytes")
        return knobs | {name: getattr(self, name) for name in derived} | {"mfma_per_wave": self.mfma_per_wave()}


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """The shape of the kernels that treat rows one by one: 16 bytes a lane, a power of two of lanes a row."""

    qk_head_dim: int
    v_head_dim: int
    arch: str = "gfx942"
    dtype: str = "bf16"
    threads: int = 256

    @property
    def lds_bytes(self) -> int:
        """Rows need no LDS: lanes exchange through registers."""
        return 0

    def lanes_per_row(self, dim: int) -> int:
        """Lanes that share a row of `dim` columns."""
        return 1 << (dim // 8 - 1).bit_length()

    def rows(self, dim: int) -> int:
        """Rows of `dim` columns of a workgroup."""
        return self.threads // self.lanes_per_row(dim)
