"""Read a command's YAML file (in Python: mapping). Its keys tell whether it is a run, a sweep, a toy or an import map,
so the wrong kind of file gives one line that names the right command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sparsedepth.config.load import read_extended
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.toy.config import ToyConfig, ToyDefinition

Input = Path | str | Mapping[str, Any]
Kind = Literal["run", "sweep", "toy", "import"]
KIND_NAMES: Mapping[Kind, str] = {
    "run": "run configuration",
    "sweep": "sweep definition",
    "toy": "toy definition",
    "import": "import map",
}
COMMANDS: Mapping[Kind, str] = {"run": "train", "sweep": "sweep", "toy": "toy", "import": "import TABLE --map"}
SWEEP_KEYS = ("question", "hypothesis", "base", "space", "zip", "variants", "cells")
"""Keys that a run configuration never has."""
MAP_KEYS = ("source", "fields")


def name_of(file: Input) -> str:
    """How messages name the file."""
    return "the given mapping" if isinstance(file, Mapping) else str(file)


def read_input(file: Input, expected: Kind) -> dict[str, Any]:
    """The content of a file. Raises ValueError for another kind of file, with the command that takes it."""
    values = dict(file) if isinstance(file, Mapping) else read_extended(Path(file))
    kind = kind_of(values)
    if kind in (None, expected):
        return values
    typical = {"run": RunConfig.model_fields, "sweep": SWEEP_KEYS, "toy": ("n_layers", *SWEEP_KEYS), "import": MAP_KEYS}
    keys = ", ".join([name for name in typical[kind] if name in values][:3])
    raise ValueError(
        f"{name_of(file)} is a {KIND_NAMES[kind]} (it has {keys}), not a {KIND_NAMES[expected]}; use: "
        f"sparsedepth {COMMANDS[kind]} {name_of(file)}"
    )


def kind_of(values: Mapping[str, Any]) -> Kind | None:
    """The kind of file by its keys; None if no key is known."""
    if all(name in values for name in MAP_KEYS):
        return "import"
    if not any(name in values for name in SWEEP_KEYS):
        return "run" if any(name in values for name in (*RunConfig.model_fields, "preset")) else None
    sweep_only = set(SweepDefinition.model_fields) - set(ToyDefinition.model_fields)
    toy_only = set(ToyConfig.model_fields) - set(RunConfig.model_fields)
    base = values.get("base")
    is_toy = "n_layers" in values or (isinstance(base, dict) and any(name in toy_only for name in base))
    return "toy" if is_toy and not any(name in values for name in sweep_only) else "sweep"
