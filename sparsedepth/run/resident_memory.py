"""Current and peak memory of this process (Linux)."""

from pathlib import Path


def resident_bytes() -> dict[str, int] | None:
    """Memory of this process in bytes: 'RssAnon', 'RssFile', 'RssShmem', 'VmHWM' (their peak); None without Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")}


def added_bytes(before: dict[str, int] | None) -> int | None:
    """Peak anonymous memory of this process minus that of `before`. Pages of files (libraries, token shards) do not
    count, since the system can free them."""
    now = resident_bytes()
    if before is None or now is None:
        return None
    return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - before["RssAnon"])
