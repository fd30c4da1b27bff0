"""`sparsedepth plot`: figures of results folders, with their data. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli import calls, option


@option.of_call(calls.plot)
def plot(
    given: option.Given,
    folders: Annotated[list[Path] | None, option.FOLDERS] = None,
    show_list: Annotated[bool, typer.Option("--list", help="list all figures and what they show")] = False,
) -> None:
    """Draw figures of sparsity, residual variance and layer effectiveness, each with its data as CSV."""
    from sparsedepth.plots.draw import FIGURES, check_figure
    from sparsedepth.store.terminal import wrapped

    if show_list:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:{width}}  {kind.meaning}" for name, kind in FIGURES.items()))
        return
    if given["figure"] is not None:
        check_figure(given["figure"])
    if not folders or given["out"] is None:
        raise ValueError("give a results folder and an output: sparsedepth plot DIR -o figure.png (or --list)")
    figures = calls.plot(*folders, **{name: value for name, value in given.items() if name != "folders"})
    for path in figures.paths:
        print(f"{path} ({path.stat().st_size // 1024} KiB), data in {path.with_suffix('.csv')}")
    print(wrapped(f"caption of {name}: {text}" for name, text in figures.captions.items()), end="")
    print(wrapped(f"skipped {name}: {reason}" for name, reason in figures.left_out.items()), end="")
