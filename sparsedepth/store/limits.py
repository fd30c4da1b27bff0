"""Limits of this process while it runs an untrusted query, for a process of one query, such as a command.

DuckDB stops a query at its own limits of time and memory between batches of rows. A call that builds one huge value,
such as repeat('x', 4000000000), or range(3000000000) as a list, passes both. So

    memory   at most MEMORY bytes of address space beyond what the open store needs (Linux); then the query fails
    time     GRACE seconds after the query's own time limit the process ends, with exit code 2 and a line on stderr
"""

import os
import resource
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

GRACE = 2.0
"""Seconds for DuckDB to stop by itself."""
MEMORY = 3 * 2**30
"""Bytes; above DuckDB's own limit, whose message is clearer."""


@contextmanager
def limited(seconds: float) -> Generator[None]:
    """Limits for a query with this time limit. Raises ValueError where memory ends."""
    timer = threading.Timer(seconds + GRACE, _end, (seconds,))
    timer.daemon = True
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    timer.start()
    try:
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            amount = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(
                resource.RLIMIT_AS, (min([amount, *(limit for limit in (soft, hard) if limit >= 0)]), hard)
            )
        yield
    except MemoryError:  # of Python or Arrow
        raise ValueError(_message(f"needs more memory than there is, or than {MEMORY // 2**30} GB")) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        timer.cancel()
        timer.join()


def _end(seconds: float) -> None:
    print(f"sparsedepth: error: {_message(f'ran for longer than {seconds:g} s')}", file=sys.stderr, flush=True)
    os._exit(2)


def _message(limit: str) -> str:
    return f"the query was stopped: it {limit}; narrow it with WHERE, or aggregate"
