"""Commands that explain: what is measured, and what can be configured."""

import json
from typing import Annotated, Literal

import typer

from sparsedepth import quantities


def register(app: typer.Typer) -> None:
    app.command()(metrics)
    app.command()(schema)


def metrics(
    name: Annotated[str | None, typer.Argument(help="only quantities whose name contains this")] = None,
) -> None:
    """List every measured quantity: definition, unit, source."""
    found = [quantity for quantity in quantities.ALL if name is None or name in quantity.name]
    if not found:
        raise ValueError(f"no quantity is called {name!r}; `sparsedepth metrics` lists them all")
    for table in ("runs", "curves", "layers", "heads", "pairs", "tokens"):
        rows = [quantity for quantity in found if quantity.table == table]
        if rows:
            print(f"{table}")
        for quantity in rows:
            unit = f" [{quantity.unit}]" if quantity.unit not in ("", "1") else ""
            source = f" ({quantity.source})" if quantity.source else ""
            print(f"  {quantity.name}{unit}: {quantity.meaning}{source}")


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
