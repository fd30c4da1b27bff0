"""`sparsedepth init`: write a commented template, which runs unchanged in minutes on a laptop.

Every commented line '# key: value' is valid: without its '# ' the file still validates.
"""

from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

Kind = Literal["sweep", "run", "import"]


def template(kind: Kind, file: str) -> str:
    """The template of a kind, with the commands that use it under this file name."""
    text = (files("sparsedepth.cli") / "templates" / f"{kind}.yaml").read_text(encoding="utf-8")
    return text.replace("{file}", file)


def init(
    kind: Annotated[Kind, typer.Argument(help="what the file defines")] = "sweep",
    file: Annotated[Path | None, typer.Argument(help="file to write; default ./KIND.yaml")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="same as FILE")] = None,
) -> None:
    """Write a commented template of a sweep, run or import. It runs unchanged in minutes on a laptop."""
    from sparsedepth.files import write_text

    if file and out:
        raise ValueError(f"both {file} and -o {out} are given; give one file to write")
    path = file or out or Path(f"{kind}.yaml")
    if path.exists():
        raise ValueError(f"{path} already exists and is not overwritten; give another file name")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or give another file name")
    shown = quote(str(path))
    write_text(path, template(kind, shown))
    command = {"sweep": "sweep", "run": "train", "import": "import TABLE.csv --map"}[kind]
    price = f"  sparsedepth plan {shown}\n" if kind == "sweep" else ""
    results = f"results/my-{'runs' if kind == 'run' else kind}"  # as the template says: a folder may hold many runs
    print(f"{path} written. Edit it, then run\n{price}  sparsedepth {command} {shown} --out {results}")
