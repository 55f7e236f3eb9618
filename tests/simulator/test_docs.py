"""The worked example of docs/simulator.md runs as printed, and breaks as printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def run(tmp_path, code):
    path = tmp_path / "softmax.py"
    path.write_text(code)
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False)


def test_the_example_runs(tmp_path):
    code = re.search(r"```python\n(# softmax\.py.*?)```", PAGE, re.DOTALL).group(1)
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wave-instructions" in done.stdout


def test_the_broken_example_is_reported(tmp_path):
    code = re.search(r"```python\n(# softmax\.py.*?)```", PAGE, re.DOTALL).group(1)
    broken = code.replace("tl.load(x + row * n + i, mask=i < n", "tl.load(x + row * n + i, mask=i <= n")
    broken = broken.replace("torch.testing", "# torch.testing")
    assert broken.count("<=") == 1
    done = run(tmp_path, broken)
    printed = " ".join(re.search(r"```\n(error global-bounds.*?)```", PAGE, re.DOTALL).group(1).split())
    what = printed.split("out of bounds: ")[1].split(";")[0]
    assert done.returncode != 0 and what in done.stderr and "workgroup=(6, 0, 0)" in done.stderr


def test_every_name_of_the_page_exists():
    from undertow import simulator
    from undertow.simulator import checks, launch, local_memory, machine, small_memory, vector_memory

    source = "".join(
        Path(m.__file__).read_text() for m in (checks, launch, local_memory, machine, small_memory, vector_memory)
    )
    table = PAGE.split("## What is checked")[1].split("## Counters")[0]
    kinds = [k for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for k in re.findall(r"`([a-z-]+)`", row)]
    assert len(kinds) > 12 and all(f'"{kind}"' in source for kind in kinds), kinds
    for name in re.findall(r"simulate\.(\w+)\(", PAGE):
        assert hasattr(simulator, name)


def test_the_speed_record_meets_its_targets():
    record = json.loads(Path(__file__).with_name("speed_record.json").read_text())
    rows = {(row["heads"], row["checks"]): row for row in record["rows"]}
    assert rows[1, False]["processor_s"] <= 1.5 and rows[1, True]["processor_s"] <= 3
    for checks in (False, True):
        assert rows[8, checks]["processor_s"] <= 4 * rows[1, checks]["processor_s"]
        assert rows[32, checks]["million_wave_instructions_per_processor_s"] >= 0.5
    for (heads, checks), row in rows.items():
        assert f"{row['wall_s']:.2f} s" in PAGE and f"{row['wave_instructions']:,}" in PAGE, (heads, checks)


def test_numpy_is_the_only_dependency():
    heavy = {"torch", "triton", "tinygrad", "rich"}
    code = f"import sys; from undertow import simulator; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
