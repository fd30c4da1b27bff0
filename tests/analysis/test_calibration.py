"""The verdicts on scores: planted ones that follow the need are found, planted ones that do not are not."""

from dataclasses import replace

import calibration
import numpy as np
import pytest
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.tasks.stream import TaskSource


def table(score, value, needs=(2.0, 3.0, 4.0), n_seeds=5, depths=(4, 8), accuracy=1.0):
    """Rows of a planted score: `value(need, n_layers, rng)`."""
    return [
        calibration.Row("hops", depth, seed, need, accuracy, f"{depth}-{seed}", score,
                        value(need, depth, np.random.default_rng([seed, depth, int(need)])))
        for seed in range(n_seeds) for depth in depths for need in needs
    ]  # fmt: skip


def verdicts(*args, **kwargs):
    """By depth, None = across depths."""
    return {trial.n_layers: trial.verdict for trial in calibration.trials(table("usefulness", *args, **kwargs))}


def test_concordance_worked_out_by_hand():
    """Needs 1 2 2 3, values 1 3 2 2: five pairs differ in need, three are ordered right, one wrong, one is tied."""
    need_1N, value_N = np.array([[1, 2, 2, 3]]), np.array([1, 3, 2, 2])
    assert calibration.concordance(value_N, need_1N, np.full((4, 4), True)) == pytest.approx([(3 - 1) / 5])


def test_a_score_that_follows_is_found_and_one_that_does_not_is_not():
    assert set(verdicts(lambda need, _, rng: need + 0.3 * rng.normal()).values()) == {"follows"}
    assert set(verdicts(lambda need, *_: -need).values()) == {"does not follow"}
    assert calibration.overall([]) == "undecided"


def test_a_score_that_cannot_differ_is_not_tested():
    """At 4 layers a count at its bound, which leaves the tally; of all depths, the number of layers itself."""
    made = calibration.trials(table("usefulness", lambda need, n_layers, _: min(need + 2, n_layers), depths=(4, 8)))
    assert [trial.verdict for trial in made] == ["constant", "follows", "undecided"]
    assert next(calibration.report(made)) == "  usefulness: follows (follows in 1 of 2, does not in 0, constant in 1)"
    assert set(verdicts(lambda need, n_layers, _: float(n_layers)).values()) == {"constant"}
    said = next(calibration.report(calibration.trials(table("usefulness", lambda *_: 1.0))))
    assert said == "  usefulness: undecided (follows in 0 of 0, does not in 0, constant in 3)"


def test_an_interval_ends_where_tau_does_and_the_verdicts_are_counted():
    made = calibration.trials(table("usefulness", lambda need, n_layers, _: need / n_layers, depths=(4, 16)))
    assert [(trial.tau.mean, trial.tau.hi) for trial in made[:2]] == [(1.0, 1.0)] * 2 and made[0].tau.lo < 1.0
    assert next(calibration.report(made)) == "  usefulness: does not follow (follows in 2 of 3, does not in 1)"


def test_a_share_of_layers_follows_within_a_depth_alone():
    assert verdicts(lambda need, n_layers, _: need / n_layers, depths=(4, 16)) == {
        4: "follows", 16: "follows", None: "does not follow",
    }  # fmt: skip


def test_noise_seldom_follows():
    """At most about 2.5% of the verdicts, here of 120."""
    found = []
    for world in range(40):
        draws = np.random.default_rng(world)
        noise = table("usefulness", lambda *_, draws=draws: draws.normal())
        found += [trial.verdict for trial in calibration.trials(noise)]
    assert found.count("follows") <= 6


def test_two_models_are_too_few():
    """Two seeds with two needs each are in this order by chance once in four."""
    assert verdicts(lambda need, *_: need, needs=(0.0, 1.0), n_seeds=2, depths=(4,)) == {4: "undecided"}


def test_what_is_not_solved_does_not_count():
    rows = table("usefulness", lambda need, *_: need, accuracy=0.5)
    assert calibration.trials(rows) == []


def test_a_comparison_among_many_speaks_against_a_score_only_by_more_than_chance():
    """tau 0.3 with a standard error of 0.08 and 9 degrees of freedom: its 95% interval ends at 0.3 + 2.26 x 0.08 =
    0.48, one for 12 comparisons at 0.3 + 3.83 x 0.08 = 0.61."""
    follows = calibration.trials(table("usefulness", lambda need, *_: need, depths=(4,)))
    tau = replace(follows[0].tau, mean=0.3, error=0.08, df=9.0, lo=0.12, hi=0.48)
    contrary = replace(follows[0], tau=tau, p=1.0, verdict="does not follow")
    assert calibration.overall([contrary]) == "does not follow"
    assert calibration.overall([contrary, *follows * 11]) == "follows"


SHORT = {"batch_tokens": 288, "train_tokens": 288}
HOPS = RunConfig(corpus="task:k_hop", letters=4, min_hops=1, max_hops=4, seq_len=32, **SHORT)
A5 = RunConfig(corpus="task:state_tracking", task_group="A5", tracked="element", seq_len=9, **SHORT)


def test_the_needs_of_a_task():
    assert list(calibration.needs(HOPS)) == [("hops", 1, 2.0), ("hops", 2, 3.0), ("hops", 4, 4.0)]
    lengths = [("length", n, float(n)) for n in (2, 4, 6, 8)]
    assert list(calibration.needs(A5)) == [*lengths, ("group", None, 1.0)]
    z60 = A5.model_copy(update={"task_group": "Z60"})
    assert list(calibration.needs(z60)) == [("group", None, 0.0)]


def test_only_answers_of_one_difficulty_count():
    of_two_hops = calibration._Scored(TaskSource(HOPS), HOPS, 2).held_out(32, 3200)
    assert 60 < len(of_two_hops) < 140 and (of_two_hops.inputs[:, 0] == 4 + 1 + 2).all()
    counted = of_two_hops.targets[of_two_hops.targets != IGNORED]
    assert len(counted) > 1000 and set(counted.tolist()) == {0, 1, 2, 3}
    of_six_operations = calibration._Scored(TaskSource(A5), A5, 6).held_out(9, 900)
    assert ((of_six_operations.targets != IGNORED) == (np.arange(9) == 6)).all() and len(of_six_operations) == 100


def test_measuring_goes_on_with_the_runs_that_the_table_lacks(tmp_path, monkeypatch):
    measured = []

    def by_need(folder):
        measured.append(folder.name)
        yield calibration.Row("hops", 4, 0, 2.0, 1.0, folder.name, "usefulness", 0.5)

    monkeypatch.setattr(calibration, "_by_need", by_need)
    first, second = (make_run(tmp_path, RunConfig(seed=seed), {"val_loss": 1.0}).name for seed in (1, 2))
    calibration.measure(tmp_path)
    third = make_run(tmp_path, RunConfig(seed=3), {"val_loss": 1.0}).name
    calibration.measure(tmp_path)
    assert sorted(measured[:2]) == sorted((first, second)) and measured[2:] == [third]
    assert [row.run_id for row in calibration.read(tmp_path)] == measured
