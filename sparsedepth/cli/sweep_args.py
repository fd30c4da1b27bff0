"""The sweep that a command line asks for: a definition file, or axes given as options."""

from pathlib import Path

from sparsedepth.cli.input_file import read_input
from sparsedepth.config.load import build, parse_lists, parse_settings
from sparsedepth.config.sweep import SweepDefinition, ad_hoc


def define(
    file: Path | None,
    scale: str | None = None,
    settings: list[str] | None = None,
    vary: list[str] | None = None,
    seeds: int | None = None,
    base: Path | None = None,
) -> SweepDefinition:
    """The sweep of a file, or of --vary with --seeds and --base; with --set laid over it. Raises ValueError."""
    changes = parse_settings(settings or [])
    if file is not None:
        if vary or base or seeds:
            raise ValueError("--vary, --seeds and --base make a sweep without a file; put them into the definition")
        definition = build(SweepDefinition, read_input(file, "sweep"), str(file)).scaled(scale)
        return definition.with_changes(changes) if changes else definition
    if scale:
        raise ValueError(f"--scale {scale} is a size that a definition file offers; give the file")
    axes = parse_lists(vary or [], "--vary")
    if both := sorted(set(axes) & set(changes)):
        raise ValueError(f"--set {both[0]}: the sweep varies {both[0]}; leave one of the two out")
    definition = ad_hoc(axes, seeds or 1, read_input(base, "run") if base else {})
    return definition.with_changes(changes) if changes else definition
