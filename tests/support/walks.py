"""How far a reader walks who follows a call through the package.

    PYTHONPATH=tests python tests/support/walks.py

prints the walks of a Hugging Face model from its name to its record, and of a sweep from the command to its queue: of
the value (the model and its tokens; the definition, its plan and runs), and of everything that is called meanwhile.

    stay    a function of ours that is entered from another file, counted once; on the walk of a value, if the value or
            what was made of it is among the arguments
    room    a file on the way
    climb   a stay in a file that the way had already passed, entered from a file that it came to later
    name    a function on the way
"""

import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import sparsedepth

PACKAGE = Path(sparsedepth.__file__).parent
IMPORT = "import"


class Arrived(Exception):
    """The walk has reached its end."""


@dataclass
class Walk:
    rooms: dict[str, int] = field(default_factory=dict)
    """file -> its place on the way"""
    names: set[tuple[str, str]] = field(default_factory=set)
    stays: list[tuple[str, str, str]] = field(default_factory=list)
    """from file, file, function"""

    @property
    def climbs(self) -> list[tuple[str, str, str]]:
        return [stay for stay in self.stays if self.rooms[stay[1]] < self.rooms[stay[0]]]

    @property
    def text(self) -> str:
        counts = (len(self.stays), len(self.rooms), len(self.climbs), len(self.names))
        return "{} stays in {} rooms with {} climbs and {} names".format(*counts)


def walk(
    call: Callable[[], object], *, inside: Collection[str] = (), until: str = "", of: tuple[type, ...] = ()
) -> Walk:
    """The walk of a call, or of a value: of what has one of the types `of`, or a list that begins with one, among its
    arguments. Where a function named in `inside` is entered, what it calls is its own matter and not counted; the walk
    ends where the function `until` is entered."""
    found = Walk()
    open_inside: list[FrameType] = []

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if open_inside:
            if event == "return" and frame is open_inside[-1]:
                open_inside.pop()
            return
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        file, caller = str(Path(code.co_filename).relative_to(PACKAGE)), _caller(frame)
        if caller == IMPORT:
            return
        if code.co_qualname in inside:
            open_inside.append(frame)
        if of and not any(_is_of(value, of) for value in frame.f_locals.values()):
            return
        if caller is not None:
            found.rooms.setdefault(caller, len(found.rooms))
        found.rooms.setdefault(file, len(found.rooms))
        name = (file, code.co_qualname)
        found.names.add(name)
        if caller not in (None, file) and name not in {stay[1:] for stay in found.stays}:
            found.stays.append((caller, *name))
        if code.co_qualname == until:
            raise Arrived

    sys.setprofile(see)
    try:
        call()
    except Arrived:
        pass
    finally:
        sys.setprofile(None)
    return found


def _is_of(value: object, types: tuple[type, ...]) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return bool({*types} & {*type(first).__mro__})  # without asking a protocol


def _caller(frame: FrameType) -> str | None:
    """The file of ours that a function was called from, or through a library; IMPORT while a file is imported."""
    file, before = None, frame.f_back
    while before is not None:
        code = before.f_code
        if code.co_filename.startswith(str(PACKAGE)):
            if code.co_name == "<module>":
                return IMPORT
            file = file or str(Path(code.co_filename).relative_to(PACKAGE))
            if not code.co_name.startswith("<"):  # a lambda or comprehension, perhaps of an imported file
                return file
        before = before.f_back
    return file


def of_measure(folder: Path, value: bool = False) -> Walk:
    """A Hugging Face folder, from the request to the record, without what the measures and the loading of weights do
    inside."""
    import torch
    from support.hf_families import tiny_folder
    from support.tiny_sweep import corpus

    from sparsedepth.config.run import MeasureOnlyConfig
    from sparsedepth.data.pipeline import CorpusSource as Source
    from sparsedepth.data.sequences import Sequences
    from sparsedepth.measure.measurements import Measurements
    from sparsedepth.probe.load import LoadedModel, load_model
    from sparsedepth.probe.probed_model import ProbedModel
    from sparsedepth.probe.text import MeasuredTokens, tokens_to_measure
    from sparsedepth.run.measure_existing_model import measure_existing_model, measuring_config

    settings = {"measures": ["loss", "causal"], "seq_len": 16, "measure_tokens": 64, "fit_tokens": 64, "val_tokens": 64}
    model, data = str(tiny_folder(folder / "model")), str(corpus(folder))
    own_matter = ("load_model", "measure_run", "_check_states", "save_measured", "build", "device_facts", "provenance")

    def measure() -> None:
        loaded = load_model(model, device=torch.device("cpu"))
        config = measuring_config(loaded, settings)
        with tokens_to_measure(loaded, config, data) as tokens:
            measure_existing_model(loaded, tokens, config, out=folder / "out")

    types = (LoadedModel, ProbedModel, MeasureOnlyConfig, MeasuredTokens, Source, Sequences, Measurements)
    return walk(measure, inside=own_matter, of=types if value else ())


def of_sweep(folder: Path, value: bool = False) -> Walk:
    """A definition, from the command's call to the queue."""
    from support.tiny_sweep import definition

    from sparsedepth.cli import calls
    from sparsedepth.config.run import RunConfig
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.tasks import Plan, PlannedRun, Task

    path, types = definition(folder), (SweepDefinition, Plan, PlannedRun, Task, RunConfig)
    sweep = lambda: calls.sweep(path, out=folder / "out", workers=1)  # noqa: E731
    return walk(sweep, inside=("build",), until="enqueue", of=types if value else ())


def of_effects(runs: Any, outcome: str) -> Walk:
    """From the rows of `runs` to the table of effects on an outcome."""
    from sparsedepth.effects import cells, frame, listing
    from sparsedepth.words.effects import effects_text

    def show() -> str:
        of_runs = cells.cells_of(runs, outcome)
        return effects_text(listing.listing(frame.effects_frame(of_runs), of_runs))

    return walk(show)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for of_call, value in itertools.product((of_measure, of_sweep), (True, False)):
        with tempfile.TemporaryDirectory() as made:
            taken = of_call(Path(made), value)
        print(f"{of_call.__name__.removeprefix('of_')}, {'the value' if value else 'everything'}: {taken.text}")
        if "--stays" in sys.argv:
            for before, file, name in taken.stays:
                print(f"    {before} -> {file}: {name}")
