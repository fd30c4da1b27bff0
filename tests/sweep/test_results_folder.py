"""Which runs have ended without a result: one rule for the driver, `status`, `plan` and Slurm."""

from support.instant_sweep import sweep
from support.tiny_sweep import known_runs

from sparsedepth.plan.tasks import Plan
from sparsedepth.run.scratch import Scratch
from sparsedepth.sweep.results_folder import ResultsIndex, prepare, write_attempts
from sparsedepth.sweep.status import forget_failures, remaining_and_trunks, scan, state_of


def _scratch(results, run_id="0123456789ab"):
    scratch = Scratch(results, run_id)
    scratch.folder.mkdir(parents=True, exist_ok=True)
    return scratch


def test_a_run_has_failed_only_after_all_its_attempts(tmp_path):
    scratch = _scratch(tmp_path)
    scratch.add_failure("no")
    assert ResultsIndex(tmp_path, None).recorded_end(scratch) == ("failed", "no"), "`train` tries once"
    write_attempts(tmp_path, 2)
    assert ResultsIndex(tmp_path, None).recorded_end(scratch) is None
    state = state_of(ResultsIndex(tmp_path, None), scratch.run_id)
    assert (state.state, state.reason) == ("interrupted", "no")
    scratch.add_failure("no again")
    assert ResultsIndex(tmp_path, None).recorded_end(scratch) == ("failed", "no again")
    assert ResultsIndex(tmp_path, None, max_attempts=3).recorded_end(scratch) is None


def test_a_damaged_number_of_attempts_counts_as_none(tmp_path):
    scratch = _scratch(tmp_path)
    scratch.add_failure("no")
    write_attempts(tmp_path, 3)
    path = tmp_path / "work" / "attempts.json"
    for content in ("", "[]", '{"max_attempts": "3"}', '{"max_attempts": 0}'):
        path.write_text(content)
        assert ResultsIndex(tmp_path, None).recorded_end(scratch) == ("failed", "no")


def test_memory_ends_a_run_and_its_reason_is_a_whole_sentence(tmp_path):
    scratch = _scratch(tmp_path)
    assert not scratch.halve_micro_batch(1, "CUDA")
    told = "out of memory with one sequence per forward pass: CUDA"
    assert ResultsIndex(tmp_path, None).recorded_end(scratch) == ("infeasible", told)
    scratch.set_infeasible("out of memory while measuring")
    assert ResultsIndex(tmp_path, None).recorded_end(scratch) == ("infeasible", "out of memory while measuring")


def test_a_pruned_run_is_computed_once_the_sweep_no_longer_prunes(tmp_path):
    scratch = _scratch(tmp_path)
    scratch.prune(3, "others are better")
    assert ResultsIndex(tmp_path, None).recorded_end(scratch) == ("pruned", "others are better")
    assert ResultsIndex(tmp_path, sweep(space={"n_layers": [2]})).recorded_end(scratch) is None


def test_a_run_that_failed_once_is_left_and_tuning_waits_for_it(tmp_path):
    """Until it has failed twice the lr with its seed may still be chosen; forgetting failures spares a held lease."""
    tuned = sweep(space={"n_layers": [2]}, tune={"lr": [0.001, 0.002, 0.004]}, tuning_seeds=[7])
    prepare(tmp_path, tuned, 2)
    plan = Plan(tuned)
    first = known_runs(plan, tmp_path)[0]
    scratch = _scratch(tmp_path, first.run_id)
    scratch.add_failure("out of luck")
    assert first in remaining_and_trunks(plan, tmp_path)[0]
    assert first not in remaining_and_trunks(Plan(tuned), tmp_path, max_attempts=1)[0]
    assert {state.run_id: state.state for state in scan(ResultsIndex(tmp_path, tuned))}[first.run_id] == "interrupted"
    scratch.add_failure("out of luck")
    assert first not in remaining_and_trunks(plan, tmp_path)[0]
    forget_failures(tmp_path, tuned, 2)
    assert first in remaining_and_trunks(plan, tmp_path)[0] and not scratch.recorded().failures
