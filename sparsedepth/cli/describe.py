"""`init`, `metrics`, `schema` and `presets`: commented templates, measured quantities, fields and the papers' models.

Every commented line '# key: value' of a template is valid: without its '# ' the file still validates."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, get_args

from typer import Argument, Option

from sparsedepth import quantities
from sparsedepth.cli.option import TextFormat
from sparsedepth.quantities.quantity import Table
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.formats import render
from sparsedepth.words.plain_text import commas, did_you_mean, in_shell, terminal_width
from sparsedepth.words.schema import column_text, type_text

Kind = Literal["sweep", "run", "import", "models"]


def template(kind: str, file: str) -> str:
    """The template of a kind, with the commands that use it under this file name."""
    text = (files("sparsedepth.cli") / "templates" / f"{kind}.yaml").read_text(encoding="utf-8")
    return text.replace("{file}", file)


def example(kind: Kind, name: str) -> str:
    """One of the definitions of this project, or of its maps. Raises ValueError for another name."""
    folder = files("sparsedepth") / "examples" / ("maps" if kind == "import" else "")
    paths = {path.name.removesuffix(".yaml"): path for path in folder.iterdir() if path.name.endswith(".yaml")}
    if kind == "run" or name not in paths:
        near = did_you_mean(name, paths, f"choose one of {commas(sorted(paths))}")
        raise ValueError(f"--like {name!r} is no example of a {kind}; {near if kind != 'run' else 'see `presets`'}")
    return paths[name].read_text(encoding="utf-8")


def init(
    kind: Annotated[Kind, Argument(help="what the file defines")] = "sweep",
    file: Annotated[Path | None, Argument(help="file to write; default ./KIND.yaml")] = None,
    out: Annotated[Path | None, Option("-o", "--out", help="same as FILE")] = None,
    corpus: Annotated[
        str | None, Option(help="your text, in place of Python's standard library; not with --like")
    ] = None,
    like: Annotated[str | None, Option(help="copy an example: quickstart, depth; of import: gemstones")] = None,
    ladder: Annotated[int | None, Option(help="a sweep of so many sizes whose budgets double, by depth")] = None,
) -> None:
    """Write a commented template of a sweep, run, import or list of models. Sweep and run take minutes as they are."""
    from sparsedepth.data.sequences import check_files
    from sparsedepth.files import check_parent, write_text

    if file and out:
        raise ValueError(f"both {file} and -o {out} are given; give one file to write")
    path = file or out or Path(f"{kind}.yaml")
    if path.exists():
        raise ValueError(f"{path} already exists and is not overwritten; give another file name")
    check_parent(path)
    shown = in_shell(path)
    if ladder is not None and (kind != "sweep" or like):
        fix = "leave out --like" if like else f"write `init sweep FILE --ladder {ladder}`"
        raise ValueError(f"--ladder {ladder} is for a sweep of its own; {fix}")
    if corpus is not None and like:
        raise ValueError(f"--corpus {corpus!r} does not change the example {like!r}; leave it out, and edit the copy")
    text = example(kind, like) if like else template("ladder" if ladder else kind, shown)
    if ladder is not None:
        from sparsedepth.plan.dial import ladder_definition

        text = ladder_definition(text, ladder)
    if corpus is not None:
        check_files(corpus)
        if "corpus: stdlib " not in text:
            raise ValueError(f"--corpus {corpus!r} is for a sweep or a run; leave it out")
        text = text.replace("corpus: stdlib ", f"corpus: {json.dumps(corpus)} ")
    write_text(path, text)
    command = {"sweep": "sweep", "run": "train", "import": "import TABLE.csv --map", "models": "measure --models"}[kind]
    price = f"  sparsedepth plan {shown}\n" if kind == "sweep" else ""
    name = like or ("ladder" if ladder else "runs" if kind == "run" else kind)
    print(f"{path} written. Edit it, then run\n{price}  sparsedepth {command} {shown} --out results/my-{name}")


def metrics(
    name: Annotated[str | None, Argument(help="only quantities whose name contains this")] = None,
    format: TextFormat = "table",
) -> None:
    """List all measured quantities: definition, unit, source."""
    columns = [column for column in quantities.ALL if name is None or name in column.name]
    if not columns:
        raise ValueError(f"no quantity is called {name!r}; `sparsedepth metrics` lists all")
    if format != "table":
        names = ("view", "name", "unit", "meaning", "source")
        print(render(QueryResult.of_records(map(vars, columns), names), format))
        return
    for view in get_args(Table):
        if lines := [column_text(column) for column in columns if column.view == view]:
            print(view, *lines, sep="\n  ")


LEAST_WIDTH = 80
"""Below it a table of four columns would have no room for the last ones."""


def schema(
    kind: Annotated[Literal["run", "sweep"], Argument(help="run configuration or sweep definition")] = "run",
    as_json: Annotated[bool, Option("--json", help="JSON schema instead of a table")] = False,
) -> None:
    """List the fields of a run or a sweep definition: type, default, meaning."""
    from sparsedepth.config.run import RunConfig
    from sparsedepth.config.sweep import SweepDefinition

    content = (RunConfig if kind == "run" else SweepDefinition).model_json_schema()
    if as_json:
        print(json.dumps(content, indent=2))
        return
    from rich.console import Console
    from rich.table import Table as TextTable

    table = TextTable("field", box=None, padding=(0, 2, 0, 0))
    for heading, width in (("type", 16), ("default", 12), ("meaning", None)):
        table.add_column(heading, max_width=width)
    table.columns[0].no_wrap = True
    for name, field in content["properties"].items():
        value = "required" if name in content.get("required", ()) else field.get("default")
        default = value if isinstance(value, str) and value else json.dumps(value)
        table.add_row(name, type_text(field, content.get("$defs", {})), default, field.get("description"))
    Console(width=max(terminal_width(), LEAST_WIDTH), markup=False, highlight=False, emoji=False).print(table)


def presets(
    name: Annotated[str | None, Argument(help="print the preset's fields as a run file")] = None,
    format: TextFormat = "table",
) -> None:
    """List models from the papers, for `preset: NAME` in a run file or a sweep's base; and remedies, for variants."""
    from sparsedepth.config.cost import cost
    from sparsedepth.config.load import build, yaml_text
    from sparsedepth.config.presets import PRESETS, REMEDIES, find
    from sparsedepth.config.run import RunConfig

    if name is not None:
        if format != "table":
            raise ValueError(f"--format {format} is for the list; `presets {name}` prints YAML, a run file's fields")
        preset = find(name)
        print(f"# {name}: {preset.source}")
        if preset.note:
            print(f"# {preset.note}")
        print(yaml_text({"preset": name, **preset.fields}), end="")
        return
    columns = ("preset", "n_layers", "d_model", "params_total", "params_active", "train_tokens", "lr", "source")
    rows = []
    for name, preset in PRESETS.items():
        sizes = vars(cost(build(RunConfig, preset.fields, f"preset {name}")))
        rows.append({**preset.fields, **sizes, "preset": name, "source": preset.source})
    rows += [{"preset": name, "source": f"remedy of {preset.source}"} for name, preset in REMEDIES.items()]
    print(render(QueryResult.of_records([dict.fromkeys(columns) | row for row in rows], columns), format))
