"""One results folder, one precision of `precision: auto`, which is bf16 on a GPU and fp32 elsewhere: runs that differ
in nothing else would be compared as equals."""

from pathlib import Path

from sparsedepth.config.load import read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.files import parse_json, read_regular
from sparsedepth.store import run_record
from sparsedepth.train.runtime import Runtime


def check_same_precision(config: RunConfig, runtime: Runtime, results: Path) -> None:
    """Raises ValueError if the first complete run with precision=auto was computed in another than this would be."""
    if config.precision != "auto":
        return
    for path in sorted(results.glob(f"{run_record.RUNS}/*/manifest.json")):
        try:
            before = parse_json(read_regular(path)).get("precision")
            is_auto = read_yaml(path.with_name("config.yaml")).get("precision", "auto") == "auto"
        except (OSError, ValueError, AttributeError):
            continue  # of an imported run, removed meanwhile, or damaged, and will be repeated
        if not before or not is_auto:
            continue
        if before != runtime.precision:
            raise ValueError(
                f"precision=auto is {runtime.precision} on {runtime.device.type}, but run {path.parent.name} of "
                f"{results} was computed in {before}: the two cannot be compared; continue on the same kind of "
                f"device, or set precision={before} and another --out"
            )
        return
