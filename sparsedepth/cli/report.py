"""`sparsedepth report` and `serve`: all results as one HTML file, or as a live web page. Neither imports torch."""

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli import option


def report(
    folders: option.Folders,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="the page (.html), or a folder for report.html; self-contained, works offline"
        ),
    ],
    depth: Annotated[int | None, typer.Option(help="n_layers of the recipe; default the deepest")] = None,
    objective: option.Objective = "loss",
    card: Annotated[Path | None, typer.Option(help="verified recipe card (from `recipe verify`) to include")] = None,
    skip_damaged: option.SkipDamaged = False,
) -> None:
    """Write one HTML page: summary, recipe, runs, figures with data, effects, failures, methods and provenance."""
    from sparsedepth.cli.run_progress import bar
    from sparsedepth.files import check_parent
    from sparsedepth.report.page import write_report

    if out.is_dir():
        out /= "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{str(out)!r} must end in .html, or be an existing folder")
    check_parent(out)
    with bar("report") as progress:
        size = write_report(folders, out, depth, objective, card, skip_damaged, progress)
    print(f"{out} ({size / 1e6:.2f} MB)")


def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep, running or finished")],
    host: Annotated[
        str, typer.Option(help="address to listen on; any other than loopback requires a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 = any free port")] = 8421,
) -> None:
    """Serve a read-only web page of progress, failures, figures and runs that refreshes while the sweep runs."""
    from sparsedepth.serve.server import Server

    if not folder.is_dir():
        raise ValueError(f"{folder} is not an existing folder; give the results folder of a sweep")
    try:
        server = Server(folder, host, port)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); give another --host or --port"
        ) from None
    print(f"{folder}: {server.url}  (Ctrl-C to stop)", flush=True)
    threading.Thread(target=server.site.live.reading, daemon=True).start()  # takes seconds for many runs
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", flush=True)
            os._exit(0)  # nothing is being written, so threads that still send to a client may be cut off
