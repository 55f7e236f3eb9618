"""The public functions: input checks, torch.library registration, autograd.

Two operators do the work: `undertow::forward` (out, lse) and `undertow::backward` (dq, dk, dv, dsink). Both choose
their kernel by dispatch and launch on the tensors' device and the current stream, without reading device values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .env import settings
from .kernels import alloc, watch
from .layout import AXES, shapes
from .problem import Band, Problem
from .target import Target, detect

DTYPE_NAME = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SAME_DTYPE = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
LN2 = 0.6931471805599453
MAX_TOKEN_STRIDE = 1 << 24


class Grads(NamedTuple):
    """Gradients of q, k, v in their layout and dtype, and of the sink (nheads_q,) fp32 or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    kernel: str | None = None,
    causal_align: str = "bottom_right",
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled-dot-product attention of a dense batch, differentiable in q, k, v, sink and through the returned LSE.

    Args:
        q, k, v: bf16, fp16 or fp32 of one dtype; for layout "bshd" (batch, seqlen, nheads, head_dim), also "sbhd" and
            "bhsd". Head dims are multiples of 8 up to 256; q and k share one, v may have another. nheads_q is a
            multiple of nheads_kv: query head h reads kv head h // (nheads_q // nheads_kv). Any strides; a tensor whose
            last stride is not 1, or whose token stride is 2^24 elements or more, is copied.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right, as flash-attention >= 2.1).
        window_size: (left, right) keys visible beside the diagonal, inclusive, -1 unbounded; causal means right = 0.
        softmax_scale: default 1/sqrt(head_dim_qk).
        softcap: scores become softcap * tanh(score / softcap); 0 turns it off.
        sink: (nheads_q,) logits that join the softmax's denominator.
        deterministic: bitwise reproducible gradients, or an error before launch where no kernel can; None follows
            torch.are_deterministic_algorithms_enabled().
        return_lse: also return the log-sum-exp, fp32 (batch, nheads_q, seqlen_q), natural log, scale folded in.
        kernel: the kernel's name (see `undertow explain`); a named kernel never falls back.
        causal_align: "bottom_right", or "top_left" (SDPA's is_causal).

    Returns:
        out in q's layout with v's head dim, contiguous; with return_lse (out, lse). A row that sees no key has out 0
        and lse -inf (or its sink).

    Raises:
        ValueError, NotImplementedError: name the argument, its value and what is wanted.
    """
    if layout == "thd":
        raise ValueError("layout is 'thd': call attention_varlen for packed tensors")
    q, k, v = _autocast(q, k, v)
    band = Band.from_flags(causal=causal, window_size=window_size, align=causal_align)
    lengths = _dense_lengths(q, k, layout)
    out, lse = torch.ops.undertow.forward(
        q, k, v, sink, None, None, None, None, *lengths, *_scalars(q, softmax_scale, softcap, band),
        layout, _deterministic(deterministic), kernel,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    causal_align: str = "bottom_right",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of segments packed one after another; as `attention`, but for the arguments named here.

    Args:
        q, k, v: (total, nheads, head_dim). Rows in gaps between segments and beyond the last may hold anything; their
            out and gradients are 0.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device, first 0, increasing: where segments start.
        max_seqlen_q, max_seqlen_k: a bound of every length. Too small is an error where it can be seen: for CPU tensors
            always, for device tensors in checked mode only, since reading them would synchronise. A 0-dim tensor is
            accepted and read (a device tensor synchronises).
        seqused_q, seqused_k: (batch,) int32, the real lengths where a segment is followed by padding.

    Returns:
        out (total_q, nheads_q, head_dim_v); with return_lse also lse fp32 (nheads_q, total_q).
    """
    q, k, v = _autocast(q, k, v)
    band = Band.from_flags(causal=causal, window_size=window_size, align=causal_align)
    out, lse = torch.ops.undertow.forward(
        q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _length(max_seqlen_q), _length(max_seqlen_k),
        *_scalars(q, softmax_scale, softcap, band), "thd", _deterministic(deterministic), kernel,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    layout: str = "bshd",
    delta: Tensor | None = None,
    dlse: Tensor | None = None,
    lse_layout: str | None = None,
    lse_base: str = "e",
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    workspace: alloc.Workspace = None,
    kernel: str | None = None,
    causal_align: str = "bottom_right",
) -> Grads:
    """Gradients of a dense attention after any forward that returned (out, lse). Arguments as `attention`, and:

    Args:
        dout, out: like q, with v's head dim.
        lse: fp32 (batch, nheads_q, seqlen_q), natural log, scale folded in, sink included where there is one. Of rows
            that see no key, lse and out are ignored, whatever they hold.
        delta: rowsum(dout * out) without dlse, fp32, if already known; same layout as lse.
        dlse: gradient of lse, fp32, same layout as lse.
        lse_layout: "bhs" (default), or "bsh". An lse whose shape fits both is refused unless this is given.
        lse_base: "e", or "2" for an lse in log2 units.
        dq, dk, dv: outputs to write into, any strides; returned as given.
        workspace: scratch owned by the caller: a contiguous tensor of at least `workspace_nbytes(...)` bytes on q's
            device, at a 256-byte boundary (64 on a CPU), or a callable (nbytes, zero_init) -> such a tensor.
            With it, or with dq, dk, dv, the call is not traceable by torch.compile.

    Returns:
        Grads(dq, dk, dv, dsink).
    """
    band = Band.from_flags(causal=causal, window_size=window_size, align=causal_align)
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "sink": sink, "dlse": dlse, "delta": delta}
    numbers = (*_dense_lengths(q, k, layout), *_scalars(q, softmax_scale, softcap, band), layout)
    switches = (_deterministic(deterministic), kernel)
    tensors = _adapt_lse(tensors, layout, lse_layout, lse_base)
    return _backward_call(tensors, numbers, switches, {"dq": dq, "dk": dk, "dv": dv}, workspace)


def attention_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    delta: Tensor | None = None,
    dlse: Tensor | None = None,
    lse_layout: str | None = None,
    lse_base: str = "e",
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    workspace: alloc.Workspace = None,
    kernel: str | None = None,
    causal_align: str = "bottom_right",
) -> Grads:
    """Gradients of a packed attention; arguments as `attention_varlen` and `attention_backward`, but:

    Args:
        lse: fp32 (nheads_q, total_q); delta and dlse alike.
        lse_layout: "ht" (default), "th" for (total_q, nheads_q), "bhs" for per-segment padded
            (batch, nheads_q, max_seqlen_q).
    """
    band = Band.from_flags(causal=causal, window_size=window_size, align=causal_align)
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "sink": sink, "dlse": dlse, "delta": delta}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    lengths = (_length(max_seqlen_q), _length(max_seqlen_k))
    numbers = (*lengths, *_scalars(q, softmax_scale, softcap, band), "thd")
    switches = (_deterministic(deterministic), kernel)
    tensors = _adapt_lse(tensors, "thd", lse_layout, lse_base)
    return _backward_call(tensors, numbers, switches, {"dq": dq, "dk": dk, "dv": dv}, workspace)


def workspace_nbytes(problem: Problem, target: Target | None = None, kernel: str | None = None) -> int:
    """Bytes of scratch the backward of a problem needs, from the plan that the launch uses. Needs no GPU.

    `target` defaults to this machine's best device; `kernel` to the one dispatch selects.
    """
    target = detect() if target is None else target
    return _plan(problem, target, kernel)[2].nbytes


# ---- the operators


@torch.library.custom_op("undertow::forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_q: Tensor | None, seqused_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, softcap: float, left: int | None, right: int | None,
    align: str, layout: str, deterministic: bool, kernel: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "sink": sink, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    numbers = (max_seqlen_q, max_seqlen_k, softmax_scale, softcap, left, right, align, layout)
    problem = _validated(tensors, numbers, deterministic=deterministic)
    target = detect(q.device)
    named = kernel if kernel is None or dispatch.get(kernel).forward is not None else None
    chosen = dispatch.select(problem, target, "forward", named)
    expected, checked = shapes(problem), settings().checked
    tensors["out"] = alloc.output(expected["out"], q.dtype, q.device, poison=checked)
    tensors["lse"] = alloc.output(expected["lse"], torch.float32, q.device, poison=checked)
    chosen.forward(problem, chosen.config(problem, target, "forward"), _addressable(tensors, layout))
    return tensors["out"], tensors["lse"]


@_forward.register_fake
def _(q, k, v, sink, cu_seqlens_q, *rest):  # noqa: ANN001, ANN202
    layout = rest[-3]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    heads = AXES[layout].index("h")
    rows = AXES[layout].index("s")
    side = (q.shape[heads], q.shape[rows])
    if layout != "thd":
        side = (q.shape[AXES[layout].index("b")], *side)
    return out, q.new_empty(side, dtype=torch.float32)


@torch.library.custom_op("undertow::backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    sink: Tensor | None, dlse: Tensor | None, delta: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_q: Tensor | None, seqused_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, softcap: float, left: int | None, right: int | None,
    align: str, layout: str, deterministic: bool, kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "sink": sink, "dlse": dlse, "delta": delta}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    numbers = (max_seqlen_q, max_seqlen_k, softmax_scale, softcap, left, right, align, layout)
    grads = _run_backward(tensors, numbers, (deterministic, kernel), {}, None)
    return grads.dq, grads.dk, grads.dv, q.new_empty(0, dtype=torch.float32) if grads.dsink is None else grads.dsink


@_backward.register_fake
def _(dout, q, k, v, out, lse, sink, *rest):  # noqa: ANN001, ANN202
    dsink = q.new_empty((0,) if sink is None else sink.shape, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _save(ctx, inputs, output) -> None:  # noqa: ANN001
    q, k, v, sink, cu_q, cu_k, used_q, used_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, sink, cu_q, cu_k, used_q, used_k)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:  # noqa: ANN001
    q, k, v, out, lse, sink, *segments = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = torch.ops.undertow.backward(dout, q, k, v, out, lse, sink, dlse, None, *segments, *ctx.rest)
    return dq, dk, dv, None if sink is None else dsink.to(sink.dtype), *(None,) * (len(segments) + len(ctx.rest))


def _no_second_derivative(ctx, *grads: Tensor) -> None:  # noqa: ANN001
    raise NotImplementedError("undertow has no second derivative: its backward is not differentiable")


_forward.register_autograd(_gradients, setup_context=_save)
_backward.register_autograd(_no_second_derivative)


# ---- one call


def _backward_call(
    tensors: dict[str, Tensor | None], numbers: tuple, switches: tuple, outs: dict[str, Tensor | None],
    workspace: alloc.Workspace,
) -> Grads:  # fmt: skip
    given = {name: tensor for name, tensor in outs.items() if tensor is not None}
    if given or workspace is not None:
        with torch.no_grad():
            return _run_backward(tensors, numbers, switches, given, workspace)
    segments = (tensors.get(n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
    inputs = (tensors[n] for n in ("dout", "q", "k", "v", "out", "lse", "sink", "dlse", "delta"))
    dq, dk, dv, dsink = torch.ops.undertow.backward(*inputs, *segments, *numbers, *switches)
    return Grads(dq, dk, dv, None if tensors["sink"] is None else dsink)


def _run_backward(
    tensors: dict[str, Tensor | None], numbers: tuple, switches: tuple, outs: dict[str, Tensor],
    workspace: alloc.Workspace,
) -> Grads:  # fmt: skip
    deterministic, name = switches
    checked = settings().checked
    for segments in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        tensors.setdefault(segments, None)
    problem = _validated(tensors | outs, numbers, deterministic=deterministic)
    q, expected = tensors["q"], shapes(problem)
    chosen, config, plan = _plan(problem, detect(q.device), name)
    memory = alloc.resolve(workspace, plan, q.device)
    work = {n: tensors[n] for n in tensors}
    for n in ("dq", "dk", "dv"):
        usable = n in outs and _reachable(outs[n], problem.layout)
        work[n] = outs[n] if usable else alloc.output(expected[n], q.dtype, q.device, poison=checked)
    if problem.has_sink:
        work["dsink"] = alloc.output(expected["dsink"], torch.float32, q.device, poison=checked)
    fence = alloc.Fence(plan, q.device) if checked and memory is None else None
    scratch = fence.tensors if fence is not None else alloc.scratch(plan, q.device, memory)
    chosen.backward(problem, config, _addressable(work, problem.layout), scratch)
    if fence is not None:
        fence.check()
        watch.used(scratch)
    for n, given in outs.items():
        if given is not work[n]:
            given.copy_(work[n])
    return Grads(*(outs.get(n, work[n]) for n in ("dq", "dk", "dv")), work.get("dsink"))


def _plan(problem: Problem, target: Target, name: str | None) -> tuple:
    chosen = dispatch.select(problem, target, "backward", name)
    config = chosen.config(problem, target, "backward")
    return chosen, config, chosen.plan_workspace(problem, config)


def _addressable(tensors: dict[str, Tensor | None], layout: str) -> dict[str, Tensor | None]:
    """The same tensors, copied where a kernel could not address them; the sink fp32 and contiguous."""
    ready = dict(tensors)
    for n in SAME_DTYPE:
        if ready.get(n) is not None and not _reachable(ready[n], layout):
            ready[n] = ready[n].contiguous()
    if ready["sink"] is not None:
        ready["sink"] = ready["sink"].float().contiguous()
    for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        ready[n] = None if ready[n] is None else ready[n].contiguous()
    return ready


def _reachable(tensor: Tensor, layout: str) -> bool:
    """Whether kernels can walk it: head dim contiguous, and 128 rows of a tile within 31 bits of elements."""
    return tensor.stride(-1) == 1 and tensor.stride(AXES[layout].index("s")) < MAX_TOKEN_STRIDE


# ---- arguments


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast cast floating inputs to its dtype, as torch does for scaled_dot_product_attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _deterministic(flag: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if flag is None else bool(flag)


def _length(value: int | Tensor) -> int:
    return int(value.item()) if isinstance(value, Tensor) else value


def _scalars(q: Tensor, softmax_scale: float | None, softcap: float, band: Band) -> tuple:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None and q.dim() and q.shape[-1] else softmax_scale
    return float(scale or 0.0), float(softcap or 0.0), band.left, band.right, band.align


def _dense_lengths(q: Tensor, k: Tensor, layout: str) -> tuple[int, int]:
    if layout not in AXES or layout == "thd":
        raise ValueError(f"layout is {layout!r}, wanted one of bshd, sbhd, bhsd")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted 4 dimensions for layout {layout!r}")
    rows = AXES[layout].index("s")
    return q.shape[rows], k.shape[rows]


def _validated(tensors: dict[str, Tensor | None], numbers: tuple, *, deterministic: bool) -> Problem:
    """The Problem of a call, after every tensor's rank, shape, dtype and device were checked against it."""
    max_q, max_k, scale, softcap, left, right, align, layout = numbers
    q, k, v = (tensors[n] for n in "qkv")
    axes = AXES[layout]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted {len(axes)} dimensions for {layout!r}")
    if q.dtype not in DTYPE_NAME:
        raise ValueError(f"q has dtype {q.dtype}, wanted bfloat16, float16 or float32")
    if layout == "thd":
        batch, total_q, total_k = _packed_batch(tensors), q.shape[0], k.shape[0]
    else:
        batch = q.shape[axes.index("b")]
        total_q, total_k = batch * max_q, batch * max_k
    problem = Problem(
        batch, total_q, total_k, max_q, max_k, q.shape[axes.index("h")], k.shape[axes.index("h")],
        q.shape[-1], v.shape[-1], DTYPE_NAME[q.dtype], scale, softcap, Band(left, right, align), layout,
        deterministic, tensors.get("sink") is not None, tensors.get("dlse") is not None,
        tensors.get("delta") is not None,
    )  # fmt: skip
    _check_tensors(problem, tensors, q)
    if layout == "thd" and (q.device.type == "cpu" or settings().checked):
        _check_lengths(problem, tensors)
    return problem


def _packed_batch(tensors: dict[str, Tensor | None]) -> int:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.numel() < 2 or tensor.dtype != torch.int32:
            got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise ValueError(f"{name} is {got}, wanted int32 of shape (batch + 1,), batch >= 1")
    return tensors["cu_seqlens_q"].numel() - 1


def _check_tensors(problem: Problem, tensors: dict[str, Tensor | None], q: Tensor) -> None:
    expected = shapes(problem)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted {expected[name]}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, wanted {q.device} like q")
        if name in SAME_DTYPE:
            wanted = (q.dtype,)
        elif name.startswith(("cu_", "seqused")):
            wanted = (torch.int32,)
        else:
            wanted = (torch.float32,) if name != "sink" else tuple(DTYPE_NAME)
        if tensor.dtype not in wanted:
            raise ValueError(f"{name} has dtype {tensor.dtype}, wanted {' or '.join(map(str, wanted))}")


def _check_lengths(problem: Problem, tensors: dict[str, Tensor | None]) -> None:
    """Values of cu_seqlens, seqused and max_seqlen; reads them, so on a device it synchronises."""
    for side, total, longest in (
        ("q", problem.total_q, problem.max_seqlen_q),
        ("k", problem.total_k, problem.max_seqlen_k),
    ):
        name = f"cu_seqlens_{side}"
        cu = tensors[name].tolist()
        if cu[0] != 0 or any(b < a for a, b in zip(cu, cu[1:], strict=False)) or cu[-1] > total:
            raise ValueError(f"{name} is {_short(cu)}, wanted to rise from 0 to at most {total}, the rows of {side}")
        lengths = [b - a for a, b in zip(cu, cu[1:], strict=False)]
        if tensors[f"seqused_{side}"] is not None:
            used = tensors[f"seqused_{side}"].tolist()
            if any(not 0 <= u <= room for u, room in zip(used, lengths, strict=True)):
                raise ValueError(f"seqused_{side} is {_short(used)}, wanted within the segments {_short(lengths)}")
            lengths = used
        if max(lengths, default=0) > longest:
            raise ValueError(f"max_seqlen_{side} is {longest}, but a segment has {max(lengths)} rows")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 16 else f"{str(values[:16])[:-1]}, ...] ({len(values)} values)"


def _adapt_lse(
    tensors: dict[str, Tensor | None], layout: str, lse_layout: str | None, lse_base: str
) -> dict[str, Tensor | None]:
    """lse, delta and dlse as views or copies in our layout and base; a shape that fits two layouts must be named."""
    if lse_base not in ("e", "2"):
        raise ValueError(f"lse_base is {lse_base!r}, wanted 'e' or '2'")
    packed = layout == "thd"
    names = ("ht", "th", "bhs") if packed else ("bhs", "bsh")
    if lse_layout is not None and lse_layout not in names:
        raise ValueError(f"lse_layout is {lse_layout!r}, wanted one of {names} for layout {layout!r}")
    q, lse = tensors["q"], tensors["lse"]
    axes = AXES[layout]
    if lse_layout is None and q.dim() == len(axes) and q.shape[axes.index("h")] == q.shape[axes.index("s")] > 1:
        size = q.shape[axes.index("h")]
        raise ValueError(f"lse of shape {tuple(lse.shape)} is ambiguous: heads and rows are both {size}; "
                         f"name its lse_layout, one of {names}")  # fmt: skip
    adapted = dict(tensors)
    for name in ("lse", "delta", "dlse"):
        x = tensors[name]
        if x is None or lse_layout in (None, names[0]):
            continue
        if x.dim() != len(lse_layout):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, wanted {len(lse_layout)} dimensions ({lse_layout})")
        adapted[name] = _unpad(x, tensors) if packed and lse_layout == "bhs" else x.transpose(-1, -2)
    if lse_base == "2":
        adapted["lse"] = adapted["lse"] * LN2
    return adapted


def _unpad(x: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
    """Per-segment padded (batch, nheads_q, max_seqlen_q) to packed (nheads_q, total_q), without reading lengths."""
    cu = tensors["cu_seqlens_q"]
    token = torch.arange(tensors["q"].shape[0], device=x.device)
    b = torch.bucketize(token, cu[1:].contiguous(), right=True).clamp_max(x.shape[0] - 1)
    i = (token - cu[b]).clamp_max(x.shape[2] - 1)
    return x[b, :, i].t()
