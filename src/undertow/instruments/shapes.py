"""The named shapes of the bench: the same in `undertow bench`, the docs and the tests. bf16, causal unless said."""

from __future__ import annotations

from dataclasses import replace

from ..problem import Band, Problem
from .workloads import CAUSAL, MLA_VARLEN_13, Workload, short_documents

DOCUMENTS = (4096, 3000, 2500, 2048, 1700, 1400, 1000, 640)
ODD_DIMS = (40, 48, 72, 80, 112)
DETERMINISTIC = "det"
"""The suffix of a shape's deterministic twin: S1 is `S1`, its twin `S1-det`."""


def _dims(qk: int, v: int | None = None) -> dict[str, int]:
    return {"head_dim_qk": qk, "head_dim_v": qk if v is None else v}


def _dense(batch: int, seqlen: int, heads: tuple[int, int], dims: dict[str, int], **fields: object) -> Problem:
    band = {"band": fields.pop("band", CAUSAL)}
    seqlen_k = fields.pop("seqlen_k", seqlen)
    return Problem.dense(batch, seqlen, seqlen_k, nheads_q=heads[0], nheads_kv=heads[1], **dims, **band, **fields)


def _packed(lengths: tuple[int, ...], heads: tuple[int, int], dims: dict[str, int]) -> Problem:
    return Problem.packed(lengths, nheads_q=heads[0], nheads_kv=heads[1], **dims, band=CAUSAL)


def _base() -> tuple[Workload, ...]:
    mla, gqa = _dims(192, 128), (32, 8)
    named = {
        "S1": ("MLA 192/128", _dense(2, 8192, (16, 16), mla)),
        "S2": ("MLA 192/128, 8 packed documents", _packed(DOCUMENTS, (16, 16), mla)),
        "S1g": ("MLA 192/128 with 2 kv heads", _dense(2, 8192, (16, 2), mla)),
        "S3": ("GQA 32:8, d 128", _dense(2, 8192, gqa, _dims(128))),
        "S4": ("MHA, d 64", _dense(4, 4096, (16, 16), _dims(64))),
        "S5": ("S3 without a mask", _dense(2, 8192, gqa, _dims(128), band=Band())),
        "S6": ("window (1024, 0), GQA 16:2, d 128", _dense(1, 16384, (16, 2), _dims(128), band=Band(1024, 0))),
        "S7": ("MHA, d 256", _dense(2, 4096, (8, 8), _dims(256))),
        "S8": ("MHA, d 96", _dense(4, 4096, (16, 16), _dims(96))),
        "S10": ("2048 queries after 8192 keys, 192/128", _dense(2, 2048, (16, 16), mla, seqlen_k=8192)),
        "X2": ("64 short packed documents, GQA 32:8, d 128", _packed(short_documents(), gqa, _dims(128))),
    }
    for dim in ODD_DIMS:
        named[f"d{dim}"] = (f"MHA, d {dim}", _dense(4, 4096, (16, 16), _dims(dim)))
    named["d256-128"] = ("MHA, 256/128", _dense(4, 4096, (16, 16), _dims(256, 128)))
    named["mla-varlen-13"] = ("the AMD ladder's 13 documents", _packed(MLA_VARLEN_13, (2, 2), mla))
    return tuple(Workload(name, about, problem) for name, (about, problem) in named.items())


def bench_shapes(*, deterministic: bool | None = False) -> tuple[Workload, ...]:
    """Every named shape: as it is, its deterministic twin, or each followed by its twin (None)."""
    if deterministic is None:
        return tuple(w for base in _base() for w in (base, _twin(base)))
    return tuple(_twin(w) for w in _base()) if deterministic else _base()


def _twin(w: Workload) -> Workload:
    problem = replace(w.problem, deterministic=True)
    return Workload(f"{w.name}-{DETERMINISTIC}", f"{w.about}, deterministic", problem)


def base_name(name: str) -> str:
    """The name of a shape without its determinism."""
    return name.removesuffix(f"-{DETERMINISTIC}")


def pick(names: tuple[str, ...]) -> tuple[Workload, ...]:
    """The shapes of these names, in this order.

    Raises:
        ValueError: a name that is none; the text lists those there are.
    """
    known = {w.name: w for w in bench_shapes(deterministic=None)}
    for name in names:
        if name not in known:
            raise ValueError(f"shape is {name!r}, wanted one of {', '.join(known)}")
    return tuple(known[name] for name in names)


def tiny_shapes() -> tuple[Workload, ...]:
    """The same families at sizes a CPU times in a second: dense, grouped, windowed, packed, bottom-right."""
    return (
        Workload("mla", "S1, small", _dense(1, 256, (2, 2), _dims(192, 128))),
        Workload("mla-packed", "S2, small", _packed((100, 60, 33, 63), (2, 2), _dims(192, 128))),
        Workload("gqa", "S3, small", _dense(1, 256, (4, 2), _dims(64))),
        Workload("full", "S5, small", _dense(1, 256, (4, 2), _dims(64), band=Band())),
        Workload("window", "S6, small", _dense(1, 256, (4, 2), _dims(64), band=Band(64, 0))),
        Workload("chunk", "S10, small", _dense(1, 64, (2, 2), _dims(192, 128), seqlen_k=256)),
        Workload("d40", "an odd head dim, small", _dense(1, 256, (2, 2), _dims(40))),
    )
