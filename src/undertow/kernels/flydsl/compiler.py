"""From a step to machine code: launchers, their arguments, and ISA text compiled in a child process.

Nothing but the wheel is needed for the text. An instruction the target does not have aborts the whole process inside
LLVM, so every build gets a process of its own, forked from one that has imported FlyDSL.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import isolate

TIMEOUT_S = 900
FLOATS = frozenset({"lse", "delta", "lse_in", "dlse", "delta_in", "dsink", "sink"})
EXTRA = "pip install 'undertow[amd]'"


def launcher(key: tuple[str, str, Any, frozenset[str]]) -> Any:
    """The FlyDSL launcher that `key` builds. Tracing happens when it is compiled."""
    module, builder, geometry, features = key
    isolate.claim("flydsl")
    try:
        device = importlib.import_module(f"{__package__}.{module}")
    except ImportError as error:
        raise ImportError(f"the flydsl kernel needs FlyDSL ({error}); {EXTRA}") from error
    return getattr(device, builder)(geometry, features)


def arguments(jit: Any, key: tuple[str, str, Any, frozenset[str]], args: Sequence[Any] | None = None) -> list[Any]:
    """FlyDSL arguments of a launcher, without the stream: those of a step and its grid, or placeholders for None.

    Null pointers tell FlyDSL to compile and not to launch.
    """
    import flydsl.expr as fx

    from . import prims_device
    from .segments_device import Segments

    found = []
    for at, (name, kind) in enumerate(_parameters(jit)):
        given = None if args is None else args[at]
        if kind == "View":
            ptr, *strides = (None, 0, 0, 0) if given is None else given
            found.append(prims_device.View(_pointer(name, key, ptr), *(fx.Int64(s) for s in strides)))
        elif kind == "Segments":
            used_q, used_k, *numbers = (None,) * 2 + (0,) * 6 if given is None else given
            pointers = (_pointer("used", key, used) for used in (used_q, used_k))
            found.append(Segments(*pointers, *(fx.Int32(n) for n in numbers), features=key[3]))
        elif kind in ("Scales", "Grid"):
            bundle = getattr(prims_device, kind)
            numbers = (1,) * len(bundle.types) if given is None else given
            found.append(bundle(*(t(n) for t, n in zip(bundle.types, numbers, strict=True))))
        elif kind == "Pointer":
            found.append(_pointer(name, key, given))
        else:
            found.append(getattr(fx, kind)(given or 0))
    return found


@lru_cache(maxsize=256)
def _parameters(jit: Any) -> tuple[tuple[str, str], ...]:
    """(name, type) of a launcher's kernel arguments."""
    found = inspect.signature(jit.func).parameters.values()
    kinds = ((p.name, str(p.annotation).rsplit(".", maxsplit=1)[-1]) for p in found)
    return tuple((name, kind) for name, kind in kinds if name != "stream")


def _pointer(name: str, key: tuple[str, str, Any, frozenset[str]], tensor: Any) -> Any:
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from .prims_device import ELEMENT

    _, _, geometry, features = key
    small = "bf16" in features or getattr(geometry, "accumulate", "") == "bf16"
    if name in FLOATS or (name == "dq_acc" and not small):
        element, align = fx.Float32, 4
    elif name.startswith(("cu", "used")):
        element, align = fx.Int32, 4
    else:
        element, align = ELEMENT[geometry.dtype], 4
    return flyc.from_c_void_p(element, None if tensor is None else tensor.data_ptr(), assumed_align=align)


def compile_launcher(jit: Any, key: tuple[str, str, Any, frozenset[str]]) -> Any:
    """FlyDSL's compiled function of a launcher. Never launches: every pointer is null."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    return flyc.compile(jit, *arguments(jit, key), fx.Stream(None))


def confirm(key: tuple[str, str, Any, frozenset[str]], text: str) -> None:
    """Check that machine code is the build a key stands for: workgroup size and LDS as its geometry resolves them.

    Raises:
        RuntimeError: they differ, so that no count or time of this code may be read as that build's.
    """
    geometry = key[2]
    wanted = {"max_flat_workgroup_size": geometry.threads, "group_segment_fixed_size": geometry.lds_bytes}
    for name, want in wanted.items():
        found = re.search(rf"^\s*\.{name}:\s+(\d+)", text, re.MULTILINE)
        have = int(found.group(1)) if found else None
        if have != want:
            raise RuntimeError(f"code has {name} {have}, the resolved geometry {want}: {geometry}")


def isa(key: tuple[str, str, Any, frozenset[str]]) -> str:
    """ISA text of one build; see `isa_many`."""
    return isa_many([key])[0]


def isa_many(keys: Sequence[tuple[str, str, Any, frozenset[str]]]) -> list[str]:
    """ISA text of each build, compiled in child processes where this source was not compiled before.

    Raises:
        RuntimeError: the compiler failed or aborted; the text has the build and the end of its output.
    """
    paths = [_cache() / f"{_digest(key)}.s" for key in keys]
    for arch in sorted({key[2].arch for key in keys}):
        wanted = {p: k for p, k in zip(paths, keys, strict=True) if k[2].arch == arch and not p.exists()}
        if wanted:
            _compile(arch, wanted)
    return [path.read_text() for path in paths]


def _compile(arch: str, wanted: dict[Path, tuple[str, str, Any, frozenset[str]]]) -> None:
    # The arch is read from the environment at import and at trace time, so the child gets it from its first moment.
    names = [f"{name}={arch}" for name in ("FLYDSL_GPU_ARCH", "ARCH")] + ["FLYDSL_RUNTIME_ENABLE_CACHE=0"]
    command = ["env", *names, sys.executable, "-m", f"{__package__}.compiler"]
    done = subprocess.run(command, input=pickle.dumps(wanted), capture_output=True, timeout=TIMEOUT_S, check=False)
    missing = [key for path, key in wanted.items() if not path.exists()]
    if missing:
        tail = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
        raise RuntimeError(f"flydsl could not compile {missing[0]} for {arch} (status {done.returncode}):\n{tail}")


@lru_cache(maxsize=1)
def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"undertow-isa-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest(key: tuple[str, str, Any, frozenset[str]]) -> str:
    module, builder, geometry, features = key
    text = repr((module, builder, geometry, sorted(features), _source()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _source() -> str:
    folder = Path(__file__).parent
    files = sorted(folder.glob("*_device.py")) + [folder / "geometry.py", Path(__file__)]
    version = importlib.metadata.version("flydsl")
    return version + hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _text(key: tuple[str, str, Any, frozenset[str]]) -> str:
    """Compile one build in this process, with the pass that emits ISA text in place of a linked object."""
    import flydsl.compiler.backends as backends
    from flydsl.compiler import register_backend
    from flydsl.compiler.backends.rocm import RocmBackend
    from flydsl.compiler.jit_function import _extract_isa_text

    class IsaBackend(RocmBackend):
        def _pipeline_parts(self, *, compile_hints: dict) -> tuple[list[str], str]:
            passes, _ = super()._pipeline_parts(compile_hints=compile_hints)
            return passes, "gpu-module-to-binary{format=isa}"

        def hash(self) -> str:
            return super().hash() + ":isa"

    register_backend("rocm", IsaBackend, force=True)
    backends._make_backend.cache_clear()
    jit = launcher(key)
    compiled = compile_launcher(jit, key)
    return _extract_isa_text(compiled._keepalive.ir)


def _serve() -> None:
    """Child: compile every (path, key) of stdin, each in a fork, and write the text to its path."""
    import flydsl.compiler
    import flydsl.expr

    del flydsl
    for path, key in pickle.load(sys.stdin.buffer).items():
        sys.stdout.flush()
        if os.fork():
            os.wait()
            continue
        status = 1
        try:
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(_text(key))
            part.rename(path)
            status = 0
        finally:
            if status:
                import traceback

                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    _serve()
