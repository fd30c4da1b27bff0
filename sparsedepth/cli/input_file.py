"""The YAML file, or in Python the mapping, that a command is given: a run, a sweep, a toy or a map, told apart by their
keys, so that a mix-up is one line that names the right command and not a wall of unknown keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sparsedepth.config.load import read_extended
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.toy.config import ToyConfig, ToyDefinition

Input = Path | str | Mapping[str, Any]
Kind = Literal["run", "sweep", "toy", "import"]
CALLED: Mapping[Kind, str] = {
    "run": "run configuration",
    "sweep": "sweep definition",
    "toy": "toy definition",
    "import": "map of an import",
}
COMMANDS: Mapping[Kind, str] = {"run": "train", "sweep": "sweep", "toy": "toy", "import": "import TABLE --map"}
DEFINING = ("question", "hypothesis", "base", "space", "zip", "variants", "cells")
"""Keys that a run configuration never holds, not even by a slip."""
OF_MAPS = ("source", "fields")


def name_of(file: Input) -> str:
    """What messages call it."""
    return "the given mapping" if isinstance(file, Mapping) else str(file)


def read_input(file: Input, wanted: Kind) -> dict[str, Any]:
    """The mapping of a file of this kind. Raises ValueError naming the right command for a file of another kind."""
    values = dict(file) if isinstance(file, Mapping) else read_extended(Path(file))
    kind = kind_of(values)
    if kind in (None, wanted):
        return values
    shown = {"run": RunConfig, "sweep": DEFINING, "toy": ("n_layers", *DEFINING), "import": OF_MAPS}[kind]
    known = shown.model_fields if isinstance(shown, type) else shown
    keys = ", ".join([name for name in known if name in values][:3])
    raise ValueError(
        f"{name_of(file)} is a {CALLED[kind]} (it holds {keys}) and no {CALLED[wanted]}; use: "
        f"sparsedepth {COMMANDS[kind]} {name_of(file)}"
    )


def kind_of(values: Mapping[str, Any]) -> Kind | None:
    """What a file's keys make it; None where no key is known."""
    if all(name in values for name in OF_MAPS):
        return "import"
    if not any(name in values for name in DEFINING):
        return "run" if any(name in values for name in (*RunConfig.model_fields, "preset")) else None
    for_sweeps = set(SweepDefinition.model_fields) - set(ToyDefinition.model_fields)
    for_toys = set(ToyConfig.model_fields) - set(RunConfig.model_fields)
    base = values.get("base")
    is_toy = "n_layers" in values or (isinstance(base, dict) and any(name in for_toys for name in base))
    return "toy" if is_toy and not any(name in values for name in for_sweeps) else "sweep"
