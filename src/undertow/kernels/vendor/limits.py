"""What torch's own kernels cannot do, each with the numbers of the call and the change that lifts it."""

from __future__ import annotations

from ...problem import Problem
from ..spec import Limit

NVIDIA = frozenset({"sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"})
SM86_FAMILY = frozenset({"sm_86", "sm_89", "sm_120", "sm_121"})
CUDNN_WIDE = frozenset({"sm_90", "sm_100"})
FLASH_DIMS = (32, 64, 96, 128, 192, 256)

NO_SOFTCAP = Limit("softcap is {p.softcap}, this kernel has none", lambda p, t: p.softcap == 0.0, "softcap=0.0")
NO_SINK = Limit("this kernel has no sink", lambda p, t: not p.has_sink, "sink=None")
NO_DLSE = Limit(
    "this kernel takes no gradient of the LSE", lambda p, t: not p.has_dlse, "return_lse=False", only="backward"
)
NO_DELTA = Limit("this kernel computes its own delta", lambda p, t: not p.has_delta, "delta=None", only="backward")
NOT_DETERMINISTIC = Limit(
    "its additions to dQ have no fixed order (torch's global switch, not this call, selects another algorithm)",
    lambda p, t: not p.deterministic,
    "deterministic=False",
    only="backward",
)
CUDNN_NOT_DETERMINISTIC = Limit(
    "two runs differ in bits, under torch.use_deterministic_algorithms(True) too (measured: torch 2.11, cuDNN 9.19)",
    lambda p, t: not p.deterministic,
    "deterministic=False",
    only="backward",
)
NOT_EMPTY = Limit(
    "batch {p.batch}, seqlen_q {p.max_seqlen_q}, seqlen_k {p.max_seqlen_k}: none may be 0",
    lambda p, t: min(p.batch, p.max_seqlen_q, p.max_seqlen_k) > 0,
)
DENSE = Limit(
    "{p.batch} packed segments (layout thd), SDPA takes dense tensors only",
    lambda p, t: not p.is_packed,
    "layout='bshd' with every segment padded to {p.max_seqlen_q} queries and {p.max_seqlen_k} keys",
)
PACKED = Limit(
    "layout is {p.layout}, this peer is the packed entry", lambda p, t: p.is_packed, "layout='thd' with cu_seqlens"
)
NO_WINDOW = Limit(
    "window (left={p.band.left}, right={p.band.right}), SDPA has only full and causal",
    lambda p, t: p.band.left is None and p.band.right in (None, 0),
    "window_size=(-1, -1)",
)
NO_MIXED_WINDOW = Limit(
    "window (left={p.band.left}, right={p.band.right}) lies off the diagonal, wanted both sides >= 0",
    lambda p, t: min(p.band.left or 0, p.band.right or 0) >= 0,
    "window_size with both sides >= 0",
)
TOP_LEFT_CAUSAL = Limit(
    "causal with seqlen_q {p.max_seqlen_q} != seqlen_k {p.max_seqlen_k} is bottom-right aligned, is_causal is top-left",
    lambda p, t: p.band.right is None or p.max_seqlen_q == p.max_seqlen_k or p.band.align == "top_left",
    "causal_align='top_left' (another mask), or seqlen_q == seqlen_k",
)
SQUARE_CAUSAL = Limit(
    "causal with seqlen_q {p.max_seqlen_q} != seqlen_k {p.max_seqlen_k}: SDPA's flash refuses what is not square",
    lambda p, t: p.band.right is None or p.max_seqlen_q == p.max_seqlen_k,
    "seqlen_q == seqlen_k",
)
BOTTOM_RIGHT = Limit(
    "the band is top-left aligned over segments that may have seqlen_q != seqlen_k, this kernel's is bottom-right",
    lambda p, t: p.band.align == "bottom_right" or (p.band.left is None and p.band.right is None) or _square(p),
    "causal_align='bottom_right'",
)
EQUAL_DIMS = Limit(
    "head_dim_qk {p.head_dim_qk} != head_dim_v {p.head_dim_v}",
    lambda p, t: p.head_dim_qk == p.head_dim_v,
    "v zero-padded, or cut, to head_dim_v {p.head_dim_qk}",
)
MHA = Limit(
    "{p.nheads_q} query heads on {p.nheads_kv} kv heads, wanted as many",
    lambda p, t: p.group == 1,
    "k and v repeated {p.group} times",
)
SIXTEEN_BIT = Limit("dtype is {p.dtype}, wanted bf16 or fp16", lambda p, t: p.dtype != "fp32", "dtype bf16")
SM86_BACKWARD = Limit(
    "head dim {p.head_dim_qk} is in (192, 224], for which flash backward lacks shared memory on {t.arch}",
    lambda p, t: t.arch not in SM86_FAMILY or not 192 < p.head_dim_qk <= 224,
    "q, k and v zero-padded to head dim 256",
    only="backward",
)
CUDNN_DIMS = Limit(
    "head dims {p.head_dim_qk}/{p.head_dim_v}: cuDNN takes more than 128 on sm_90 and sm_100 only, {t.arch} is neither",
    lambda p, t: max(p.head_dim_qk, p.head_dim_v) <= 128 or t.arch in CUDNN_WIDE,
)
CUDNN_KEYS = Limit("seqlen_k is 1, which cuDNN's SDPA refuses", lambda p, t: p.max_seqlen_k != 1)
ON_CPU = Limit("arch is {t.arch}, this is torch's CPU kernel", lambda p, t: t.vendor == "cpu", "tensors on the CPU")

COMMON = (NO_SOFTCAP, NO_SINK, NO_DLSE, NO_DELTA)
SDPA = (DENSE, NOT_EMPTY, NO_WINDOW, *COMMON)


def flash_dims(problem: Problem) -> tuple[int, int]:
    """The head dim flash-attention 2 was instantiated for: the next of FLASH_DIMS."""
    return (_flash_dim(problem.head_dim_qk), _flash_dim(problem.head_dim_v))


def _flash_dim(dim: int) -> int:
    return next(d for d in FLASH_DIMS if d >= dim)


def _square(problem: Problem) -> bool:
    return problem.seqlens_q is not None and problem.seqlens_q == problem.seqlens_k
