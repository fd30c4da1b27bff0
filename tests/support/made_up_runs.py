"""Complete run folders with made-up numbers, for tests of everything that reads the store."""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsedepth.config.load import yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.files import write_text
from sparsedepth.store import run_record

Row = Mapping[str, Any]

MANIFEST = {"device": "cpu", "started": "2026-01-02T03:04:05+00:00", "seconds": 1.5, "packages": {"torch": "2.13.0"}}


def make_run(
    results: Path,
    config: RunConfig,
    summary: Row,
    layers: Iterable[Row] = (),
    curves: Iterable[Row] = (),
    heads: Iterable[Row] = (),
    pairs: Iterable[Row] = (),
    tokens: Iterable[Row] = (),
    difficulty: Iterable[Row] = (),
    manifest: Row = MANIFEST,
) -> Path:
    """Write and complete `results/runs/<run_id>`; returns the folder. `summary` may leave quantities out, and its
    outcome is 'ok' unless given. A table with no rows gets no file."""
    folder = run_record.run_folder(results, config.run_id)
    folder.mkdir(parents=True)
    entries = config.model_dump(mode="json").items()
    write_text(folder / "config.yaml", "".join(_entry(name, json.dumps(value)) for name, value in entries))
    run_record.write_manifest(folder, manifest)
    run_record.write_summary(folder, {"outcome": "ok", **summary})
    tables = {"layers": layers, "curves": curves, "heads": heads, "pairs": pairs, "tokens": tokens}
    tables |= {"difficulty": difficulty}
    for table, rows in tables.items():
        if rows := list(rows):
            run_record.write_table(folder, table, rows)
    run_record.finish(folder)
    return folder


@functools.cache
def _entry(name: str, value: str) -> str:
    """One field as `run_record.write_config` writes it; most runs share most of them."""
    return yaml_text({name: json.loads(value)})
