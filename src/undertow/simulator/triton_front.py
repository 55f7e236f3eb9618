"""Compile a @triton.jit function for an AMD target offline and flatten its arguments as the kernel receives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import asm

NUMPY_TO_TORCH_FREE = {
    "float32": "fp32",
    "float16": "fp16",
    "float64": "fp64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "i1",
    "bfloat16": "bf16",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """ISA text of one specialisation and its argument values in kernel order."""

    text: str
    name: str
    threads: int
    lds_bytes: int
    values: dict[str, object]
    meta: dict[str, object]


class _ArrayArgument:
    """A numpy array as Triton's specialisation wants to see a tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self) -> int:
        """Host address; only its alignment matters."""
        return self.array.__array_interface__["data"][0]


def compile_kernel(
    jit_fn: object, args: Mapping[str, object] | Sequence[object], target: str, constexprs: Mapping[str, object]
) -> Compiled:
    """Specialise on the arguments as a launch would, and compile. Raises ValueError for arguments that do not fit."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as triton_compile
    from triton.runtime.jit import JITFunction, create_function_from_signature

    if not isinstance(jit_fn, JITFunction):
        raise ValueError(
            f"jit_fn: {type(jit_fn).__name__}; a @triton.jit function is wanted"
            " (of an autotuned one, pass .fn and the constexprs; interpreted ones need TRITON_INTERPRET unset)"
        )
    gpu = GPUTarget("hip", target, 64)
    backend = make_backend(gpu)
    binder = create_function_from_signature(jit_fn.signature, jit_fn.params, backend)
    positional, named = ((), dict(args)) if isinstance(args, Mapping) else (tuple(args), {})
    wrap = lambda v: _wrap(v)
    try:
        bound, specialization, extra = binder(
            *map(wrap, positional), **{k: wrap(v) for k, v in named.items()}, **constexprs
        )
    except TypeError as error:
        raise ValueError(f"args of {jit_fn.__name__}: {error}") from None
    unknown = [k for k in extra if k not in backend.parse_options({}).__dict__]
    if unknown:
        raise ValueError(
            f"{unknown[0]}={extra[unknown[0]]!r}: neither a parameter of {jit_fn.__name__} nor a compiler option"
        )
    options, signature, constants, attrs = jit_fn._pack_args(backend, dict(extra), bound, specialization, extra)
    source = ASTSource(jit_fn, signature, constants, attrs)
    compiled = triton_compile(source, target=gpu, options=options.__dict__)
    text = compiled.asm["amdgcn"]
    values: dict[str, object] = {}
    for name, value in bound.items():
        _flatten(name, value, signature[name], values)
    kernel = asm.parse(text).kernel(compiled.metadata.name)
    visible = [a for a in kernel.arguments if not a.kind.startswith("hidden_")]
    for extra_argument in visible[len(values) :]:  # scratch pointers that Triton appends; null when it needs none
        if extra_argument.kind != "global_buffer":
            raise ValueError(f"{jit_fn.__name__}: {len(values)} values for {len(visible)} kernel arguments")
        values[f"scratch{extra_argument.offset}"] = None
    return Compiled(
        text,
        compiled.metadata.name,
        compiled.metadata.num_warps * 64,
        compiled.metadata.shared,
        values,
        {**bound, **constexprs},
    )


def _wrap(value: object) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in NUMPY_TO_TORCH_FREE:
            raise ValueError(f"numpy dtype {value.dtype}: Triton has no such type")
        return _ArrayArgument(value)
    if isinstance(value, tuple):
        items = [_wrap(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _flatten(name: str, value: object, kind: object, out: dict[str, object]) -> None:
    """Append the run-time leaves of one parameter. Constants are not passed to the kernel."""
    if isinstance(kind, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        for field, item, inner in zip(fields, value, kind, strict=True):
            _flatten(f"{name}.{field}", item, inner, out)
    elif kind != "constexpr":
        out[name] = value.array if isinstance(value, _ArrayArgument) else value
