"""House rules of device code that ruff cannot see, for Triton functions. Usage: check_kernels.py FILE..."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_RUNTIME, MAX_CONSTEXPR, MAX_LINES = 16, 12, 120
SHAPE = re.compile(r"#.*\[[A-Za-z0-9_, *+]*\]")
GONE = ("tl.make_block_ptr", "tl.advance")


def is_jit(fn: ast.FunctionDef) -> bool:
    """Whether a decorator is some `jit`."""
    return any(ast.unparse(d).split("(")[0].endswith("jit") for d in fn.decorator_list)


def parameter_faults(fn: ast.FunctionDef) -> Iterator[str]:
    """Too many parameters, or names that do not tell compile time from run time."""
    args = fn.args.args + fn.args.kwonlyargs
    const = [a for a in args if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)]
    runtime = [a for a in args if a not in const]
    if len(runtime) > MAX_RUNTIME and fn.name != "__call__":  # a host function's are its callers' arguments
        yield f"{len(runtime)} run-time parameters (at most {MAX_RUNTIME}): make a tensor and its strides a View"
    if len(const) > MAX_CONSTEXPR:
        yield f"{len(const)} constexpr parameters (at most {MAX_CONSTEXPR})"
    yield from (f"constexpr `{a.arg}` is not UPPER_CASE" for a in const if not a.arg.isupper())
    yield from (f"run-time `{a.arg}` is not lower_case" for a in runtime if not a.arg.islower())


def body_faults(fn: ast.FunctionDef, lines: list[str]) -> Iterator[str]:
    """Length, docstring, masked loads without other=, loads and dots without a [shape] comment, dropped APIs."""
    doc = ast.get_docstring(fn) or ""
    if not doc:
        yield "has no docstring"
    if fn.name.endswith("_kernel") and not all(word in doc for word in ("Grid:", "Writes")):
        yield "docstring does not state `Grid:` and `Writes`"
    if fn.end_lineno - fn.lineno + 1 > MAX_LINES:
        yield f"{fn.end_lineno - fn.lineno + 1} lines (at most {MAX_LINES})"
    for call in (n for n in ast.walk(fn) if isinstance(n, ast.Call)):
        name, keywords = ast.unparse(call.func), {k.arg for k in call.keywords}
        if name == "tl.load" and "mask" in keywords and "other" not in keywords:
            yield f"line {call.lineno}: masked tl.load without other="
        if name in GONE:
            yield f"line {call.lineno}: {name} is gone from newer Triton"
        wants_shape = name == "tl.dot" or (name == "tl.load" and "mask" in keywords)
        if wants_shape and not any(SHAPE.search(s) for s in lines[call.lineno - 1 : call.end_lineno]):
            yield f"line {call.lineno}: the result of {name} has no [shape] comment"


def main(paths: list[str]) -> int:
    """Print `file:line name: fault`; 1 when there is any."""
    found = [
        f"{path}:{fn.lineno} {fn.name}: {fault}"
        for path in paths
        for fn in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(fn, ast.FunctionDef) and is_jit(fn)
        for fault in (*parameter_faults(fn), *body_faults(fn, Path(path).read_text().splitlines()))
    ]
    print("\n".join(found) or f"{len(paths)} device files follow the house rules")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
