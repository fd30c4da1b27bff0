"""`sparsedepth metrics`, `schema` and `presets`: measured quantities, configuration fields and the papers' models."""

import itertools
import json
import shutil
import textwrap
from typing import Annotated, Any, Literal, get_args

import typer

from sparsedepth import quantities
from sparsedepth.cli import option
from sparsedepth.quantities.record import Table
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.render import render


def metrics(
    name: Annotated[str | None, typer.Argument(help="only quantities whose name contains this")] = None,
    format: option.Format = None,
) -> None:
    """List all measured quantities: definition, unit, source."""
    columns = [column for column in quantities.ALL if name is None or name in column.name]
    if not columns:
        raise ValueError(f"no quantity is called {name!r}; `sparsedepth metrics` lists all")
    if format not in (None, "table"):
        rows = tuple((column.view, column.name, column.unit, column.meaning, column.source) for column in columns)
        print(render(QueryResult(("view", "name", "unit", "meaning", "source"), rows), format))
        return
    for view in get_args(Table):
        view_columns = [column for column in columns if column.view == view]
        if view_columns:
            print(view)
        for column in view_columns:
            unit = f" [{column.unit}]" if column.unit not in ("", "1") else ""
            source = f" ({column.source})" if column.source else ""
            print(f"  {column.name}{unit}: {column.meaning}{source}")


def schema(
    kind: Annotated[Literal["run", "sweep"], typer.Argument(help="run configuration or sweep definition")] = "run",
    as_json: Annotated[bool, typer.Option("--json", help="JSON schema instead of a table")] = False,
) -> None:
    """List the fields of a run or a sweep definition: type, default, meaning."""
    from sparsedepth.config.run import RunConfig
    from sparsedepth.config.sweep import SweepDefinition

    models = {"run": RunConfig, "sweep": SweepDefinition}
    content = models[kind].model_json_schema()
    if as_json:
        print(json.dumps(content, indent=2))
        return
    required = content.get("required", [])
    rows = [("field", "type", "default", "meaning")]
    for name, field in content["properties"].items():
        value = field.get("default")
        default = "required" if name in required else value if isinstance(value, str) and value else json.dumps(value)
        rows.append((name, _type(field, content.get("$defs", {})), default, field.get("description", "")))
    _print_wrapped(rows)


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A field's type: 'int or null', 'pre | post', 'list of float'."""
    if "$ref" in field:
        return _type(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(kind, definitions) for kind in field["anyOf"]))
    if "enum" in field or "const" in field:
        return " | ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array" and "items" in field:
        return f"list of {_type(field['items'], definitions)}"
    names = {"integer": "int", "number": "float", "boolean": "bool", "string": "text", "object": "mapping"}
    kind = field.get("type", "any")
    return names.get(kind, kind)


def _print_wrapped(rows: list[tuple[str, str, str, str]]) -> None:
    terminal_width = shutil.get_terminal_size(fallback=(100, 24)).columns
    widths = [max(len(row[0]) for row in rows), 16, 12]
    widths.append(max(20, terminal_width - sum(widths) - 6))
    for row in rows:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def presets(
    name: Annotated[str | None, typer.Argument(help="print the preset's fields as a run file")] = None,
    format: option.Format = None,
) -> None:
    """List models from the papers, for `preset: NAME` in a run file or a sweep's base."""
    from sparsedepth.config.cost import cost
    from sparsedepth.config.load import build, yaml_text
    from sparsedepth.config.presets import PRESETS, find
    from sparsedepth.config.run import RunConfig

    if name is not None:
        preset = find(name)
        print(f"# {name}: {preset.source}")
        if preset.note:
            print(f"# {preset.note}")
        print(yaml_text({"preset": name, **preset.fields}), end="")
        return
    rows: list[tuple[Any, ...]] = []
    for name, preset in PRESETS.items():
        config = build(RunConfig, preset.fields, f"preset {name}")
        params = cost(config)
        sizes = (config.n_layers, config.d_model, params.params_total, params.params_active)
        stated = (preset.fields.get("train_tokens"), preset.fields.get("lr"))
        rows.append((name, *sizes, *stated, preset.source))
    columns = ("preset", "n_layers", "d_model", "params_total", "params_active", "train_tokens", "lr", "source")
    print(render(QueryResult(columns, tuple(rows)), format or "table"))
