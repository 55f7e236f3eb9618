"""Which (query, key) pairs are live, and which tiles hold any: the one host-side statement of the alignment."""

from __future__ import annotations

from .problem import Band


def shift(seqlen_q: int, seqlen_k: int, band: Band) -> int:
    """The key index that sits on the diagonal of query 0."""
    return 0 if band.align == "top_left" else seqlen_k - seqlen_q


def live(i: int, j: int, seqlen_q: int, seqlen_k: int, band: Band) -> bool:
    """Whether query i sees key j."""
    d = j - i - shift(seqlen_q, seqlen_k, band)
    return (band.left is None or d >= -band.left) and (band.right is None or d <= band.right)


def q_range(keys: tuple[int, int], seqlen_q: int, seqlen_k: int, band: Band) -> tuple[int, int]:
    """Query rows [lo, hi) that see any key of [j0, j1), j1 <= seqlen_k; empty when lo >= hi."""
    (j0, j1), delta = keys, shift(seqlen_q, seqlen_k, band)
    lo = 0 if band.right is None else max(0, j0 - band.right - delta)
    hi = seqlen_q if band.left is None else min(seqlen_q, j1 + band.left - delta)
    return lo, hi


def k_range(rows: tuple[int, int], seqlen_q: int, seqlen_k: int, band: Band) -> tuple[int, int]:
    """Keys [lo, hi) that any query row of [i0, i1) sees; empty when lo >= hi."""
    (i0, i1), delta = rows, shift(seqlen_q, seqlen_k, band)
    lo = 0 if band.left is None else max(0, i0 + delta - band.left)
    hi = seqlen_k if band.right is None else min(seqlen_k, i1 + delta + band.right)
    return lo, hi


def fully_live(rows: tuple[int, int], keys: tuple[int, int], seqlens: tuple[int, int], band: Band) -> bool:
    """Whether every pair of the tile is live, so that a kernel may skip the mask."""
    (i0, i1), (j0, j1) = rows, keys
    return all(live(i, j, *seqlens, band) for i, j in ((i0, j1 - 1), (i1 - 1, j0)))


def q_tiles(keys: tuple[int, int], seqlens: tuple[int, int], band: Band, block_m: int) -> range:
    """Indices of the query tiles of `block_m` rows that see any key of [j0, j1); empty where no key is left.

    j1 may exceed seqlen_k, as the last key block of a segment does.
    """
    j0, j1 = keys[0], min(keys[1], seqlens[1])
    lo, hi = q_range((j0, j1), *seqlens, band)
    return range(lo // block_m, -(-hi // block_m)) if j0 < j1 and lo < hi else range(0)
