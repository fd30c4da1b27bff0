"""Measures, tasks and figures of one's own: modules named on the command line, or installed.

    --plugin FILE.py      kept in SPARSEDEPTH_PLUGINS, so that the processes of a sweep load the same
    installed packages    entry points of the groups GROUPS, each of which names a module

A module has MEASURE with QUANTITIES and add_rows(context, rows); TASKS with draw(...); or FIGURES. No config and no
results folder names one. The records are read while the tables of ours are made, so a module imports
`sparsedepth.quantities.quantity` at its top and everything else of ours, and torch, in its functions."""

import hashlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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
    file: str
    is_installed: bool = False

    @property
    def makes(self) -> tuple[str, ...]:
        """Its measure, and its tasks as corpora."""
        measures = [measure.name] if (measure := self.get("MEASURE")) else []
        return (*measures, *(f"task:{name}" for name in self.get("TASKS", {})))

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


def load(check: Callable[[Plugin], None] = lambda plugin: None) -> tuple[Plugin, ...]:
    """The named and the installed ones, for `quantities.measured.PLUGINS`, which the others ask. Raises ValueError for
    a named one that does not import, has nothing of ours, or of which `check` raises; warns of an installed one."""
    plugins = [_named(Path(file), check) for file in os.environ.get(VARIABLE, "").split("\n") if file]
    points = entry_points()  # every installed package is looked at: once
    installed = {point.value: point for group in GROUPS for point in points.select(group=group)}
    for point in installed.values():
        try:
            check(plugin := _plugin(point.name, point.load(), is_installed=True))
            plugins.append(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit
            told = f"the installed plugin {point.name} ({point.value}) is left out: {_shown(error)}"
            warnings.warn(told, stacklevel=2)
    return tuple(plugins)


def used(plugins: Iterable[Plugin], names: Container[str]) -> dict[str, dict[str, str]]:
    """Measure or corpus -> the code and file of the plugin that makes it, of those with these names."""
    made = ((name, plugin) for plugin in plugins for name in plugin.makes if name in names)
    return {name: {"code": plugin.code, "file": plugin.file} for name, plugin in made}


def _named(file: Path, check: Callable[[Plugin], None]) -> Plugin:
    """The plugin of a file, loaded and checked. Raises ValueError, also where its code ends the process."""
    name = f"sparsedepth_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--plugin {file}: not a Python file; name one that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        check(plugin := _plugin(file.stem, module))
        return plugin
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        raise ValueError(f"--plugin {file} cannot be used: {_shown(error)}") from None


def _plugin(name: str, module: ModuleType, is_installed: bool = False) -> Plugin:
    """A module as a plugin, named by its file's digest. Raises ValueError for a part that is missing or of the wrong
    form."""
    if not any(hasattr(module, part) for part in PARTS):
        raise ValueError(f"it has none of {', '.join(PARTS)}")
    for part, function in (("MEASURE", "add_rows"), ("TASKS", "draw")):
        if hasattr(module, part) and not callable(getattr(module, function, None)):
            raise ValueError(f"it has {part}, and no function {function}; docs/adding.md shows one")
    for part, is_right, wanted in (
        ("TASKS", _is_task, "{'n_tokens': 2, 'shortest': 2} for each name"),
        ("FIGURES", _is_figure, "(function of a store, meaning) for each name"),
    ):
        given = getattr(module, part, {})
        if not isinstance(given, Mapping) or not all(map(is_name, given)) or not all(map(is_right, given.values())):
            raise ValueError(f"its {part} must be a mapping by names such as my_name: {wanted}")
    assert module.__file__ is not None
    file = Path(module.__file__)
    return Plugin(name, module, hashlib.sha256(file.read_bytes()).hexdigest()[:12], file.name, is_installed)


def is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch("[a-z][a-z0-9_]*", name) is not None


def _is_task(of: Any) -> bool:
    return isinstance(of, Mapping) and all(type(of.get(key)) is int and of[key] > 0 for key in ("n_tokens", "shortest"))


def _is_figure(of: Any) -> bool:
    return isinstance(of, tuple) and len(of) == 2 and callable(of[0]) and isinstance(of[1], str)


def is_accepted(plugin: Plugin, kind: str, names: Iterable[str], known: Iterable[str]) -> bool:
    """Whether none of a plugin's names is taken; of an installed one with a warning. Raises ValueError for a named
    one."""
    if not (taken := sorted({*names} & {*known})):
        return True
    kind = f"the {'installed ' * plugin.is_installed}plugin {plugin.name} has a {kind}"
    told = f"{kind} {taken[0]!r}, a name that is taken"
    if not plugin.is_installed:
        raise ValueError(f"{told}; choose another")
    warnings.warn(f"{told}: it is left out", stacklevel=2)
    return False


def _shown(error: BaseException) -> object:
    """What an error is shown as: a ValueError's words, another with its type."""
    return error if isinstance(error, ValueError) else repr(error)
