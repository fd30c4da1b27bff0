"""Ladders, one run at each of several budgets: planted multipliers, bent laws, drifts, and what real tables have."""

import numpy as np
import pytest
from support.budget_results import rows_of

from sparsedepth.quantities.levels import ALPHA
from sparsedepth.recipe.judge_ladder import judge_ladders
from sparsedepth.scaling.ladder import ladder_of
from sparsedepth.scaling.multiplier import law_of_ladder
from sparsedepth.scaling.speedup import multipliers, speedups
from sparsedepth.words.judge import multiplier_lines
from sparsedepth.words.scaling import speedup_lines

C_B = np.geomspace(2e17, 6.4e18, 6)
SD = 0.004
"""Of a run [nat/token]."""


def straight(C_B):
    return 1.9 + 4.1 * (C_B / 1e16) ** -0.13


def bent(C_B):
    """Two power laws."""
    return 1.7 + 3.0 * (C_B / 1e16) ** -0.10 + 1.4 * (C_B / 1e16) ** -0.35


def ladder(law, ends, rng, noise=None, C_B=C_B):
    """The setting has the loss of the baseline at `ends` times the compute, from the least to the largest budget."""
    noise = noise or (lambda n: rng.normal(0, SD, n))
    worth_B = np.geomspace(*ends, len(C_B))
    sides = {False: law(C_B), True: law(C_B * worth_B)}
    losses = {
        (is_setting, C): {0: loss}
        for is_setting, loss_B in sides.items()
        for C, loss in zip(C_B, loss_B + noise(len(C_B)), strict=True)
    }
    return ladder_of(losses, {})


def score(n_draws, world, ends):
    """Shares over draws; 'covered' of the shared worth, 'ends' of that at the least and at the largest budget."""
    found = {name: [] for name in ("covered", "shown", "drift", "ends", "beyond", "half")}
    for number in range(n_draws):
        law = law_of_ladder(world(np.random.default_rng([number, round(1000 * ends[0])])))
        lo, hi = law.worth.quantiles([ALPHA / 2, 1 - ALPHA / 2])
        truth = np.log(ends).mean()
        found["covered"].append(lo <= truth <= hi)
        found["half"].append((hi - lo) / 2)
        found["drift"].append(law.has_drift)
        found["shown"].append(law.p() < ALPHA)
        C = law.ladder.C_N
        slope = np.log(ends[1] / ends[0]) / np.log(C.max() / C.min())
        for name, budget, at in (
            ("ends", C.min(), np.log(ends[0])),
            ("ends", C.max(), np.log(ends[1])),
            ("beyond", 4 * C.max(), np.log(ends[1]) + slope * np.log(4)),
        ):
            low, high = law.worth_at(budget).quantiles([ALPHA / 2, 1 - ALPHA / 2])
            found[name].append(low <= at <= high)
    return {name: float(np.median(of) if name == "half" else np.mean(of)) for name, of in found.items()}


draws = pytest.mark.parametrize("n_draws", [20, pytest.param(300, marks=pytest.mark.slow)])


@draws
@pytest.mark.parametrize("law", [straight, bent], ids=["straight", "bent"])
def test_a_setting_that_is_worth_nothing(law, n_draws):
    of = score(n_draws, lambda rng: ladder(law, (1.0, 1.0), rng), (1.0, 1.0))
    print(of)
    whole = n_draws == 300
    assert of["covered"] >= (0.93 if whole else 0.75) and of["shown"] <= (22 / 300 if whole else 0.25)
    assert of["ends"] >= (0.93 if whole else 0.75) and of["beyond"] >= (0.93 if whole else 0.75)


@draws
@pytest.mark.parametrize(("worth", "least"), [(1.15, 1.0), (1.05, 0.8)])
def test_a_setting_that_is_worth_the_same_at_every_size(worth, least, n_draws):
    of = score(n_draws, lambda rng: ladder(straight, (worth, worth), rng), (worth, worth))
    print(of)
    whole = n_draws == 300
    assert of["covered"] >= (0.93 if whole else 0.75) and of["shown"] >= least - (0 if whole else 0.15)
    assert of["half"] <= 0.04 and of["drift"] <= (22 / 300 if whole else 0.25)


@draws
@pytest.mark.parametrize(("first", "least"), [(1.25, 0.98), (1.10, 0.6)])
def test_a_gain_that_fades(first, least, n_draws):
    of = score(n_draws, lambda rng: ladder(straight, (first, 1.0), rng), (first, 1.0))
    print(of)
    whole = n_draws == 300
    assert of["ends"] >= (0.93 if whole else 0.75) and of["drift"] >= least - (0 if whole else 0.2)


def heavy(rng):
    return lambda n: SD * rng.standard_t(3, n) / np.sqrt(3)


def misfit_at_the_ends(rng):
    """The largest and the least budget are off the law three times as far."""
    return lambda n: rng.normal(0, SD, n) * np.where(np.isin(np.arange(n), (0, n - 1)), 3, 1)


def one_size_without_its_lr(rng):
    """One budget of one side was not tuned again, and lost .02."""
    return lambda n: rng.normal(0, SD, n) + 0.02 * (np.arange(n) == rng.integers(2 * n))


@draws
@pytest.mark.parametrize("noise", [heavy, misfit_at_the_ends, one_size_without_its_lr])
@pytest.mark.parametrize("n_budgets", [4, 6])
def test_tables_as_people_have_them(noise, n_budgets, n_draws):
    C = C_B[:n_budgets]
    whole = n_draws == 300
    of = score(n_draws, lambda rng: ladder(bent, (1.0, 1.0), rng, noise(rng), C), (1.0, 1.0))
    print(noise.__name__, n_budgets, of)
    assert of["covered"] >= (0.93 if whole else 0.75) and of["shown"] <= (22 / 300 if whole else 0.25)
    assert of["ends"] >= (0.92 if whole else 0.7)


def test_a_published_example_keeps_its_worth():
    """marin: L_inf 1.6, alpha .0941; 3.5422 becomes 3.52 at 3.82e17 FLOPs, which is 1.130 times the compute. The law
    is pinned at its asymptote, and exact at the baseline's budgets."""
    L_inf, alpha, C = 1.6, 0.0941, 3.82e17
    assert ((3.5422 - L_inf) / (3.52 - L_inf)) ** (1 / alpha) == pytest.approx(1.130, abs=5e-4)
    losses = {(False, C * times): {0: L_inf + (3.5422 - L_inf) * times**-alpha} for times in (0.25, 1.0, 4.0, 16.0)}
    found = ladder_of(losses | {(True, C): {0: 3.52}}, {})
    assert np.exp(law_of_ladder(found, asymptote=L_inf).log_m) == pytest.approx(1.130, abs=5e-4)


def sizes(rng, n_seeds=1):
    """A baseline and two settings, a deeper model at each of five budgets."""
    return [
        (depth, setting, seed, C, straight(C * worth) + rng.normal(0, SD), 1.0)
        for depth, C in zip((6, 8, 12, 16, 24), np.geomspace(2e17, 6.4e18, 5), strict=True)
        for setting, worth in (("baseline", 1.0), ("depth_scale=lns", 1.2), ("n_kv_heads=1", 1.0))
        for seed in range(n_seeds)
    ]


def test_settings_of_a_folder_whose_depth_grows_with_the_budget_are_a_ladder():
    judged = judge_ladders(rows_of(sizes(np.random.default_rng(4))))
    better, same = judged.records()
    assert better["n_layers"] is None and 1 < better["lo"] < 1.2 < better["hi"] and better["verdict"] == "better"
    assert same["lo"] < 1 < same["hi"] and same["budgets"] == 5
    lines = multiplier_lines(judged)
    assert lines[-3].startswith("'depth_scale=lns': worth ") and " at every size; extrapolated: " in lines[-3]
    with pytest.raises(ValueError, match="several seeds"):
        judge_ladders(rows_of(sizes(np.random.default_rng(4), n_seeds=2)))


@pytest.mark.parametrize("tokens", [{}, {"train_tokens": 1000}], ids=["grown", "equal"])
def test_sizes_with_several_seeds_have_one_law_by_seeds(tokens):
    """A row for each size, though all may have the tokens of one."""
    found = speedups(rows_of(sizes(np.random.default_rng(4), n_seeds=3)).assign(**tokens))
    assert found["n_layers"].isna().all() and len(found) == 10 and {*found["seeds"]} == {3}
    better = found[found["setting"] == "depth_scale=lns"]
    assert ((better["lo"] < 1.2) & (better["hi"] > 1.2)).all() and better["train_flops"].is_monotonic_increasing
    assert speedup_lines(multipliers(found))[2].startswith("depth_scale=lns: worth 1.")


def test_sizes_of_equal_tokens_are_budgets_by_their_flops():
    """Each depth costs more, though all have the tokens of one."""
    rows = rows_of(sizes(np.random.default_rng(4)))
    assert judge_ladders(rows.assign(train_tokens=1000)).rows == judge_ladders(rows).rows


def test_a_loss_of_zero_has_no_law():
    rows = rows_of(sizes(np.random.default_rng(4)))
    with pytest.raises(ValueError, match="a loss of 0: its law is of ln loss"):
        judge_ladders(rows.assign(loss=rows["loss"].where(rows["setting"] != "n_kv_heads=1", 0.0)))


def test_branches_of_one_training_are_no_ladder():
    """They share what the training has: what the law leaves says nothing of another training."""
    runs = rows_of([(24, *row[1:]) for row in sizes(np.random.default_rng(4))])
    assert all(row["lo"] is not None and row["n_layers"] == 24 for row in judge_ladders(runs).records())
    branches = runs.assign(training=runs["setting"].map("training of {}".format))
    with pytest.raises(ValueError, match="share a training"):
        judge_ladders(branches)
    found = speedups(branches)
    assert found["lo"].isna().all()
    assert set(found["reason"]) == {"one seed, and one training or one budget: no interval"}
