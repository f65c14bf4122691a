"""Every command and option explains itself, docs/cli.md says the same, and failures are readable."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from frostline.cli import main as cli
from frostline.errors import StoreLocked


def test_every_command_has_help(cli_reference) -> None:
    assert [" ".join(words) for words, command in cli_reference.commands() if not command.help] == []


def test_every_option_and_argument_has_help(cli_reference) -> None:
    silent = [
        f"{' '.join(words)} {cli_reference.label(parameter)}"
        for words, command in cli_reference.commands()
        for parameter in cli_reference.parameters(command)
        if not parameter.help
    ]
    assert silent == []


def test_every_command_shows_an_example_of_itself(cli_reference) -> None:
    without = []
    for words, command in cli_reference.commands():
        lines = [line.strip() for line in (command.help or "").splitlines()]
        if not hasattr(command, "commands") and not any(x.startswith(" ".join(words)) for x in lines):
            without.append(" ".join(words))
    assert without == [], "their docstrings need a line such as `frostline store check feats --deep`"


def test_reference_is_up_to_date(root: Path, cli_reference) -> None:
    written = (root / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == cli_reference.reference(), "run scripts/cli-reference"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """An app of one command that raises what it is given."""

    def install(error: BaseException) -> None:
        app = typer.Typer()

        @app.command()
        def fail() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)

    return install


def test_our_errors_are_one_line_and_status_1(failing, capsys, monkeypatch) -> None:
    monkeypatch.delenv("FROSTLINE_TRACEBACK", raising=False)
    failing(StoreLocked("Store 'feats' is being written by process 7; wait for it, or stop it."))
    with pytest.raises(SystemExit) as exit:
        cli.main([])
    assert exit.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: Store 'feats' is being written by process 7; wait for it, or stop it.\n"


def test_traceback_on_request(failing, monkeypatch) -> None:
    monkeypatch.setenv("FROSTLINE_TRACEBACK", "1")
    failing(StoreLocked("locked"))
    with pytest.raises(StoreLocked):
        cli.main([])


def test_bugs_keep_their_traceback(failing) -> None:
    failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_ctrl_c_is_status_130(failing) -> None:
    failing(KeyboardInterrupt())
    with pytest.raises(SystemExit) as exit:
        cli.main([])
    assert exit.value.code == 130


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith("frostline 0.")
