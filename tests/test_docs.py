"""README and docs are true: the table is fresh, the example runs, every command and link exists."""

import re
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from undertow.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

sys.path.insert(0, str(ROOT / "tools"))


def test_the_support_table_is_fresh():
    import support_table

    assert support_table.replaced(README) == README, "run `make support-table`"


def test_the_bench_tables_are_fresh():
    import bench_tables

    page = (ROOT / "docs" / "bench.md").read_text()
    assert bench_tables.replaced(page) == page, "run `make bench-tables`"


def test_the_readme_example_runs(capsys):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([1, 512, 16, 192])" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_commands_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    command = get_command(app)
    for line in re.findall(r"^\s*undertow (.+)$", text, re.MULTILINE):
        words = line.split("#")[0].split()
        assert words[0] in command.commands, line
        known = {opt for p in command.commands[words[0]].params for opt in (*p.opts, *p.secondary_opts)}
        unknown = {w.split("=")[0] for w in words if re.match(r"--[a-z]", w)} - known - {"--help"}
        assert not unknown, (line, unknown)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_the_repo_stands_alone():
    words = ("../sha" + "red", "/wo" + "rk/")
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *PAGES, *ROOT.glob("tools/*.py")]:
        text = path.read_text()
        assert not any(word in text for word in words), path
