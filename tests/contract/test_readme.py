"""What README.md and docs/*.md tell people to run, runs.

Python blocks of a file are run together, top to bottom, as one script in an empty folder; a block that is
not meant to run is fenced as ```text. Of shell lines, those that begin with `frostline` or `scripts/` are
checked for existing commands, options and files, without running them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "src" / "frostline_recipes").glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *RECIPES]
SHELLS = ("bash", "console", "sh", "shell")


def blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """(language, number of lines before it, lines) of each fenced block."""
    language, start, lines = None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and language is None:
            language, start, lines = fence[1], number, []
        elif fence:
            yield language, start, textwrap.dedent("\n".join(lines)).splitlines()
            language = None
        elif language is not None:
            lines.append(line)


def script_of(text: str) -> str:
    """The Python blocks as one script, at their own line numbers: tracebacks then point into the page."""
    script: list[str] = []
    for language, start, lines in blocks(text):
        if language == "python":
            script += [""] * (start - len(script)) + lines
    return "\n".join(script)


def has_python(page: Path) -> bool:
    return page.exists() and bool(script_of(page.read_text(encoding="utf-8")))


def shell_lines(text: str) -> Iterator[str]:
    for language, _, lines in blocks(text):
        if language in SHELLS:
            joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
            yield from (line.strip().removeprefix("$ ") for line in joined.splitlines())


def complaint(line: str, tree: dict[tuple[str, ...], object], root: Path) -> str | None:
    """What is wrong with a shell line, or None. Lines about other programs are not ours to judge."""
    words = shlex.split(re.split(r"\s(?:\||&&|;|>|2>)\s?", line)[0], comments=True)
    if words and words[0].startswith("scripts/"):
        script = root / words[0]
        return None if script.is_file() and script.stat().st_mode & 0o100 else f"no such script: {line}"
    if not words or words[0] != "frostline":
        return None
    depth = 1
    while tuple(words[: depth + 1]) in tree and depth < len(words):
        depth += 1
    command, rest = tree[tuple(words[:depth])], words[depth:]
    rest = rest[: rest.index("--")] if "--" in rest else rest  # after that comes somebody else's command
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return f"no such command: {line}"
    known = {"--help", *(o for p in command.params for o in [*p.opts, *p.secondary_opts])}
    unknown = [w for w in rest if w.startswith("--") and len(w) > 2 and w.split("=")[0] not in known]
    return f"no such option {unknown[0]}: {line}" if unknown else None


@pytest.fixture(scope="module")
def tree(cli_reference) -> dict[tuple[str, ...], object]:
    return dict(cli_reference.commands())


def test_readme_has_an_example_and_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script_of(text)
    assert any(line.startswith("scripts/") for line in shell_lines(text))


@pytest.mark.parametrize("page", [p for p in PAGES if has_python(p)], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    script = script_of(page.read_text(encoding="utf-8"))
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{page.name} (same line numbers):\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_lines_name_what_exists(page: Path, tree) -> None:
    lines = shell_lines(page.read_text(encoding="utf-8"))
    assert [bad for line in lines if (bad := complaint(line, tree, ROOT))] == []


def test_examples_in_help_texts_parse(tree) -> None:
    lines = [x.strip() for command in tree.values() for x in (command.help or "").splitlines()]
    examples = [x for x in lines if x.startswith("frostline ")]
    assert [bad for line in examples if (bad := complaint(line, tree, ROOT))] == []


def test_extras_named_anywhere_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [*PAGES, *(ROOT / "src" / "frostline").rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in texts)
    named = {e for group in re.findall(r"frostline\[([\w,]+)\]", text) for e in group.split(",")}
    assert named <= set(extras)


def test_mistakes_are_noticed(tree, tmp_path: Path) -> None:
    page = "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n```bash\n$ frostline stoer check a\n```\n"
    assert script_of(page).splitlines() == ["", "x = 1", "", "", "", "assert x == 2"]
    assert [complaint(line, tree, tmp_path) for line in shell_lines(page)] == [
        "no such command: frostline stoer check a"
    ]
    assert complaint("scripts/nothing --full", tree, tmp_path) == "no such script: scripts/nothing --full"
    assert complaint("frostline --vresion | cat", tree, tmp_path) is not None
    assert complaint("frostline --version | cat", tree, tmp_path) is None
    assert complaint("git status", tree, tmp_path) is None
