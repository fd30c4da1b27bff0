"""`sparsedepth serve`: a live web page of a results folder. Imports no torch."""

import os
import threading
from pathlib import Path
from typing import Annotated

import typer


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
