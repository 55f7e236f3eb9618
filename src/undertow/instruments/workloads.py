"""Named problems: what `undertow verify` proves, with the sizes of real models scaled to the device."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Band, Problem

CAUSAL = Band(None, 0)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named problem; `outliers` asks for outlier columns in q and k, `gap` for rows of NaN between segments."""

    name: str
    about: str
    problem: Problem
    outliers: bool = False
    gap: int = 0


def verify_workloads(scale: int = 1) -> tuple[Workload, ...]:
    """Every row of the semantics at least once. `scale` multiplies lengths: 1 for a CPU, 8 and more for a GPU."""
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
        Workload("outliers", "outlier columns, as trained", dense(hk=2, **d128, band=CAUSAL), outliers=True),
        Workload("fp16", "fp16", dense(**d128, band=CAUSAL, dtype="fp16")),
        Workload("fp32", "true fp32", dense(h=2, hk=1, **d64, band=CAUSAL, dtype="fp32")),
        Workload("det-mla", "deterministic MLA, packed", packed(**mla, band=CAUSAL, deterministic=True)),
        Workload("det-gqa", "deterministic GQA", dense(h=8, hk=2, **d128, band=CAUSAL, deterministic=True)),
        *odd,
    )


def _dims(qk: int, v: int) -> dict[str, int]:
    return {"head_dim_qk": qk, "head_dim_v": v}
