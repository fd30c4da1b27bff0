"""`sparsedepth init`: a first file of one's own."""

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer


def init(
    kind: Annotated[Literal["sweep", "run", "toy", "import"], typer.Argument(help="what the file defines")] = "sweep",
    file: Annotated[Path | None, typer.Argument(help="file to write; default KIND.yaml here")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the same as FILE")] = None,
) -> None:
    """Write a commented definition that runs as it is, in minutes on a laptop, to be changed into one's own."""
    from sparsedepth.cli.templates import TEMPLATES
    from sparsedepth.files import write_bytes

    if file and out:
        raise ValueError(f"both {file} and -o {out} are given; name one file to write")
    path = file or out or Path(f"{kind}.yaml")
    if path.exists():
        raise ValueError(f"{path} exists; name another file, for init replaces none")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it, or name another file")
    shown = quote(str(path))
    write_bytes(path, TEMPLATES[kind].format(file=shown).encode())
    command = {"sweep": "sweep", "run": "train", "toy": "toy", "import": "import TABLE.csv --map"}[kind]
    price = f"  sparsedepth plan {shown}\n" if kind == "sweep" else ""
    print(f"{path}: change what you like, then\n{price}  sparsedepth {command} {shown} --out results/my-{kind}")
