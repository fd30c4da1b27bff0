"""What a command line asks for: a sweep (a definition file, or axes given as options), a run, a toy."""

from pathlib import Path

from sparsedepth.cli.input_file import read_input
from sparsedepth.config.load import build, parse_lists, parse_settings
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition, ad_hoc
from sparsedepth.plan.tasks import check_objective
from sparsedepth.toy.config import ToyDefinition


def define(
    file: Path | None,
    scale: str | None = None,
    settings: list[str] | None = None,
    vary: list[str] | None = None,
    seeds: int | None = None,
    base: Path | None = None,
) -> SweepDefinition:
    """The sweep of a file, or of --vary with --seeds and --base; with --set laid over it. Raises ValueError, also for
    objectives that are none."""
    definition = _defined(file, scale, settings, vary, seeds, base)
    check_objective(definition)
    return definition


def define_run(file: Path, settings: list[str] | None = None) -> SweepDefinition:
    """The run of a file as a sweep of one run, to be priced. Raises ValueError."""
    values = {**read_input(file, "run"), **parse_settings(settings or [])}
    config = build(RunConfig, values, str(file))
    asked = {"name": "run", "question": f"the run of {file}", "hypothesis": "none: a single run"}
    base = {name: value for name, value in values.items() if name != "seed"}
    return build(SweepDefinition, {**asked, "base": base, "seeds": [config.seed]}, str(file))


def define_toy(file: Path, scale: str | None = None, settings: list[str] | None = None) -> ToyDefinition:
    """The toy of a file. Raises ValueError."""
    definition = build(ToyDefinition, read_input(file, "toy"), str(file)).scaled(scale)
    changes = parse_settings(settings or [])
    return definition.with_changes(changes) if changes else definition


def _defined(
    file: Path | None,
    scale: str | None,
    settings: list[str] | None,
    vary: list[str] | None,
    seeds: int | None,
    base: Path | None,
) -> SweepDefinition:
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
