"""Commands that explain: what is measured, and what can be configured."""

import json
from typing import Annotated, Literal, get_args

import typer

from sparsedepth import quantities
from sparsedepth.quantities.record import Table


def register(app: typer.Typer) -> None:
    app.command()(metrics)
    app.command()(schema)


def metrics(
    name: Annotated[str | None, typer.Argument(help="only quantities whose name contains this")] = None,
) -> None:
    """List every measured quantity: definition, unit, source."""
    columns = [column for column in quantities.ALL if name is None or name in column.name]
    if not columns:
        raise ValueError(f"no quantity is called {name!r}; `sparsedepth metrics` lists them all")
    for view in get_args(Table):
        shown = [column for column in columns if column.view == view]
        if shown:
            print(view)
        for column in shown:
            unit = f" [{column.unit}]" if column.unit not in ("", "1") else ""
            source = f" ({column.source})" if column.source else ""
            print(f"  {column.name}{unit}: {column.meaning}{source}")


def schema(
    kind: Annotated[
        Literal["run", "sweep", "toy"], typer.Argument(help="a run's configuration, a sweep's, or a toy group's")
    ] = "run",
) -> None:
    """Print the JSON schema of a run, a sweep definition or a toy group."""
    from sparsedepth.config.run import RunConfig
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.toy.config import ToyConfig

    models = {"run": RunConfig, "sweep": SweepDefinition, "toy": ToyConfig}
    print(json.dumps(models[kind].model_json_schema(), indent=2))
