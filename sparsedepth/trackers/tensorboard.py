"""TensorBoard: an event file per run, written atomically, with scalars, text and hyperparameters."""

import shutil
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from sparsedepth.files import atomic_folder
from sparsedepth.trackers.tracked_run import TrackedRun


class Tracker:
    """A folder of event files. `curves/NAME` by step, `summary/NAME` at the last step."""

    def __init__(self, folder: Path, at: str | None, project: str) -> None:
        """`at`: the folder of event files; TensorBoard has no projects."""
        self.folder = Path(at) if at else folder / "tensorboard"
        self.place = str(self.folder)

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
            first.value.append(_text("tags", tags))
            writer.add_event(Event(wall_time=run.started, step=0, summary=first))
            for step, values in (*run.curves, (run.last_step, run.summary)):
                kind = "summary" if values is run.summary else "curves"
                scalars = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
                writer.add_event(Event(wall_time=run.time_at(step), step=step, summary=Summary(value=scalars)))
            writer.close()

    def view_command(self) -> str:
        return f"tensorboard --logdir {self.folder}"


def _text(tag: str, text: str) -> Summary.Value:
    metadata = create_summary_metadata(display_name=tag, description="")
    return Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto([text.encode()]))
