"""Two folders side by side, differences worked out by hand."""

import math

import numpy as np
import pytest
import yaml
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.store.compare import compare, counts, difference_of, disjoint_fields
from sparsedepth.store.connection import open_store
from sparsedepth.store.tuning_curve import TuningCurve, curve_shapes


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Decay 0.1 in both with three common seeds, 0.2 in both with none, 0.3 and 0.4 in one each; the second folder logs
    more often, which makes no other configuration."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for decay, losses in ((0.1, [3.0, 3.1, 3.2, 3.3]), (0.2, [2.0, 2.1, 2.2]), (0.3, [1.0])):
        for seed, loss in enumerate(losses):
            make_run(first, RunConfig(weight_decay=decay, seed=seed), {"val_loss": loss})
    for decay, start, losses in ((0.1, 0, [2.9, 3.0, 2.9]), (0.2, 5, [2.5, 2.5, 2.5]), (0.4, 0, [1.0])):
        for seed, loss in enumerate(losses, start):
            make_run(second, RunConfig(weight_decay=decay, seed=seed, log_every=5), {"val_loss": loss})
    with open_store(first) as one, open_store(second) as other:
        yield one, other


def test_the_same_configurations_differ_by_seed_and_what_only_one_has_follows(stores):
    by, table = compare(*stores)
    assert by == "val_loss"
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["found_in"], row["weight_decay"], row["pairs"]) for row in rows] == [
        *(("both", 0.2, 0), ("both", 0.1, 3), ("first", 0.3, 0), ("second", 0.4, 0)),
    ]
    welch, paired, only_first, only_second = rows
    half = 4.30265 * math.sqrt(0.01 / 3)  # t(2): all variance is the first's
    assert (welch["difference"], welch["lo"]) == (pytest.approx(0.4), pytest.approx(0.4 - half, abs=1e-5))
    differences = [-0.1, -0.1, -0.3]  # sd 0.11547
    half = 4.30265 * 0.11547 / math.sqrt(3)
    assert paired["difference"] == pytest.approx(sum(differences) / 3)
    assert paired["hi"] == pytest.approx(sum(differences) / 3 + half, abs=1e-5)
    assert only_first["second"] is None and only_second["first"] is None and only_second["difference"] is None
    assert (paired["setting"], only_first["setting"]) == ("baseline", "weight_decay=0.3")
    assert counts(table) == (2, 1, 1, 1)  # Welch's interval excludes 0, the paired one does not


def test_what_keeps_all_configurations_apart_is_said(stores, tmp_path):
    """Decay 0.1 is in both, depth and length are not."""
    for depth in (4, 8):
        make_run(tmp_path, RunConfig(n_layers=depth, seq_len=32, weight_decay=0.1), {"val_loss": 3.0})
    with open_store(tmp_path) as other:
        _, table = compare(stores[0], other)
    assert disjoint_fields(table) == [
        "  n_layers: 12 in the first, 4, 8 in the second",
        "  seq_len: 256 in the first, 32 in the second",
    ]
    assert disjoint_fields(compare(*stores)[1]) == []


def test_a_configuration_run_at_one_lr_does_not_keep_the_tuned_ones_apart(tmp_path):
    """Depth 4 is tuned in both folders, to other values; depth 8 only in the first."""
    for folder, best, depths in (("first", 1e-3, (4, 8)), ("second", 2e-3, (4,))):
        sweep = {
            "name": "s",
            "question": "q",
            "hypothesis": "h",
            "tune": {"lr": [1e-3, 2e-3, 4e-3]},
            "seeds": [0, 1, 2],
        }
        for depth in depths:
            for lr in (1e-3, 2e-3, 4e-3):
                for seed in (0, 1, 2):
                    loss = 3.0 if lr == best else 4.0
                    make_run(tmp_path / folder, RunConfig(n_layers=depth, lr=lr, seed=seed), {"val_loss": loss})
        (tmp_path / folder / "sweep.yaml").write_text(yaml.safe_dump({**sweep, "space": {"n_layers": [*depths]}}))
    make_run(tmp_path / "second", RunConfig(n_layers=8, lr=2e-3, seed=0), {"val_loss": 3.0})
    with open_store(tmp_path / "first") as one, open_store(tmp_path / "second") as other:
        _, table = compare(one, other)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    found_in = [(row["found_in"], row["n_layers"], row["tuned"]) for row in rows]
    assert found_in == [("both", 4, "lr 0.001 -> 0.002"), ("first", 8, None), ("second", 8, None)]


def test_the_baseline_is_that_of_the_first_folder(tmp_path):
    """Of lengths 64 and 128 alone the shorter is the baseline; the second folder's 32 does not make both sparse."""
    for folder, lengths in (("first", (64, 128)), ("second", (32,))):
        for seq_len in lengths:
            make_run(tmp_path / folder, RunConfig(seq_len=seq_len, batch_tokens=256), {"val_loss": 3.0})
    with open_store(tmp_path / "first") as first, open_store(tmp_path / "second") as second:
        _, table = compare(first, second)
        labels = {row["seq_len"]: row["setting"] for row in table.records()}
    assert labels == {64: "baseline", 128: "seq_len=128", 32: "seq_len=32"}


def test_a_quantity_without_a_better_direction_is_refused(stores):
    with pytest.raises(ValueError, match="no better direction"):
        compare(*stores, by="weight_sparsity")


def test_fewer_than_three_common_seeds_are_no_reason_for_no_interval():
    """Two of three are common, and each side's mean over its three seeds has Welch's interval: of df 4, sd 0.1."""
    first, second = {"0": 2.0, "1": 2.1, "2": 2.2}, {"1": 2.5, "2": 2.6, "3": 2.7}
    half = 2.776445 * math.sqrt(2 * 0.01 / 3)
    found = pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-5)
    assert difference_of(first, second) == found
    assert difference_of({"0": 2.0, "1": 2.1}, {"1": 2.5, "2": 2.7}) == (pytest.approx(0.4), None, None)  # of seed 1


def test_diverged_runs_are_counted(tmp_path, stores):
    for seed, outcome in enumerate(("ok", "diverged", "diverged")):
        make_run(tmp_path, RunConfig(weight_decay=0.1, seed=seed), {"val_loss": 3.0, "outcome": outcome})
    with open_store(tmp_path) as other:
        _, table = compare(stores[0], other)
    assert table.columns[-1] == "second_diverged"  # none did in the first
    assert [row[-1] for row in table.rows] == [2, None, None]
    assert compare(*stores)[1].columns[-1] == "setting"


def test_the_error_of_choosing_other_values_is_in_the_interval(tmp_path, monkeypatch):
    """Both folders tune lr with three noisy seeds, whose wiggles choose 0.002 in one and 0.004 in the other."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
    wiggles, rates = (0.0, 0.03, -0.03, 0.02, -0.02, 0.01), (0.001, 0.002, 0.004, 0.008)
    for folder, best in (("one", 0.002), ("other", 0.004)):
        (tmp_path / folder).mkdir()
        definition = {"name": "s", "question": "q", "hypothesis": "h", "seeds": [0, 1, 2], "tuning_seeds": [10, 11, 12]}
        definition["tune"] = {"lr": list(rates)}
        (tmp_path / folder / "sweep.yaml").write_text(yaml.safe_dump(definition))
        for i, lr in enumerate(rates):
            for k, seed in enumerate([10, 11, 12, *([0, 1, 2] if lr == best else [])]):
                loss = 3 + 0.02 * abs(math.log2(lr / best)) + wiggles[(k + i) % 6]
                make_run(tmp_path / folder, RunConfig(lr=lr, seed=seed), {"val_loss": loss})
    with open_store(tmp_path / "one") as one, open_store(tmp_path / "other") as other:
        (row,) = compare(one, other)[1].records()
        chosen = "select {} from runs where tuning in ('best', 'edge') order by seed"
        sides = [dict(store.sql(chosen.format("CAST(seed AS VARCHAR), val_loss")).rows) for store in (one, other)]
        tuning = [store.sql(chosen.format("tuning_variance, tuning_df")).rows[0] for store in (one, other)]
        assert row["tuned"] == "lr 0.002 -> 0.004" and "tuned" not in compare(one, one)[1].columns
    assert (row["difference"], row["lo"], row["hi"]) == difference_of(*sides, tuning)
    _, lo, hi = difference_of(*sides)
    assert row["hi"] > hi and row["lo"] < lo


def covered(n, n_seeds, n_common, of_seed=1.0, n_diverged=0):
    """Of n configurations alike in two folders, the share whose interval holds 0; `of_seed`: deviation of what a seed
    does in both, beside 1 of each run. Of the second folder the worst runs diverge."""
    generator = np.random.default_rng(0)
    held = []
    for _ in range(n):
        seed_S = of_seed * generator.normal(size=2 * n_seeds)
        sides = []
        for first, lost in ((0, 0), (n_seeds - n_common, n_diverged)):
            values = seed_S[first : first + n_seeds] + generator.normal(size=n_seeds)
            sides.append({first + i: float(values[i]) for i in np.argsort(values)[: n_seeds - lost]})
        _, lo, hi = difference_of(*sides)
        held.append(None if lo is None else lo <= 0 <= hi)
    assert None not in held
    return float(np.mean(held))


def tuned_covered(n, n_seeds, rough, sd=0.14, n_tuning=2):
    """The share of intervals that hold 0 where both folders tune lr among five values of one parabola, each for itself,
    and choose other values: without and with the error of choosing; and the share of configurations that choose other
    values. Eight configurations a folder, whose curves share their roughness."""
    held = []
    for draw in range(n):
        generator = np.random.default_rng(draw)
        true_CK = 0.05 * (np.arange(5) - 2 - generator.uniform(-0.5, 0.5, (8, 1))) ** 2
        true_CK = true_CK + rough * generator.normal(size=(8, 5))
        sides = []
        for _ in range(2):
            loss_CKS = true_CK[:, :, None] + sd * generator.normal(size=(8, 5, n_tuning + n_seeds))
            chosen_C = loss_CKS[:, :, :n_tuning].mean(axis=2).argmin(axis=1)
            fresh_CKS = np.where((np.arange(5) == chosen_C[:, None])[..., None], loss_CKS[:, :, n_tuning:], np.nan)
            curves = [
                TuningCurve(values=np.log(2) * np.arange(5.0), losses=loss[:, :n_tuning], chosen=int(at), fresh=fresh)
                for loss, at, fresh in zip(loss_CKS, chosen_C, fresh_CKS, strict=True)
            ]
            shapes = curve_shapes(curves)
            results = [dict(enumerate(fresh[at].tolist())) for fresh, at in zip(fresh_CKS, chosen_C, strict=True)]
            sides.append(
                list(zip(chosen_C, results, [(each.variance or 0.0, each.df) for each in shapes], strict=True))
            )
        for (at, first, variance), (other_at, second, other_variance) in zip(*sides, strict=True):
            both = (difference_of(first, second, terms) for terms in ((), (variance, other_variance)))
            held.append((at != other_at, *(lo <= 0 <= hi for _, lo, hi in both)))
    differ_N, alone_N, added_N = np.array(held).T
    return float(alone_N[differ_N].mean()), float(added_N[differ_N].mean()), float(differ_N.mean())


def test_equal_configurations_seldom_differ():
    """The standard error is .007."""
    for n_common in (10, 5, 2, 0):
        assert 0.92 <= covered(1000, 10, n_common) <= 0.98


def test_equal_configurations_seldom_differ_though_tuned_to_other_values():
    alone, added, _ = tuned_covered(50, 10, 0.1)
    assert alone < 0.87 and added >= 0.92  # of some 200, with a standard error of .015: see the slow test


@pytest.mark.slow
def test_the_coverage_of_intervals_of_two_folders():
    for n_seeds in (3, 6, 10):
        for n_common in (n_seeds, n_seeds // 2, 0):
            shares = [covered(4000, n_seeds, n_common, of_seed) for of_seed in (0.0, 2.0)]
            print(f"{n_seeds} seeds, {n_common} common: {shares}")
            assert all(0.94 <= share <= 0.995 for share in shares)
    for n_diverged in (1, 2, 3):
        print(f"the worst {n_diverged} of 10 diverge: {covered(4000, 10, 10, 0.0, n_diverged)}")
    for world in ((6, 0.0), (6, 0.1), (10, 0.0), (10, 0.1)):
        alone, added, differ = tuned_covered(200, *world)
        print(f"{world} tuned: {differ:.2f} choose other values; covered {alone:.3f}, with their error {added:.3f}")
        assert added >= 0.93
