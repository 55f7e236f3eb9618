"""flash-attention 2 over packed segments, through aten's own entries.

What they leave open is closed here, on the device and without a synchronisation: rows outside every segment, rows that
see no key (flash has lse = +inf there and reads out), and real lengths shorter than a segment, which are gathered into
packed tensors first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem import Problem
from ..spec import Config, Tensors

ATEN = torch.ops.aten
LOAD_BYTES = 16


@dataclass(frozen=True)
class Side:
    """Where the rows of the query or of the key side lie.

    `starts` [batch + 1] int32 are the edges that flash is given. Without seqused, `rows` is None and `inside` [rows]
    says which rows of the tensor belong to a segment. With it, flash works on packed copies, whose row r is row
    `rows[r]` of the tensor, where `inside[r]`.
    """

    starts: Tensor
    inside: Tensor
    rows: Tensor | None

    def pack(self, x: Tensor) -> Tensor:
        """[rows, head, dim] as flash may read it: its real rows one after another, 16-byte aligned."""
        if self.rows is not None:
            return x[self.rows]
        apart = [n * x.element_size() for n in (*x.stride()[:-1], x.storage_offset())]
        return x if x.stride(-1) == 1 and not any(n % LOAD_BYTES for n in apart) else x.contiguous()

    def unpack(self, found: Tensor, into: Tensor, *, fill: float = 0.0) -> None:
        """Write every row of `into` [rows, ...]: a segment's from `found`, the rest `fill`."""
        inside = self.inside.view(-1, *[1] * (found.dim() - 1))
        if self.rows is None:
            into.copy_(torch.where(inside, found, fill))
            return
        # rows past the last real one write to a spare row, so that they cannot hit a real one
        spare = into.new_full((into.shape[0] + 1, *into.shape[1:]), fill)
        at = torch.where(self.inside, self.rows, into.shape[0]).long()
        into.copy_(spare.index_copy_(0, at, found.to(into.dtype))[:-1])


def flash_varlen_forward(problem: Problem, config: Config, tensors: Tensors) -> None:
    """out and lse of aten::_flash_attention_forward."""
    on_q, on_k = _side(tensors, "q", problem.total_q), _side(tensors, "k", problem.total_k)
    q, k, v = on_q.pack(tensors["q"]), on_k.pack(tensors["k"]), on_k.pack(tensors["v"])
    causal, left, right = _window(problem)
    found = ATEN._flash_attention_forward(
        q, k, v, on_q.starts, on_k.starts, problem.max_seqlen_q, problem.max_seqlen_k, 0.0, causal,
        return_debug_mask=False,        scale=problem.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    sees = _sees(problem, on_q.starts, on_k.starts)[:, None]
    on_q.unpack(torch.where(sees[..., None], found[0], 0.0), tensors["out"])
    on_q.unpack(torch.where(sees, found[1].T, -torch.inf), tensors["lse"].T, fill=-torch.inf)


def flash_varlen_backward(problem: Problem, config: Config, tensors: Tensors, scratch: Tensors) -> None:
    """dq, dk, dv of aten::_flash_attention_backward."""
    on_q, on_k = _side(tensors, "q", problem.total_q), _side(tensors, "k", problem.total_k)
    q, dout, out, lse = (
        on_q.pack(x) for x in (tensors["q"], tensors["dout"], tensors["out"], tensors["lse"].T[..., None])
    )
    k, v = on_k.pack(tensors["k"]), on_k.pack(tensors["v"])
    lse = lse[..., 0]
    if not _self_attention(tensors):
        sees = _sees(problem, on_q.starts, on_k.starts)[:, None]
        out, lse = torch.where(sees[..., None], out, 0.0), torch.where(sees, lse, torch.inf)
    causal, left, right = _window(problem)
    nothing = q.new_zeros((), dtype=torch.int64)
    dq, dk, dv = ATEN._flash_attention_backward(
        dout, q, k, v, out, lse.T.contiguous(), on_q.starts, on_k.starts, problem.max_seqlen_q, problem.max_seqlen_k,
        0.0, causal, nothing, nothing, scale=problem.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    on_q.unpack(dq, tensors["dq"])
    on_k.unpack(dk, tensors["dk"])
    on_k.unpack(dv, tensors["dv"])


def _window(problem: Problem) -> tuple[bool, int | None, int | None]:
    """(is_causal, left, right) as flash-attention takes them."""
    left, right = problem.band.left, problem.band.right
    return (True, None, None) if (left, right) == (None, 0) else (False, left, right)


def _self_attention(tensors: Tensors) -> bool:
    """Whether queries and keys have the same segments, so that every row sees at least itself."""
    pairs = ((tensors.get(f"{name}_q"), tensors.get(f"{name}_k")) for name in ("cu_seqlens", "seqused"))
    return all(q is k or (q is not None and k is not None and q.data_ptr() == k.data_ptr()) for q, k in pairs)


def _side(tensors: Tensors, side: str, total: int) -> Side:
    cu, used = tensors[f"cu_seqlens_{side}"].contiguous(), tensors.get(f"seqused_{side}")
    r = torch.arange(total, dtype=torch.int32, device=cu.device)
    if used is None:
        return Side(cu, (r >= cu[0]) & (r < cu[-1]), None)
    starts = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    b = torch.searchsorted(starts[1:], r, right=True).clamp_(max=used.shape[0] - 1)
    inside = r < starts[-1]
    return Side(starts, inside, torch.where(inside, cu[b] + r - starts[b], 0))


def _sees(problem: Problem, starts_q: Tensor, starts_k: Tensor) -> Tensor:
    """[rows] whether a query row of the packed tensor sees a key; bottom-right aligned, both sides of the band >= 0."""
    r = torch.arange(problem.total_q, dtype=torch.int32, device=starts_q.device)
    b = torch.searchsorted(starts_q[1:], r, right=True).clamp_(max=problem.batch - 1)
    sk = starts_k[b + 1] - starts_k[b]
    sees = sk > 0
    if problem.band.right is not None:
        diagonal = r - starts_q[b] + sk - (starts_q[b + 1] - starts_q[b])
        sees &= diagonal + problem.band.right >= 0
    return sees
