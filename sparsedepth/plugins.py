"""Measures, tasks and figures of one's own: modules named on the command line, or installed.

    --plugin FILE.py      kept in SPARSEDEPTH_PLUGINS, so that the processes of a sweep load the same
    installed packages    entry points of the groups GROUPS, each of which names a module

A module has MEASURE with QUANTITIES and add_rows(context, rows); TASKS with draw(...); or FIGURES. No config and no
results folder names one. The records are read while the tables of ours are made, so a module imports
`sparsedepth.quantities.quantity` at its top and everything else of ours, and torch, in its functions."""

import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "SPARSEDEPTH_PLUGINS"
GROUPS = ("sparsedepth.measures", "sparsedepth.tasks", "sparsedepth.figures")
PARTS = ("MEASURE", "TASKS", "FIGURES")


@dataclass(frozen=True)
class Plugin:
    name: str
    module: ModuleType
    code: str
    """12 hex digits of the module's file."""

    def get(self, part: str, default: Any = None) -> Any:
        return getattr(self.module, part, default)


def name_on_command_line(words: Sequence[str]) -> list[str]:
    """The words without each `--plugin FILE`, kept for this process and those that it starts. Raises ValueError."""
    rest, left = [], iter(words)
    for word in left:
        name, equals, file = word.partition("=")
        if name != "--plugin":
            rest.append(word)
            continue
        file = file if equals else next(left, None)
        if file is None:
            raise ValueError("--plugin needs a file: --plugin my_measure.py")
        if not Path(file).is_file():
            raise ValueError(f"--plugin {file}: there is no such file")
        given = os.environ.get(VARIABLE, "").split("\n")
        os.environ[VARIABLE] = "\n".join(dict.fromkeys(filter(None, [*given, os.path.abspath(file)])))
    return rest


def load() -> tuple[Plugin, ...]:
    """The named and the installed ones, for `quantities.measured.PLUGINS`, which the others ask. Raises ValueError for
    a named one that does not import or has nothing of ours; warns of an installed one."""
    plugins = [_named(Path(file)) for file in os.environ.get(VARIABLE, "").split("\n") if file]
    points = entry_points()  # every installed package is looked at: once
    installed = {point.value: point for group in GROUPS for point in points.select(group=group)}
    for point in installed.values():
        try:
            plugins.append(_plugin(point.name, point.load()))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit
            told = f"the installed plugin {point.name} ({point.value}) is left out: {_text(error)}"
            warnings.warn(told, stacklevel=2)
    return tuple(plugins)


def _named(file: Path) -> Plugin:
    name = f"sparsedepth_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--plugin {file}: not a Python file; name one that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return _plugin(file.stem, module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        raise ValueError(f"--plugin {file} does not import: {_text(error)}") from None


def _plugin(name: str, module: ModuleType) -> Plugin:
    if not any(hasattr(module, part) for part in PARTS):
        raise ValueError(f"it has none of {', '.join(PARTS)}")
    if hasattr(module, "MEASURE") and not (hasattr(module, "QUANTITIES") and callable(getattr(module, "add_rows", 0))):
        raise ValueError("it has a MEASURE, and no QUANTITIES or no function add_rows(context, rows)")
    if hasattr(module, "TASKS") and not callable(getattr(module, "draw", 0)):
        raise ValueError("it has TASKS, and no function draw(task, draws, n_sequences, seq_len, held_out)")
    quantities = getattr(module, "QUANTITIES", ())
    if not isinstance(quantities, Sequence) or not all(
        isinstance(getattr(each, "name", 0), str) for each in quantities
    ):
        raise ValueError("its QUANTITIES are no list of quantities (`sparsedepth.quantities.record`)")
    if hasattr(module, "MEASURE") and not isinstance(getattr(module.MEASURE, "name", 0), str):
        raise ValueError("its MEASURE is no measure (`sparsedepth.quantities.record`)")
    for part in ("TASKS", "FIGURES"):
        if not isinstance(getattr(module, part, {}), Mapping):
            raise ValueError(f"its {part} are no mapping by name")
    assert module.__file__ is not None
    return Plugin(name, module, hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12])


def refuse_known(kind: str, plugin: Plugin, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a name of a plugin that is taken."""
    if taken := sorted({*names} & {*known}):
        raise ValueError(f"the plugin {plugin.name} has a {kind} {taken[0]!r}, a name that is taken; choose another")


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
