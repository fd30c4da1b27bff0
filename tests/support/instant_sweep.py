"""A sweep whose runs are made up in an instant; study, queue and workers are real, and no process is started."""

import math

from support.made_up_runs import make_run

from sparsedepth.config.load import build
from sparsedepth.config.runtime import DEFAULT
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.tasks import Plan
from sparsedepth.sweep.driver import Driver
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.worker import Worker

BASE = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}
SPACE = {"lr": {"low": 1e-3, "high": 1e-1, "log": True}, "n_layers": [1, 2, 3]}


def sweep(**fields) -> SweepDefinition:
    values = {"name": "s", "question": "q", "hypothesis": "h", "base": BASE, **fields}
    return build(SweepDefinition, values, "s.yaml")


class MadeUp(Worker):
    """Runs that end at once: the loss is best at lr 0.01, deeper is less useful, and lr above 0.05 diverges."""

    def run(self, config, trial):
        yield from ()
        loss = abs(math.log(config.lr / 0.01)) + 0.01 * config.seed
        summary = {"outcome": "ok", "val_loss": loss, "usefulness": 1 / config.n_layers}
        if config.lr > 0.05:
            summary = {"outcome": "diverged"}
        if not (self.results / "runs" / config.run_id).exists():
            make_run(self.results, config, summary)
        return summary


class Sweep(Driver):
    """The queue of a driver, and workers that are advanced one after the other until nothing is left."""

    def __init__(self, definition, results, kind=MadeUp, workers=1):
        super().__init__(Plan(definition), results, Machine(workers=workers, runtime=DEFAULT, gpus=[]))
        self._workers = [kind(self.machine, self.results_index, self.stop, number) for number in range(workers)]
        (results / "work").mkdir(parents=True, exist_ok=True)
        self.queue = self.open_queue()
        self.study = self.queue.study
        self.queue.add_finished()

    def assign(self):
        """Give tasks to the idle workers. Whether there is something to wait for."""
        return self._assign_tasks(self.queue, [worker for worker in self._workers if worker.is_idle])

    def finish(self):
        while self.assign():
            for worker in self._workers:
                worker.advance()
        return self.study


def made(study):
    """The trials that stand, each with a cell: what repeated another has given way."""
    return [trial for trial in study.trials if trial.state.name != "FAIL" and "cell" in trial.user_attrs]


def work(results, definition, **options):
    """Queue what is missing until nothing is, as the driver does, and let workers do it."""
    return Sweep(definition, results, **options).finish()


def forget_study(results):
    (results / "study.journal").unlink()


def run_ids(results):
    return {path.name for path in results.glob("runs/*")}
