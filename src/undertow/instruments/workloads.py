"""Named problems: what `undertow verify` proves, with the sizes of real models scaled to the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problem import Band, Problem

CAUSAL = Band(None, 0)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named problem; `outliers` asks for outlier columns and rows, `gap` for rows of NaN between segments.

    A deterministic one is run `runs` times, and must give the same bits each time.
    """

    name: str
    about: str
    problem: Problem
    outliers: bool = False
    gap: int = 0
    runs: int = 3


MLA_VARLEN_13 = (1471, 3638, 3495, 3624, 774, 3633, 3387, 472, 3127, 3204, 3264, 1846, 833)
"""13 packed documents, 32,768 tokens: the workload that AMD's MLA backward kernels are published on."""


def short_documents(count: int = 64, total: int = 16384) -> tuple[int, ...]:
    """Document i has 64 + (157 i) mod 385 tokens, and the last takes what is left of `total`."""
    lengths = [64 + (157 * i) % 385 for i in range(count - 1)]
    return (*lengths, total - sum(lengths))


def named(scale: int = 1) -> dict[str, tuple[Workload, ...]]:
    """The workloads of `undertow verify` by name; `scale` multiplies lengths and heads where a CPU could not follow."""
    smoke = {w.name: w for w in verify_workloads(scale)}
    heads, d128, mla = min(scale, 4), _dims(128, 128), _dims(192, 128)
    long = Problem.packed(MLA_VARLEN_13, nheads_q=2, nheads_kv=2, **mla, band=CAUSAL)
    grouped = Problem.dense(1, 512 * scale, 512 * scale, nheads_q=32, nheads_kv=8, **d128, band=CAUSAL)
    window = Problem.dense(1, 4096, 4096, nheads_q=2 * heads, nheads_kv=heads, **d128, band=Band(1024, 0))
    short = Problem.packed(short_documents(), nheads_q=4 * heads, nheads_kv=heads, **d128, band=CAUSAL)
    decode = Problem.dense(2, 16, 4096 * heads, nheads_q=8, nheads_kv=2, **mla, band=CAUSAL)
    return {
        "smoke": tuple(smoke.values()),
        "mla-varlen-13": (Workload("mla-varlen-13", "MLA, 13 packed documents, 32,768 tokens", long),),
        "gqa-32-8-dense": (Workload("gqa-32-8-dense", "GQA 32:8, d 128, causal", grouped),),
        "window-1024": (Workload("window-1024", "window (1024, 0), GQA, d 128", window),),
        "short-docs-64": (Workload("short-docs-64", "64 short packed documents, GQA", short),),
        "decode-like": (Workload("decode-like", "16 queries after thousands of keys, MLA dims", decode),),
        "odd-dims": tuple(w for name, w in smoke.items() if name[0] == "d" and name[1].isdigit()),
        "sink-softcap": tuple(smoke[name] for name in ("sink", "sink-dlse", "softcap")),
        "outlier-rows": (smoke["outliers"],),
        "deterministic": tuple(replace(smoke[name], runs=30) for name in ("det-mla", "det-gqa")),
    }


def verify_workloads(scale: int = 1) -> tuple[Workload, ...]:
    """Smoke: every row of the semantics at least once, small. `scale` multiplies lengths: 1 for a CPU, 8 for a GPU."""
    s = 256 * scale
    docs = tuple(n * scale for n in (150, 1, 64, 0, 201, 97))
    keys = tuple(n * scale for n in (150, 40, 30, 17, 201, 120))
    mla, d128, d64 = _dims(192, 128), _dims(128, 128), _dims(64, 64)

    def dense(sq: int = s, sk: int = s, batch: int = 1, h: int = 4, hk: int = 4, **fields: object) -> Problem:
        return Problem.dense(batch, sq, sk, nheads_q=h, nheads_kv=hk, **fields)

    def packed(h: int = 4, hk: int = 4, k: tuple[int, ...] = docs, **fields: object) -> Problem:
        return Problem.packed(docs, k, nheads_q=h, nheads_kv=hk, **fields)

    odd = [
        Workload(f"d{qk}-{v}", f"head dims {qk}/{v}", dense(batch=2, h=2, hk=1, **_dims(qk, v), band=CAUSAL))
        for qk, v in ((40, 40), (72, 72), (80, 80), (112, 112), (64, 128), (256, 128))
    ]
    sbhd = dense(batch=2, h=8, hk=2, **d128, band=CAUSAL, layout="sbhd")
    gemma = dense(h=2, hk=1, **_dims(256, 256), softcap=30.0, band=CAUSAL)
    side = packed(k=keys, **d64, band=CAUSAL, has_sink=True, has_dlse=True)
    top_left = dense(sk=s + 64, **d64, band=Band(None, 0, "top_left"))
    return (
        Workload("mla", "DeepSeek-style MLA, dense causal", dense(**mla, band=CAUSAL)),
        Workload("mla-packed", "MLA over packed documents", packed(**mla, band=CAUSAL)),
        Workload("mla-gqa", "MLA dims, 4 query heads a kv head", dense(hk=1, **mla, band=CAUSAL)),
        Workload("mla-chunk", "bottom-right: queries after a longer prefix", dense(sq=s // 4, **mla, band=CAUSAL)),
        Workload("gqa", "Llama-style GQA", dense(batch=2, h=8, hk=2, **d128, band=CAUSAL)),
        Workload("gqa-sbhd", "the same in Megatron's layout", sbhd),
        Workload("full-bhsd", "no mask, heads first, unequal lengths", dense(sk=s + 40, **d64, layout="bhsd")),
        Workload("cross", "packed, unequal lengths, queries without keys", packed(k=keys, **d128, band=CAUSAL)),
        Workload("padded", "packed with NaN padding between segments", packed(**d64, band=CAUSAL), gap=7),
        Workload("window", "sliding window, MQA", dense(h=4, hk=1, **d64, band=Band(s // 4, 0))),
        Workload("window-packed", "two-sided window, packed", packed(k=keys, **d64, band=Band(31, 16))),
        Workload("top-left", "SDPA's causal alignment", top_left),
        Workload("softcap", "Gemma-style softcap at d 256", gemma),
        Workload("sink", "gpt-oss: sink and window", dense(h=8, hk=1, **d64, band=Band(s // 2, 0), has_sink=True)),
        Workload("sink-dlse", "sink, gradient through LSE, packed", side),
        Workload("outliers", "outlier columns and rows, as trained", dense(hk=2, **d128, band=CAUSAL), outliers=True),
        Workload("fp16", "fp16", dense(**d128, band=CAUSAL, dtype="fp16")),
        Workload("fp32", "true fp32", dense(h=2, hk=1, **d64, band=CAUSAL, dtype="fp32")),
        Workload("det-mla", "deterministic MLA, packed", packed(**mla, band=CAUSAL, deterministic=True)),
        Workload("det-gqa", "deterministic GQA", dense(h=8, hk=2, **d128, band=CAUSAL, deterministic=True)),
        *odd,
    )


def _dims(qk: int, v: int) -> dict[str, int]:
    return {"head_dim_qk": qk, "head_dim_v": v}
