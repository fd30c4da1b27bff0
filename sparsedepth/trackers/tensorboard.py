"""TensorBoard: an event file per run, written atomically, with scalars, text and hyperparameters."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_ndarray, make_tensor_proto

from sparsedepth.files import atomic_folder, open_regular
from sparsedepth.trackers.runs import MAX_BYTES, LoggedRun, TrackedRun

VERSION = "brain.Event:2"
STATUS = {1: "finished", 2: "failed", 3: "unfinished"}
"""of a summary of hyperparameters"""

KINDS = ("number_value", "string_value", "bool_value")


class Tracker:
    """A folder of event files. `curves/NAME` by step, `summary/NAME` at the last step."""

    def __init__(self, folder: Path, at: str | None, project: str) -> None:
        """`at`: the folder of event files; TensorBoard has no projects."""
        self.folder = Path(at) if at else folder / "tensorboard"
        self.place = str(self.folder)
        self.view_command = f"tensorboard --logdir {shlex.quote(self.place)}"

    def held(self) -> set[str]:
        return {path.name for path in self.folder.glob("[!.]*") if path.is_dir()}

    def discard(self, run_id: str) -> None:
        shutil.rmtree(self.folder / run_id, ignore_errors=True)

    def send(self, run: TrackedRun) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_folder(self.folder / run.run_id) as folder:
            writer = EventFileWriter(str(folder))
            first = hparams_pb(run.params, trial_id=run.run_id, start_time_secs=run.started)
            tags = "\n".join(f"    {name}: {value}" for name, value in run.tags.items())  # indented: not Markdown
            metadata = create_summary_metadata(display_name="tags", description="")
            first.value.append(Summary.Value(tag="tags", metadata=metadata, tensor=make_tensor_proto([tags.encode()])))
            writer.add_event(Event(wall_time=run.started, step=0, summary=first))
            for step, values in (*run.curves, (run.last_step, run.summary)):
                kind = "summary" if values is run.summary else "curves"
                scalars = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
                writer.add_event(Event(wall_time=run.time_at(step), step=step, summary=Summary(value=scalars)))
            writer.close()


def read(place: str) -> Iterator[LoggedRun]:
    """The run of each folder with event files: hyperparameters, and the last value of each scalar. A run has a status
    only with hyperparameters that state it, or if its file is cut off (unfinished)."""
    for folder in sorted({path.parent for path in Path(place).rglob("[!.]*tfevents*")}):
        id = folder.resolve().name if folder == Path(place) else folder.relative_to(place).as_posix()
        run, starts = LoggedRun(id=id), dict[str, int]()
        for path in sorted(folder.glob("[!.]*tfevents*")):
            open_regular(path, MAX_BYTES, Path(place)).close()
            run, own = _with_file(run, path)
            if again := [tag for tag in own if own[tag] <= starts.get(tag, -1)]:
                raise ValueError(f"{folder} has two runs: {again[0]} begins again in {path.name}; move it elsewhere")
            starts = own | starts
        yield run


def _with_file(run: LoggedRun, path: Path) -> tuple[LoggedRun, dict[str, int]]:
    """The run with what an event file adds, and the first step of each scalar."""
    config, metrics, status = {**run.config}, {**run.metrics}, run.status if path.stat().st_size else "unfinished"
    starts, plugins = dict[str, int](), dict[str, str]()
    try:
        for step, value in _values(path):
            data = value.metadata.plugin_data
            if plugins.setdefault(value.tag, data.plugin_name) == "hparams":
                hparams = HParamsPluginData.FromString(data.content)
                for name, hparam in hparams.session_start_info.hparams.items():
                    kind = hparam.WhichOneof("kind")
                    config[name] = getattr(hparam, kind) if kind in KINDS else None
                status = STATUS.get(hparams.session_end_info.status, status)
            elif (is_old := value.HasField("simple_value")) or plugins[value.tag] == "scalars":
                starts.setdefault(value.tag, step)
                metrics[value.tag] = value.simple_value if is_old else make_ndarray(value.tensor).item()
    except DataLossError as error:
        if "truncated" not in str(error):
            raise
        status = "unfinished"
    return replace(run, config=config, metrics=metrics, status=status), starts


def _values(path: Path) -> Iterator[tuple[int, Summary.Value]]:
    """(step, value). Raises DataLossError where the file is cut off or damaged."""
    reader = PyRecordReader_New(str(path))
    with suppress(OutOfRangeError):  # the end
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            if event.file_version not in ("", VERSION):
                raise ValueError(f"{path} has version {event.file_version!r}, not {VERSION!r}")
            yield from ((event.step, value) for value in event.summary.value)
