"""Build the sweep or run of a command line from its YAML file (in Python: mapping) and options.

The keys of a file tell whether it is a run, a sweep or an import map, so the wrong kind of file gives one line
that names the right command."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsedepth.config.load import build, parse_lists, parse_settings, read_extended
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.config.sweep import SweepDefinition, ad_hoc
from sparsedepth.plan.tasks import check_objective
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import commas

if TYPE_CHECKING:
    from sparsedepth.exchange.start import Start

Input = Path | str | Fields
Settings = Iterable[str] | Fields
"""KEY=VALUE texts, or a mapping."""
Axes = Iterable[str] | Mapping[str, Iterable[Any]]
Kind = Literal["run", "sweep", "import"]
KINDS = {
    "run": ("a run configuration", "train"),
    "sweep": ("a sweep definition", "sweep"),
    "import": ("an import map", "import TABLE --map"),
}
"""What messages call a kind of file, and the command that takes it."""
SWEEP_KEYS = ("question", "hypothesis", "base", "space", "zip", "variants", "cells")
"""Keys that a run configuration never has."""
MAP_KEYS = ("source", "fields")


def name_of(file: Input) -> str:
    """How messages name the file."""
    return "the given mapping" if isinstance(file, Mapping) else str(file)


def content_of(file: Input) -> Named:
    return dict(file) if isinstance(file, Mapping) else read_extended(Path(file))


def read_input(file: Input, expected: Kind) -> Named:
    """The content of a file. Raises ValueError for another kind of file, with the command that takes it."""
    values = content_of(file)
    kind = kind_of(values)
    if kind in (None, expected):
        return values
    typical = {"run": RunConfig.model_fields, "sweep": SWEEP_KEYS, "import": MAP_KEYS}
    keys = commas([name for name in typical[kind] if name in values][:3])
    noun, command = KINDS[kind]
    name = name_of(file)
    raise ValueError(f"{name} is {noun} (it has {keys}), not {KINDS[expected][0]}; use: sparsedepth {command} {name}")


def kind_of(values: Fields) -> Kind | None:
    """The kind of file by its keys; None if no key is known."""
    if all(name in values for name in MAP_KEYS):
        return "import"
    if not any(name in values for name in SWEEP_KEYS):
        return "run" if any(name in values for name in (*RunConfig.model_fields, "preset")) else None
    return "sweep"


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
        axes = parse_lists(vary or [])
        if conflicts := sorted(set(axes) & set(changes)):
            raise ValueError(f"--set {conflicts[0]}: --vary already sets {conflicts[0]}; drop one of the two")
        definition = ad_hoc(axes, seeds or 1, read_input(base, "run") if base else {})
    definition = definition.with_changes(changes) if changes else definition
    check_objective(definition)
    return definition


def run_config(file: Input, settings: Settings | None = None, start: "Start | None" = None) -> RunConfig:
    """The run of a file: fields of the --from model, overridden by the file, overridden by --set. Raises ValueError."""
    return _run(file, settings, start)[1]


def single_run_sweep(file: Input, settings: Settings | None = None) -> SweepDefinition:
    """The run of a file as a sweep of one run, to price it. Raises ValueError."""
    values, config = _run(file, settings, None)
    base = {name: value for name, value in values.items() if name not in ("seed", "start_weights", "start_cell")}
    return build(
        SweepDefinition,
        {
            "name": "run",
            "question": f"the run of {name_of(file)}",
            "hypothesis": "none: a single run",
            "base": base,
            "seeds": [config.seed],
        },
        name_of(file),
    )


def _run(file: Input, settings: Settings | None, start: "Start | None") -> tuple[Fields, RunConfig]:
    """The values of a run and the run. A mistake is that of --set if the file is valid without it."""
    own = read_input(file, "run")
    changes = parse_settings(settings or [])
    filled = start.values if start else dict
    values = filled({**own, **changes})
    try:
        return values, build(RunConfig, values, name_of(file))
    except ValueError:
        if not changes:
            raise
    build(RunConfig, filled(own), name_of(file))
    return values, build(RunConfig, values, "--set")
