"""What is computed, in plain numbers. Imports nothing outside the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
ALIGNMENTS = ("bottom_right", "top_left")
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Band:
    """The keys a query sees: `-left <= j - (i + delta) <= right`; None is unbounded.

    `delta` is `seqlen_k - seqlen_q` of the segment (bottom-right alignment, flash-attention >= 2.1), or 0 with
    `align="top_left"` (torch SDPA's `is_causal`, TransformerEngine's `causal`). Full attention is `Band()`, causal is
    `Band(None, 0)`, "the last W tokens" is `Band(W - 1, 0)`.
    """

    left: int | None = None
    right: int | None = None
    align: str = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ALIGNMENTS:
            raise ValueError(f"causal_align is {self.align!r}, wanted one of {ALIGNMENTS}")
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            raise ValueError(f"band (left={self.left}, right={self.right}) holds no key for any query")

    @classmethod
    def from_flags(cls, *, causal: bool, window_size: tuple[int, int] = (-1, -1), align: str = "bottom_right") -> Band:
        """The band of flash-attention's `causal` and inclusive `window_size=(left, right)`, where -1 is unbounded."""
        if len(window_size) != 2 or any(w < -1 for w in window_size):
            raise ValueError(f"window_size is {window_size!r}, wanted (left, right), each >= -1")
        left, right = (None if w == -1 else int(w) for w in window_size)
        return cls(left, 0 if causal else right, align)

    def normalized(self, max_seqlen_q: int, max_seqlen_k: int) -> Band:
        """The same band with a side that can cut nothing made None, so that equal masks are equal bands."""
        last_diagonal, first_gap = max_seqlen_k - 1, max_seqlen_q - 1
        if self.align == "top_left":
            last_diagonal, first_gap = first_gap, last_diagonal
        left = None if self.left is None or self.left >= last_diagonal else self.left
        right = None if self.right is None or self.right >= first_gap else self.right
        return self if (left, right) == (self.left, self.right) else Band(left, right, self.align)


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call: sizes and semantics; hashable, no tensors and no device values.

    `total_q`, `total_k` are the token rows of the tensors (dense: batch * seqlen; packed: rows allocated, which may
    exceed the sum of the lengths). `max_seqlen_*` bound every segment's length. `seqlens_*` are the true lengths where
    an instrument knows them; no plan or kernel needs them. `has_*` say which optional inputs a call carries.
    """

    batch: int
    total_q: int
    total_k: int
    max_seqlen_q: int
    max_seqlen_k: int
    nheads_q: int
    nheads_kv: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str = "bf16"
    softmax_scale: float | None = None
    softcap: float = 0.0
    band: Band = Band()
    layout: str = "bshd"
    deterministic: bool = False
    has_sink: bool = False
    has_dlse: bool = False
    has_delta: bool = False
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "band", self.band.normalized(self.max_seqlen_q, self.max_seqlen_k))

    @classmethod
    def dense(cls, batch: int, seqlen_q: int, seqlen_k: int, **fields: object) -> Problem:
        """A batch of equal lengths; `fields` are the remaining fields."""
        return cls(
            batch, batch * seqlen_q, batch * seqlen_k, seqlen_q, seqlen_k,
            seqlens_q=(seqlen_q,) * batch, seqlens_k=(seqlen_k,) * batch, **fields,
        )  # fmt: skip

    @classmethod
    def packed(cls, seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...] | None = None, **fields: object) -> Problem:
        """Segments packed one after another (layout thd); `seqlens_k` defaults to `seqlens_q`."""
        seqlens_q = tuple(seqlens_q)
        seqlens_k = seqlens_q if seqlens_k is None else tuple(seqlens_k)
        if len(seqlens_q) != len(seqlens_k):
            raise ValueError(f"seqlens_q has {len(seqlens_q)} segments, seqlens_k has {len(seqlens_k)}")
        return cls(
            len(seqlens_q), sum(seqlens_q), sum(seqlens_k), max(seqlens_q, default=0), max(seqlens_k, default=0),
            layout="thd", seqlens_q=seqlens_q, seqlens_k=seqlens_k, **fields,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        """The softmax scale in force: given, or 1/sqrt(head_dim_qk)."""
        return self.head_dim_qk**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.nheads_q // self.nheads_kv

    @property
    def is_packed(self) -> bool:
        """Whether segments are found through cu_seqlens."""
        return self.layout == "thd"

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of every segment; only where the lengths are known."""
        if self.seqlens_q is None or self.seqlens_k is None:
            raise ValueError("this problem does not know its segment lengths (seqlens_q, seqlens_k)")
        return tuple(zip(self.seqlens_q, self.seqlens_k, strict=True))

    def cu_seqlens(self, side: str) -> tuple[int, ...]:
        """Start of every segment and the end of the last, for side "q" or "k"."""
        return tuple(accumulate((q if side == "q" else k for q, k in self.segments), initial=0))


def _check(p: Problem) -> None:
    for name in ("batch", "total_q", "total_k", "max_seqlen_q", "max_seqlen_k"):
        if getattr(p, name) < 0:
            raise ValueError(f"{name} is {getattr(p, name)}, wanted >= 0")
    if p.dtype not in DTYPES:
        raise ValueError(f"dtype is {p.dtype!r}, wanted one of {tuple(DTYPES)}")
    if p.layout not in LAYOUTS:
        raise ValueError(f"layout is {p.layout!r}, wanted one of {LAYOUTS}")
    if p.nheads_q < 1 or p.nheads_kv < 1 or p.nheads_q % p.nheads_kv:
        raise ValueError(f"nheads_q={p.nheads_q} is not a positive multiple of nheads_kv={p.nheads_kv}")
    for name in ("head_dim_qk", "head_dim_v"):
        dim = getattr(p, name)
        if dim < 1 or dim > MAX_HEAD_DIM or dim % 8:
            raise NotImplementedError(f"{name} is {dim}, wanted a multiple of 8 up to {MAX_HEAD_DIM}")
    if not 0.0 <= p.softcap < float("inf"):
        raise ValueError(f"softcap is {p.softcap}, wanted a finite number >= 0 (0 turns it off)")
    if p.scale != p.scale or p.scale in (float("inf"), float("-inf")):
        raise ValueError(f"softmax_scale is {p.softmax_scale}, wanted a finite number")
