"""Two folders side by side, differences worked out by hand."""

import math

import pytest
from synthetic import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.store.compare import compare, counts, disjoint_fields
from sparsedepth.store.connection import open_store


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
