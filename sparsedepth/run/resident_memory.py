"""The memory that this process has, and had at its peak, as Linux counts it."""

from pathlib import Path


def resident_bytes() -> dict[str, int] | None:
    """The memory of this process in bytes: 'RssAnon', 'RssFile', 'VmHWM' (peak of both); None where Linux is not."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")}


def added_bytes(before: dict[str, int] | None) -> int | None:
    """How much anonymous memory this process had at its peak beyond what it had `before`.

    Pages of files (libraries, the token shards) do not count: the system takes them back when it needs to.
    """
    now = resident_bytes()
    if before is None or now is None:
        return None
    return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - before["RssAnon"])
