"""The kernels of this folder as callables: objects built ahead of time where there are some, else compiled here."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import itertools
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...env import settings
from .. import isolate, watch
from .geometry import Geometry, choose, launches

ARCH = "sm_90a"
DTYPES = ("bf16", "fp16")
KINDS = {"main": ("main_device", "Backward"), "dq": ("dq_device", "DqBackward")}
"""Kind of kernel -> module and class: `cls(geometry)` is compiled, for its own `.arguments()`."""
EXTRA = "pip install 'undertow[hopper]'"
SETTING = "UNDERTOW_HOPPER_OBJECTS"
HERE = Path(__file__).parent
LINK = ("-shared", "-fPIC", "-O1", "-s", "-Wl,-z,lazy", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")
SHARED_FIELD = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : .*struct<\(array<3 x i32>, array<3 x i32>, i64, "
)
"""Where host code takes the address of a launch configuration's third field: grid, block, dynamic shared memory."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compile: the DSL's function, machine code, all that the assembler said, and what a launch asks for."""

    function: Any
    cubin: bytes
    log: str
    shared_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel ready to launch: the name it was built under, its function, and how to read its machine code.

    Whoever watches is told of every launch: the kind, and (entry, blocks).
    """

    name: str
    function: Callable[..., None]
    code: Callable[[], bytes]

    def __call__(self, *arguments: Any) -> None:
        """Launch; the last argument is the number of blocks."""
        self.function(*arguments)
        watch.launched(self.name.partition("_")[0], (self, arguments[-1]))


def entry(geometry: Geometry, kind: str = "main") -> Entry:
    """The kernel as a function of torch tensors and numbers, in the order of the class's `__call__` less the stream.

    It runs on torch's current stream, and checks dtypes, fixed extents, strides and alignment itself (ValueError).
    Loads `object_name(geometry, kind)`.so from the folder that UNDERTOW_HOPPER_OBJECTS names, if it is there;
    otherwise compiles, once a process.

    Raises:
        ImportError: neither is possible; the text has the extra, the setting and the name.
        RuntimeError: this machine cannot run it: no Hopper GPU, or torch brought no CUDA runtime of 12.8 or newer.
        ValueError: no such kind.
    """
    return _entry(geometry, kind)


@cache
def _entry(geometry: Geometry, kind: str) -> Entry:
    if reason := available(geometry, kind):
        raise ImportError(reason)
    if path := object_path(geometry, kind):
        return Entry(path.stem, _load(path), path.read_bytes)
    isolate.claim("cutlass")
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir

    with tempfile.TemporaryDirectory() as folder:  # what is kept is written, too
        made, name = _compile(geometry, kind, cute.KeepCUBIN, DumpDir(folder)), object_name(geometry, kind)
    function = made.__tvm_ffi_object__()
    if function is None:
        raise RuntimeError(f"{name} is compiled for {ARCH}, which this machine cannot run")
    return Entry(name, function, lambda: bytes(made.__cubin__))


def available(geometry: Geometry | None = None, kind: str = "main") -> str:
    """Why `entry` cannot give the kernel: empty when it can. Without a geometry: why it can give none at all.

    Imports nothing; the search for packages is done once a process.
    """
    missing = " and ".join(_missing())
    if not missing:
        return ""
    folder, name = settings().hopper_objects, f"{object_name(geometry, kind) if geometry else kind + '_*'}.so"
    if folder and any(Path(folder).glob(name)):
        return f"objects are loaded by tvm_ffi, which is not installed ({EXTRA})" if "tvm_ffi" in missing else ""
    where = f"{SETTING}={folder} holds no {name}" if folder else f"{SETTING} names no folder that holds {name}"
    return f"{where}, and without {missing} it cannot be compiled ({EXTRA})"


@cache
def _missing() -> tuple[str, ...]:
    return tuple(name for name in ("nvidia_cutlass_dsl", "cutlass", "tvm_ffi") if find_spec(name) is None)


def object_name(geometry: Geometry, kind: str = "main") -> str:
    """What an object is called: kind, dims, dtype, tile, and a hash of the geometry and of the sources it came from."""
    _device_class(kind)
    g = geometry
    digest = hashlib.sha256(f"{g!r} {_sources()}".encode()).hexdigest()[:10]
    return f"{kind}_{g.head_dim_qk}_{g.head_dim_v}_{g.dtype}_q{g.tile_q}_kv{g.tile_kv}_{digest}"


@cache
def _sources() -> str:
    files = (*sorted(HERE.glob("*_device.py")), HERE / "geometry.py", Path(__file__), HERE / "runtime.c")
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def object_path(geometry: Geometry, kind: str = "main") -> Path | None:
    """The object of the folder that UNDERTOW_HOPPER_OBJECTS names; None where the setting or the file is missing."""
    folder = settings().hopper_objects
    path = Path(folder, f"{object_name(geometry, kind)}.so").resolve() if folder else None
    return path if path and path.is_file() else None


def _device_class(kind: str) -> tuple[str, str]:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(KINDS)}")
    return KINDS[kind]


def _load(path: Path) -> Callable[..., None]:
    import torch
    import tvm_ffi

    mapped = re.search(r"/\S*/libcudart[^/\s]*\.so[^/\s]*", Path("/proc/self/maps").read_text())
    if not mapped:
        raise RuntimeError(f"{path.name} needs the CUDA runtime of a CUDA build of torch, this is {torch.__version__}")
    # An object's calls into the runtime are bound by name, to whatever the process has made global.
    if not hasattr(ctypes.CDLL(mapped.group(), mode=ctypes.RTLD_GLOBAL), "cudaLibraryLoadData"):
        raise RuntimeError(f"{path.name} needs a CUDA runtime of 12.8 or newer, torch has {torch.version.cuda}")
    return tvm_ffi.load_module(str(path))[path.stem]


def _compile(geometry: Geometry, kind: str, *options: Any) -> Any:
    from cutlass import cute

    module, name = _device_class(kind)
    kernel = getattr(importlib.import_module(f"{__package__}.{module}"), name)(geometry)
    return cute.compile[(cute.EnableTVMFFI, cute.GPUArch(ARCH), *options)](kernel, *kernel.arguments())


def compiled(geometry: Geometry, kind: str = "main", ptxas: str = "") -> Compiled:
    """Compile with everything that an instrument reads, once a process. Needs no GPU; 5 s on one core.

    ptxas: more options of the assembler, by space, such as "--opt-level 0".

    Raises:
        ImportError: the DSL is not installed.
        ValueError: no such kind.
    """
    if missing := _missing():
        raise ImportError(f"{' and '.join(missing)} not installed ({EXTRA})")
    return _compiled(geometry, kind, ptxas)


@lru_cache(maxsize=64)
def _compiled(geometry: Geometry, kind: str, ptxas: str) -> Compiled:
    isolate.claim("cutlass")
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said.yaml")
        wanted = [cute.KeepCUBIN, DumpDir(folder), cute.RemarkFilter("ptxas"), cute.RemarkOutput(str(said))]
        function = _compile(geometry, kind, *wanted, *([cute.PtxasOptions(ptxas)] if ptxas else []))
        seconds = time.perf_counter() - start
        return Compiled(function, bytes(function.__cubin__), said.read_text(), _launch_bytes(function), seconds)


def _launch_bytes(function: Any) -> int:
    """Dynamic shared memory that the host code writes into its launch configuration."""
    (body,) = (part for part in str(function.ir_module).split("\n  llvm.func ") if "@_cudaLaunchKernelEx(%" in part)
    value = re.search(rf"llvm\.store (%\d+), {SHARED_FIELD.search(body).group(1)} : i64", body).group(1)
    return int(re.search(rf"{value} = llvm\.mlir\.constant\((\d+) : i64\)", body).group(1))


def planned(dims: Iterable[tuple[int, int]], dtypes: Iterable[str]) -> list[tuple[str, Geometry]]:
    """(kind, geometry) of every object that calls with these (head_dim_qk, head_dim_v) and dtypes ask for.

    Raises ValueError for a pair that no tile holds and a dtype that no kernel multiplies.
    """
    found = []
    for (qk, v), dtype in itertools.product(dims, dtypes):
        plans = [choose(qk, v, dtype, dq=dq) for dq in (True, False)] if dtype in DTYPES else []
        if not any(plans):
            raise ValueError(f"{qk}/{v} {dtype}, wanted head dims that a block can hold and one of {', '.join(DTYPES)}")
        found += [launch for geometry in plans if geometry for launch in launches(geometry)]
    return list(dict.fromkeys(found))


def export(geometries: Iterable[Geometry], folder: str | Path, kind: str = "main") -> list[Path]:
    """Write an object a geometry into the folder, for machines without the DSL, and return their paths.

    An object needs tvm_ffi and the CUDA runtime of torch, and runs on any Linux of this architecture with a Hopper GPU.

    Raises:
        ImportError: the DSL is not installed.
        RuntimeError: there is no C compiler to link with, or it failed; the text has its last words.
        ValueError: no such kind.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("an object is linked by a C compiler, and there is no cc or gcc on the path")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return [_export(compiler, geometry, Path(folder), kind) for geometry in geometries]


def _export(compiler: str, geometry: Geometry, folder: Path, kind: str) -> Path:
    function, name = compiled(geometry, kind).function, object_name(geometry, kind)
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    runtime = next(Path(p) for p in get_prefix_dsl_libs("CUTE_DSL").split(":") if "libcute_dsl_runtime" in p)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        part, linked = Path(scratch, "kernel.o"), Path(scratch, f"{name}.so")
        function.export_to_c(object_file_path=str(part), function_name=name)
        inputs = (part, HERE / "runtime.c", runtime.parent / "libcuda_dialect_runtime_static.a")
        command = [compiler, *LINK, *map(str, inputs), "-o", str(linked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} could not link {name}:\n{done.stderr[-2000:]}")
        return linked.replace(folder / linked.name)
