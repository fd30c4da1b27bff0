"""A record of options makes a command and a Python call: names, defaults and help are stated once, in the record."""

import inspect
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from sparsedepth.cli import option


@dataclass(frozen=True)
class Options(option.FolderOptions):
    """What it returns."""

    _: KW_ONLY
    top: Annotated[int, typer.Option(help="how many")] = 5
    stack: Annotated[option.Number, typer.Option(help="in stacks")] = "auto"

    def compute(self) -> tuple[list[Path], int]:
        return self.paths, self.top


def command_of(record):
    got = []

    @option.command
    def command(given: record, out: Annotated[Path | None, typer.Option(help="mine")] = None, quiet: bool = False):
        """What it does."""
        got.append((given, out, quiet))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return command, got, lambda *words: CliRunner().invoke(app, [*map(str, words)])


def test_a_command_has_the_fields_of_its_record_and_options_of_its_own():
    command, got, run = command_of(Options)
    shown = run("--help").output
    assert "how many" in shown and "[default: 5]" in shown and "What it does." in shown and "mine" in shown
    assert run("a", "b", "--top", 3, "--out", "x.png", "--quiet").exit_code == 0
    assert got.pop() == (Options([Path("a"), Path("b")], top=3), Path("x.png"), True)
    assert run().exit_code == 2 and not got
    command([Path("a")], top=2)
    assert got == [(Options([Path("a")], top=2), None, False)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tops'"):
        command([], tops=2)


def test_a_call_has_the_fields_as_keywords_and_takes_one_folder_or_several():
    call = option.call(Options)
    assert call("a", top=2) == ([Path("a")], 2) and call(["a", Path("b")]) == ([Path("a"), Path("b")], 5)
    assert list(inspect.signature(call).parameters) == ["folders", "skip_damaged", "top", "stack"]
    assert call.__doc__.startswith("What it returns.\n\nfolders: ") and "\ntop: how many\n" in call.__doc__
    with pytest.raises(TypeError, match="unexpected keyword argument 'tops'"):
        call("a", tops=2)


def test_a_record_may_state_an_option_anew_in_its_place():
    @dataclass(frozen=True)
    class Few(Options):
        _: KW_ONLY
        top: Annotated[int, typer.Option(help="few")] = 1

    _, got, run = command_of(Few)
    assert "few" in run("--help").output and run("a").exit_code == 0 and got == [(Few([Path("a")], top=1), None, False)]


def test_an_empty_output_is_not_the_current_folder():
    assert option.path("a") == Path("a")
    with pytest.raises(ValueError, match="out is empty; name a file or folder"):
        option.path(" ")
