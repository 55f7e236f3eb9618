"""Triton kernels that are not ours in kind, for the simulator to run."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    tl.store(out + i, tl.load(x + i, mask=live, other=0.0) + tl.load(y + i, mask=live, other=0.0), mask=live)


@triton.jit
def matmul_kernel(a, b, c, m_size, n_size, k_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, k_size, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a_tile = tl.load(
            a + m[:, None] * k_size + k[None, :], mask=(m[:, None] < m_size) & (k[None, :] < k_size), other=0.0
        )
        b_tile = tl.load(
            b + k[:, None] * n_size + n[None, :], mask=(k[:, None] < k_size) & (n[None, :] < n_size), other=0.0
        )
        acc = tl.dot(a_tile, b_tile, acc)
    tl.store(c + m[:, None] * n_size + n[None, :], acc, mask=(m[:, None] < m_size) & (n[None, :] < n_size))


@triton.jit
def softmax_kernel(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * n + i, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def layernorm_kernel(x, weight, bias, out, n, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    live = i < n
    value = tl.load(x + row * n + i, mask=live, other=0.0).to(tl.float32)
    centred = tl.where(live, value - tl.sum(value, 0) / n, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / n + eps)
    y = y * tl.load(weight + i, mask=live, other=0.0) + tl.load(bias + i, mask=live, other=0.0)
    tl.store(out + row * n + i, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def histogram_kernel(values, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(values + i, mask=i < n, other=0), 1, mask=i < n)


@triton.jit
def turns_kernel(turn, out, BLOCK: tl.constexpr):
    """Program p waits for its turn, then appends to `out`: an ordered chain through a counter in memory."""
    p = tl.program_id(0)
    while tl.atomic_add(turn, 0) != p:
        pass
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(out + i) * 2.0 + p)
    tl.debug_barrier()
    tl.atomic_add(turn, 1)


@triton.jit
def off_by_one_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i <= n, other=0.0), mask=i < n)


@triton.jit
def shifted_kernel(x, y, out, shift, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i + shift) + tl.load(y + i))
