"""Band arithmetic against the predicate, by brute force."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from undertow.cost import live_pairs, tile_iterations
from undertow.mask import fully_live, k_range, live, q_range, q_tiles
from undertow.problem import ALIGNMENTS, Band, Problem
from undertow.reference import keep

LENGTHS = st.integers(0, 14)
BANDS = st.builds(
    lambda left, width, sides, align: Band(left if sides & 1 else None, width - left if sides & 2 else None, align),
    st.integers(-9, 16), st.integers(0, 20), st.integers(0, 3), st.sampled_from(ALIGNMENTS),
)  # fmt: skip


def live_rows(keys, sq, sk, band):
    return [i for i in range(sq) if any(live(i, j, sq, sk, band) for j in range(*keys))]


def live_keys(rows, sq, sk, band):
    return [j for j in range(sk) if any(live(i, j, sq, sk, band) for i in range(*rows))]


def rule(i, j, sq, sk, band):
    """The normative predicate, written out apart from the library."""
    delta = 0 if band.align == "top_left" else sk - sq
    if band.left is not None and j - (i + delta) < -band.left:
        return False
    return band.right is None or j - (i + delta) <= band.right


@given(LENGTHS, LENGTHS, BANDS)
@settings(max_examples=300)
def test_live_and_the_reference_mask_are_the_rule(sq, sk, band):
    want = [[rule(i, j, sq, sk, band) for j in range(sk)] for i in range(sq)]
    assert [[live(i, j, sq, sk, band) for j in range(sk)] for i in range(sq)] == want
    assert keep(sq, sk, band).tolist() == want


@given(LENGTHS, st.integers(1, 14), BANDS, st.data())
@settings(max_examples=200)
def test_q_range_is_exact(sq, sk, band, data):
    j0 = data.draw(st.integers(0, sk - 1))
    j1 = data.draw(st.integers(j0 + 1, sk))
    lo, hi = q_range((j0, j1), sq, sk, band)
    assert list(range(lo, hi)) == live_rows((j0, j1), sq, sk, band)


@given(st.integers(1, 14), LENGTHS, BANDS, st.data())
@settings(max_examples=200)
def test_k_range_is_exact(sq, sk, band, data):
    i0 = data.draw(st.integers(0, sq - 1))
    i1 = data.draw(st.integers(i0 + 1, sq))
    lo, hi = k_range((i0, i1), sq, sk, band)
    assert list(range(lo, hi)) == live_keys((i0, i1), sq, sk, band)


@given(st.integers(1, 14), st.integers(1, 14), BANDS, st.data())
@settings(max_examples=200)
def test_fully_live_is_exact(sq, sk, band, data):
    i0, j0 = data.draw(st.integers(0, sq - 1)), data.draw(st.integers(0, sk - 1))
    i1, j1 = data.draw(st.integers(i0 + 1, sq)), data.draw(st.integers(j0 + 1, sk))
    want = all(live(i, j, sq, sk, band) for i in range(i0, i1) for j in range(j0, j1))
    assert fully_live((i0, i1), (j0, j1), (sq, sk), band) == want


@given(LENGTHS, st.integers(1, 14), BANDS, st.integers(1, 5), st.data())
@settings(max_examples=200)
def test_q_tiles_are_those_with_a_live_pair(sq, sk, band, block_m, data):
    j0 = data.draw(st.integers(0, sk - 1))
    j1 = data.draw(st.integers(j0 + 1, sk + 5))  # a last key block reaches past the segment
    want = sorted({i // block_m for i in live_rows((j0, min(j1, sk)), sq, sk, band)})
    assert list(q_tiles((j0, j1), (sq, sk), band, block_m)) == want


@given(LENGTHS, LENGTHS, BANDS, st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=200)
@example(3, 3, Band(2, 0), 0, 0)
@example(2, 9, Band(9, 1), 0, 0)
@example(9, 2, Band(1, 8, "top_left"), 0, 0)
def test_normalized_changes_no_mask_of_any_shorter_segment(sq, sk, band, more_q, more_k):
    """max_seqlen bounds the lengths: what is dropped for the longest segment must be idle in every shorter one."""
    simple = band.normalized(sq + more_q, sk + more_k)
    assert keep(sq, sk, simple).tolist() == keep(sq, sk, band).tolist()
    assert simple.normalized(sq + more_q, sk + more_k) == simple


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("sq, sk", [(5, 5), (3, 9), (9, 3)])
def test_normalized_drops_exactly_the_idle_sides(sq, sk, align):
    """The widest side that still cuts something at these lengths stays; one more is dropped."""
    cuts_left = (sq if align == "top_left" else sk) - 1
    cuts_right = (sk if align == "top_left" else sq) - 1
    assert Band(cuts_left, None, align).normalized(sq, sk).left is None
    assert Band(cuts_left - 1, None, align).normalized(sq, sk).left == cuts_left - 1
    assert Band(None, cuts_right, align).normalized(sq, sk).right is None
    assert Band(None, cuts_right - 1, align).normalized(sq, sk).right == cuts_right - 1


@pytest.mark.parametrize(
    "flags, band",
    [
        ({"causal": True}, Band(None, 0)),
        ({"causal": False}, Band()),
        ({"causal": True, "window_size": (7, -1)}, Band(7, 0)),
        ({"causal": True, "window_size": (7, 3)}, Band(7, 0)),
        ({"causal": False, "window_size": (7, 3)}, Band(7, 3)),
        ({"causal": False, "window_size": (0, 0)}, Band(0, 0)),
        ({"causal": True, "align": "top_left"}, Band(None, 0, "top_left")),
    ],
)
def test_flags_of_flash_attention(flags, band):
    assert Band.from_flags(**flags) == band


def test_last_w_tokens():
    """DESIGN's example: "the last W tokens" is (W - 1, 0), inclusive."""
    band = Band.from_flags(causal=False, window_size=(2, 0))
    seen = [sum(live(i, j, 8, 8, band) for j in range(8)) for i in range(8)]
    assert seen == [1, 2, 3, 3, 3, 3, 3, 3]


@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=3), BANDS, st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=100)
def test_costs_count_live_pairs_and_live_tiles(segments, band, block_m, block_n):
    problem = Problem.packed(
        tuple(s[0] for s in segments), tuple(s[1] for s in segments), band=band,
        nheads_q=1, nheads_kv=1, head_dim_qk=8, head_dim_v=8,
    )  # fmt: skip
    pairs = [[(i, j) for i in range(sq) for j in range(sk) if rule(i, j, sq, sk, band)] for sq, sk in segments]
    assert live_pairs(problem) == sum(map(len, pairs))
    tiles = sum(len({(i // block_m, j // block_n) for i, j in found}) for found in pairs)
    assert tile_iterations(problem, block_m, block_n) == tiles
