"""Work of a problem: useful and executed FLOPs, live pairs. Plain integers, no device."""

from __future__ import annotations

from .mask import k_range, q_tiles
from .problem import Problem


def live_pairs(problem: Problem) -> int:
    """Unmasked (query, key) pairs of one head, over all segments. Needs the segment lengths."""
    return sum(_segment_pairs(sq, sk, problem) for sq, sk in problem.segments)


def _segment_pairs(sq: int, sk: int, problem: Problem) -> int:
    band = problem.band
    if band.left is None and band.right is None:
        return sq * sk
    return sum(max(0, hi - lo) for lo, hi in (k_range((i, i + 1), sq, sk, band) for i in range(sq)))


def score_flops(head_dim_qk: int, head_dim_v: int, gemms: tuple[int, int] = (3, 2)) -> int:
    """FLOPs a score element of a backward with `gemms` = (products over qk, products over v), five when fused."""
    return 2 * (gemms[0] * head_dim_qk + gemms[1] * head_dim_v)


def backward_flops(problem: Problem) -> int:
    """Useful FLOPs of the backward: live pairs * heads * 2 * (3 d_qk + 2 d_v)."""
    return live_pairs(problem) * problem.nheads_q * score_flops(problem.head_dim_qk, problem.head_dim_v)


def forward_flops(problem: Problem) -> int:
    """Useful FLOPs of the forward: live pairs * heads * 2 * (d_qk + d_v)."""
    return live_pairs(problem) * problem.nheads_q * 2 * (problem.head_dim_qk + problem.head_dim_v)


def padding_tax(problem: Problem, executed_dims: tuple[int, int], gemms: tuple[int, int]) -> float:
    """Executed FLOPs a score element over the native five-GEMM count: 1.0 is no waste."""
    return score_flops(*executed_dims, gemms) / score_flops(problem.head_dim_qk, problem.head_dim_v)


def split_dim(dim: int, smallest: int = 16) -> tuple[int, int]:
    """A head dim as at most two power-of-two chunks (the second may be 0), the narrowest sum: 192 is (128, 64)."""
    whole = max(smallest, 1 << (dim - 1).bit_length())
    first = whole // 2
    second = max(smallest, 1 << (dim - first - 1).bit_length()) if dim > first else 0
    return (first, second) if first >= smallest and second and first + second < whole else (whole, 0)


def tile_iterations(problem: Problem, block_m: int, block_n: int) -> int:
    """(block_m, block_n) tiles of one head that hold a live pair, as a KV-outer kernel visits them."""
    return sum(
        len(q_tiles((j0, j0 + block_n), (sq, sk), problem.band, block_m))
        for sq, sk in problem.segments
        for j0 in range(0, sk, block_n)
    )


def mfma_per_tile(problem: Problem, block_m: int, block_n: int, mfma_k: int, gemms: tuple[int, int] = (3, 2)) -> int:
    """16x16 matrix instructions of one tile, all waves: products of block_m * block_n * dim over 16 * 16 * mfma_k.

    Raises:
        ValueError: a product that is no whole number of instructions.
    """
    total = 0
    for dim, times in zip((problem.head_dim_qk, problem.head_dim_v), gemms, strict=True):
        multiply_adds, each = block_m * block_n * dim, 16 * 16 * mfma_k
        if multiply_adds % each:
            raise ValueError(f"a {block_m}x{block_n}x{dim} product is no whole number of 16x16x{mfma_k} instructions")
        total += times * (multiply_adds // each)
    return total


def mfma_count(problem: Problem, block_m: int, block_n: int, mfma_k: int, gemms: tuple[int, int] = (3, 2)) -> int:
    """Matrix instructions of a whole KV-outer backward, exactly: live tiles * heads * instructions a tile."""
    tiles = tile_iterations(problem, block_m, block_n) * problem.nheads_q
    return tiles * mfma_per_tile(problem, block_m, block_n, mfma_k, gemms)
