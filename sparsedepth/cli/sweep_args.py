"""Build the sweep, run or toy of a command line from its file and options."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sparsedepth.cli.input_file import Input, name_of, read_input
from sparsedepth.config.load import build, parse_lists, parse_settings
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition, ad_hoc
from sparsedepth.plan.tasks import check_objective
from sparsedepth.toy.config import ToyDefinition

if TYPE_CHECKING:
    from sparsedepth.exchange.start import Start

Settings = Iterable[str] | Mapping[str, Any]
"""KEY=VALUE texts, or a mapping."""
Axes = Iterable[str] | Mapping[str, Iterable[Any]]


def sweep_definition(
    file: Input | None,
    scale: str | None = None,
    settings: Settings | None = None,
    vary: Axes | None = None,
    seeds: int | None = None,
    base: Input | None = None,
) -> SweepDefinition:
    """The sweep of a file, or of --vary with --seeds and --base; --set overrides both. Raises ValueError, also for an
    unknown objective."""
    changes = parse_settings(settings or [])
    if file is not None:
        if vary or base or seeds:
            raise ValueError("--vary, --seeds and --base define a sweep without a file; edit the definition instead")
        definition = build(SweepDefinition, read_input(file, "sweep"), name_of(file)).scaled(scale)
    else:
        if scale:
            raise ValueError(f"--scale {scale} selects a size from a definition file; give the file")
        axes = parse_lists(vary or [], "--vary")
        if conflicts := sorted(set(axes) & set(changes)):
            raise ValueError(f"--set {conflicts[0]}: --vary already sets {conflicts[0]}; drop one of the two")
        definition = ad_hoc(axes, seeds or 1, read_input(base, "run") if base else {})
    definition = definition.with_changes(changes) if changes else definition
    check_objective(definition)
    return definition


def run_config(file: Input, settings: Settings | None = None, start: "Start | None" = None) -> RunConfig:
    """The run of a file: fields of the --from model, overridden by the file, overridden by --set. Raises ValueError."""
    return build(RunConfig, _run_values(file, settings, start), name_of(file))


def single_run_sweep(file: Input, settings: Settings | None = None, start: "Start | None" = None) -> SweepDefinition:
    """The run of a file as a sweep of one run, to price it. Raises ValueError."""
    values = _run_values(file, settings, start)
    config = build(RunConfig, values, name_of(file))
    texts = {"name": "run", "question": f"the run of {name_of(file)}", "hypothesis": "none: a single run"}
    base = {name: value for name, value in values.items() if name not in ("seed", "start_weights", "start_cell")}
    return build(SweepDefinition, {**texts, "base": base, "seeds": [config.seed]}, name_of(file))


def _run_values(file: Input, settings: Settings | None, start: "Start | None") -> dict[str, Any]:
    values = {**read_input(file, "run"), **parse_settings(settings or [])}
    return start.values(values) if start else values


def toy_definition(file: Input, scale: str | None = None, settings: Settings | None = None) -> ToyDefinition:
    definition = build(ToyDefinition, read_input(file, "toy"), name_of(file)).scaled(scale)
    changes = parse_settings(settings or [])
    return definition.with_changes(changes) if changes else definition
