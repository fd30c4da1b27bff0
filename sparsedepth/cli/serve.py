"""`sparsedepth serve`: a results folder as a page that refreshes while its sweep runs. Imports no torch."""

import os
import threading
from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep, also while it runs")],
    host: Annotated[
        str, typer.Option(help="address to hear; any but this machine's own loopback asks for a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to hear; 0 = any that is free")] = 8421,
) -> None:
    """Show progress, failures, figures and runs as a page that refreshes while the sweep runs; read-only."""
    from sparsedepth.serve.server import Server

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder that exists; name the results folder of a sweep")
    try:
        server = Server(folder, host, port)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be heard ({error.strerror or error}); give another --host, or --port"
        ) from None
    print(f"{folder}: {server.url}  (Ctrl-C ends it)", flush=True)
    threading.Thread(target=server.site.live.reading, daemon=True).start()  # seconds, of many runs
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", flush=True)
            os._exit(0)  # nothing is being written: threads that still send to a reader may be cut off
