"""How long a grid of unequal blocks takes: blocks dealt to queues in launch order, in tile iterations.

AMD deals block i to queue (XCD) i % 8 before any of them runs, and each queue fills its own compute units; NVIDIA has
one pool. In both, a unit that falls free takes the next block of its queue. Time is counted in tiles of block_m queries
by block_n keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .mask import q_tiles
from .problem import Problem
from .target import Target

EMPTIES = ("interleaved", "appended", "dropped")


def block_tiles(
    problem: Problem, block_m: int, block_n: int, *, kv_major: bool = True, empties: str = "interleaved"
) -> tuple[int, ...]:
    """Tile iterations of every block of a KV-outer grid, in launch order.

    A block owns `block_n` keys of one kv head and walks the query tiles of its whole group. Every segment gets the
    blocks of the longest one. `kv_major` puts the key tile on the slowest grid axis and the kv head on the fastest;
    otherwise the key tile is the fastest. `empties` says where blocks without work stand: "interleaved" as the grid has
    them, "appended" behind all others, or "dropped".
    """
    if empties not in EMPTIES:
        raise ValueError(f"empties is {empties!r}, wanted one of {EMPTIES}")
    key_tiles, heads = range(-(-problem.max_seqlen_k // block_n)), range(problem.nheads_kv)

    def work(seqlens: tuple[int, int], n: int) -> int:
        return problem.group * len(q_tiles((n * block_n, (n + 1) * block_n), seqlens, problem.band, block_m))

    if kv_major:
        grid = [work(segment, n) for n in key_tiles for segment in problem.segments for _ in heads]
    else:
        grid = [work(segment, n) for segment in problem.segments for _ in heads for n in key_tiles]
    if empties == "interleaved":
        return tuple(grid)
    live = [tiles for tiles in grid if tiles]
    return tuple(live + [0] * (len(grid) - len(live) if empties == "appended" else 0))


def makespan(blocks: Sequence[int], *, queues: int, units: int, empty_cost: float = 0.0) -> float:
    """Tile iterations until the last unit is done: block i goes to queue i % queues, which has `units` units.

    `empty_cost` is what a block without work holds its unit for.
    """
    if queues < 1 or units < 1:
        raise ValueError(f"queues={queues}, units={units}: wanted at least one of each")
    free_at = [[0.0] * units for _ in range(queues)]
    for i, tiles in enumerate(blocks):
        queue = free_at[i % queues]
        heapq.heappush(queue, heapq.heappop(queue) + (tiles or empty_cost))
    return max(max(queue) for queue in free_at)


def predict(blocks: Sequence[int], target: Target) -> float:
    """The makespan on a target: 8 static queues of 38 compute units on gfx942, one pool of 132 SMs on sm_90."""
    return makespan(blocks, queues=target.num_queues, units=max(1, target.num_cus // target.num_queues))


def floor(blocks: Sequence[int], units: int) -> float:
    """What no order can beat: the mean load of a unit, or the longest block."""
    return max(sum(blocks) / units, max(blocks, default=0))
