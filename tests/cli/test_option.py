"""Commands from Python calls: names, defaults and help are the call's; a command may declare its own options."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from sparsedepth.cli import option


def call(
    *folders: option.EachFolder,
    top: Annotated[int, typer.Option(help="how many")] = 5,
    out: option.Images = None,
    stack: option.Stack = "auto",
) -> None:
    pass


def command_of(*calls, **choice):
    got = []

    @option.of_call(*calls, **choice)
    def command(
        given: option.Given, out: Annotated[Path | None, typer.Option(help="mine")] = None, quiet: bool = False
    ):
        """What it does."""
        got.append((dict(given), out, quiet))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return command, got, lambda *words: CliRunner().invoke(app, [*map(str, words)])


def test_keywords_defaults_and_help_are_those_of_the_call():
    command, got, run = command_of(call)
    shown = run("--help").output
    assert "how many" in shown and "[default: 5]" in shown and "What it does." in shown
    assert "mine" in shown and "image (.png" not in shown
    assert run("a", "b", "--top", 3, "--out", "x.png", "--quiet").exit_code == 0
    given = {"folders": [Path("a"), Path("b")], "top": 3, "out": Path("x.png"), "stack": "auto"}
    assert got.pop() == (given, Path("x.png"), True)
    command([Path("a")], top=2)
    assert got == [({"folders": [Path("a")], "top": 2, "out": None, "stack": "auto"}, None, False)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tops'"):
        command([], tops=2)


def test_a_command_may_take_some_of_the_keywords_and_a_later_call_wins():
    def other(*, top: Annotated[int, typer.Option(help="other")] = 7) -> None:
        pass

    _, got, run = command_of(call, other, only=("top",))
    assert run().exit_code == 0 and got.pop() == ({"top": 7}, None, False)
    assert "other" in run("--help").output and run("a").exit_code == 2
    _, got, run = command_of(call, without=("folders", "stack"))
    assert run().exit_code == 0 and got == [({"top": 5, "out": None}, None, False)]
