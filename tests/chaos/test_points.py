"""Death at every named point of a run's life, and at random steps: it recovers, and its weights are bit-equal."""

import json
import random
from pathlib import Path

import pytest
from support.interrupted_sweep import STEPS, Sweep, record_of, with_faults

LIVES = (
    ["start"],
    ["first step"],
    ["before a checkpoint"],
    ["between write and rename"],
    ["after a checkpoint"],
    ["while measuring"],
    ["before the complete marker"],
    ["before the record is in its place"],
    ["after a checkpoint", "while resuming"],
)
"""What befalls a run, one death after the other."""


def dying(folder: Path, results: Path, faults: dict[str, list[str]], monkeypatch, tmp_path: Path) -> int:
    """Run the sweep with these faults to its end; how often a process died."""
    described = tmp_path / "faults.json"
    described.write_text(json.dumps(faults))
    monkeypatch.setattr("support.tiny_sweep.ENVIRONMENT", with_faults(SPARSEDEPTH_FAULTS=described))
    Sweep(folder, len(faults)).run(results, 2, "--runtime", "checkpoint_seconds=0.05")
    flags = {path.name for path in tmp_path.iterdir()} - {described.name, results.name}
    assert flags == {f"{run_id}.{n}" for run_id, points in faults.items() for n in range(len(points))}
    return len(flags)


@pytest.mark.parametrize(
    ("times", "steps"), [(1, 3), pytest.param(5, 20, marks=pytest.mark.chaos)], ids=["short", "long"]
)
def test_death_at_each_point_and_at_random_steps(folder, undisturbed, tmp_path, monkeypatch, times, steps):
    drawn = random.Random(steps).sample(range(1, STEPS), steps)
    lives = [points for points in LIVES for _ in range(times)] + [[f"step {step}"] for step in drawn]
    expected = undisturbed(len(lives))
    faults = dict(zip(Sweep(folder, len(lives)).run_ids(), lives, strict=True))
    deaths = dying(folder, tmp_path / "results", faults, monkeypatch, tmp_path)
    assert record_of(tmp_path / "results") == expected
    print(f"\n{deaths} deaths at {len(LIVES)} points, {times} each, and at steps {sorted(drawn)}: as if undisturbed")
