"""`sparsedepth init`: write a commented template."""

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer


def init(
    kind: Annotated[Literal["sweep", "run", "toy", "import"], typer.Argument(help="what the file defines")] = "sweep",
    file: Annotated[Path | None, typer.Argument(help="file to write; default ./KIND.yaml")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="same as FILE")] = None,
) -> None:
    """Write a commented template of a sweep, run, toy or import. It runs unchanged in minutes on a laptop."""
    from sparsedepth.cli.templates import TEMPLATES
    from sparsedepth.files import write_bytes

    if file and out:
        raise ValueError(f"both {file} and -o {out} are given; give one file to write")
    path = file or out or Path(f"{kind}.yaml")
    if path.exists():
        raise ValueError(f"{path} already exists and is not overwritten; give another file name")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or give another file name")
    shown = quote(str(path))
    write_bytes(path, TEMPLATES[kind].format(file=shown).encode())
    command = {"sweep": "sweep", "run": "train", "toy": "toy", "import": "import TABLE.csv --map"}[kind]
    price = f"  sparsedepth plan {shown}\n" if kind == "sweep" else ""
    print(f"{path} written. Edit it, then run\n{price}  sparsedepth {command} {shown} --out results/my-{kind}")
