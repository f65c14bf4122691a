"""The command line described in Markdown, made from the commands themselves.

    scripts/cli-reference            writes docs/cli.md

Also used by the contract tests, which walk the same tree. Nothing here knows a command by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer

from frostline.cli.main import app

HEADER = """# Command line

Made by `scripts/cli-reference` from the commands themselves; change the help texts, then run it.
`FROSTLINE_TRACEBACK=1` shows the traceback behind an `error:` line. Digests of files are kept in
`FROSTLINE_CACHE` (default: `~/.cache/frostline`), so that weights are not read again to be known again; the
folder may be deleted at any time.
"""


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group as (its words, its click command): ('frostline', 'store', 'check'), …"""
    stack: list[tuple[tuple[str, ...], Any]] = [(("frostline",), typer.main.get_command(app))]
    while stack:
        words, command = stack.pop()
        yield words, command
        children = getattr(command, "commands", {})
        stack += [((*words, name), child) for name, child in sorted(children.items(), reverse=True)]


def parameters(command: Any) -> list[Any]:
    """The options and arguments that users see, `--help` aside."""
    return [p for p in command.params if not getattr(p, "hidden", False) and "--help" not in p.opts]


def label(parameter: Any) -> str:
    """How a parameter is written on the command line: `STORE`, `--out`, `--deep/--no-deep`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name).upper()
    return "/".join([*parameter.opts, *parameter.secondary_opts])


def _value(parameter: Any) -> str:
    """What an option is given, where its help names it: ` DIR`, ` auto|never|PATH`, ` fp32|bf16`."""
    if parameter.param_type_name == "argument":
        return ""
    choices = get_args(getattr(getattr(parameter, "type_descriptor", None), "annotation", None))
    given = parameter.metavar or "|".join(c for c in choices if isinstance(c, str))
    return f" {given}".replace("|", "\\|") if given else ""


def _about(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    if parameter.required:
        return f"{text} (required)"
    default = parameter.default
    if callable(default) or default in (None, False, (), []):
        return text
    return f"{text} (default: `{getattr(default, 'value', default)}`)"


def _section(words: tuple[str, ...], command: Any) -> str:
    lines = [f"\n## `{' '.join(words)}`\n"]
    lines += [line.replace("\b", "").rstrip() for line in _help_lines(command)]
    rows = [f"| `{label(p)}{_value(p)}` | {_about(p)} |" for p in parameters(command)]
    if rows:
        lines += ["", "| | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _help_lines(command: Any) -> list[str]:
    """The help text, with its example as a code block; click's `\\b` lines only stop the wrapping."""
    text = [line for line in (command.help or "").splitlines() if line.strip() != "\b"]
    out: list[str] = []
    for line in text:
        example = line.strip().startswith(("frostline ", "torchrun "))
        inside = bool(out) and out[-1] == "```"
        if example and inside:
            out[-1:] = [line.strip(), "```"]
        elif example:
            out += ["```bash", line.strip(), "```"]
        else:
            out.append(line)
    return out


def reference() -> str:
    return HEADER + "".join(_section(words, command) for words, command in commands())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
