"""Truncations and bit flips in what a run wrote: each is found, and what is used instead is right."""

import functools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_sweep import BASE, corpus, table

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.run import lease
from sparsedepth.run.execute import execute
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store import run_record
from sparsedepth.sweep.results_folder import ResultsIndex
from sparsedepth.sweep.status import state_of
from sparsedepth.train import checkpoint
from sparsedepth.train.loop import Interrupted
from sparsedepth.train.optimizer import make_optimizer

CPU = RuntimeConfig(device="cpu", threads=1, checkpoint_seconds=1e-6)
SMALL = {"measures": ["loss"], "n_layers": 2, "train_tokens": 128 * 12}
FILES = ("config.yaml", "manifest.json", "summary.json", "curves.parquet", "layers.parquet", "model.safetensors")


def damage(path: Path, rng: random.Random) -> str:
    """Cut the file somewhere, or flip one of its bits."""
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    if rng.random() < 0.5:
        path.write_bytes(content[:place])
        return f"{path.name} cut at {place} of {len(content)}"
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{path.name}: a bit of byte {place} of {len(content)}"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    return build(RunConfig, {**BASE, **SMALL, "corpus": str(corpus(tmp_path_factory.mktemp("text")))}, "test")


@pytest.fixture(scope="module")
def complete(config, tmp_path_factory) -> Path:
    """Results with one complete run."""
    results = tmp_path_factory.mktemp("complete")
    execute(config, results, Options(runtime=CPU))
    return results


def _reaches(asked: Iterator[int], steps: int) -> bool:
    return next(asked) >= steps


@pytest.fixture(scope="module")
def interrupted(config, tmp_path_factory) -> Path:
    """Results with one run that stopped at step 7, with checkpoints of steps 6 and 7."""
    results = tmp_path_factory.mktemp("interrupted")
    for steps in (6, 1):
        asked = iter(range(1, 100))
        with pytest.raises(Interrupted):
            execute(config, results, Options(runtime=CPU, stop=functools.partial(_reaches, asked, steps)))
    commits = sorted(path.stem for path in Scratch(results, config.run_id).checkpoints.glob("*.json"))
    assert commits == ["step-000000006", "step-000000007"]
    return results


def test_a_hundred_damages_of_checkpoints_are_all_found(interrupted, config):
    """The checkpoint before is used, and is what it was; with both damaged there is none."""
    folder = Scratch(interrupted, config.run_id).checkpoints
    model = Decoder(config, config.seed)
    optimizer = make_optimizer(model, config)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    assert checkpoint.read(folder, model, optimizer).step == 7
    for path in folder.glob("step-000000007.*"):
        path.unlink()
    before = checkpoint.read(folder, model, optimizer)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    rng = random.Random(2)
    for number in range(100):
        for path, content in whole.items():
            path.write_bytes(content)
        what = damage(rng.choice(sorted(folder.glob("step-000000007.*"))), rng)
        both = number % 5 == 0
        if both:
            what += " and " + damage(rng.choice(sorted(folder.glob("step-000000006.*"))), rng)
        found = checkpoint.read(folder, model, optimizer)
        assert found == (None if both else before), what
        if not both:
            assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items()), what
    for path, content in whole.items():
        path.write_bytes(content)


@pytest.mark.parametrize("number", range(4))
def test_a_damaged_run_is_made_again_and_ends_the_same(complete, interrupted, config, tmp_path, number):
    """A damaged record is set aside; a run with a damaged checkpoint goes on from the one before."""
    rng = random.Random(3 + number)
    source = interrupted if number % 2 else complete
    results = tmp_path / "results"
    shutil.copytree(source, results)
    if number % 2:
        damage(rng.choice(sorted(Scratch(results, config.run_id).checkpoints.glob("step-000000007.*"))), rng)
    else:
        damage(results / "runs" / config.run_id / rng.choice(FILES), rng)
    execute(config, results, Options(runtime=CPU))
    assert table(results) == table(complete)
    run_record.verify(results / "runs" / config.run_id)


def test_damaged_scratch_files_never_stop_anything(interrupted, config, tmp_path):
    """Progress, failures and what is known of memory are read by every look at a sweep."""
    scratch = Scratch(tmp_path, config.run_id)
    scratch.folder.mkdir(parents=True)
    scratch.write_progress("training", 0.5, 2.0, 10.0)
    scratch.add_failure("a reason")
    scratch.halve_micro_batch(4, "x")
    whole = {path: path.read_bytes() for path in scratch.folder.iterdir()}
    rng = random.Random(4)
    for _ in range(200):
        path = rng.choice(sorted(whole))
        what = damage(path, rng)
        state = state_of(ResultsIndex(tmp_path, None), config.run_id)
        assert state.state in ("failed", "infeasible", "planned"), what
        assert state.progress is None or 0 <= abs(state.progress.done) < float("inf"), what
        assert scratch.recorded().micro_batch is None or scratch.recorded().micro_batch > 0, what
        path.write_bytes(whole[path])


def test_a_damaged_lock_is_judged_by_its_beat(tmp_path, monkeypatch):
    """What does not name this kernel may be another machine's holder: it is given the grace period."""
    monkeypatch.setattr(lease, "GRACE_SECONDS", 0.2)
    (tmp_path / "lock").write_bytes(b"\xff\x00")
    with lease.hold(tmp_path / "lock") as held:
        assert held.is_valid()
