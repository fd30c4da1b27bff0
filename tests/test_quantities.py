"""One record per quantity: complete against the measures and the config, and what is derived from it."""

from typing import get_args

import pytest

from sparsedepth import quantities
from sparsedepth.config.run import MeasureConfig, RunConfig
from sparsedepth.quantities import ALL, IN_RUNS, QUANTITIES
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.quantities.quantity import Quantity, Stage

NAMES = [measure.name for measure in MEASURES]


def test_every_measure_makes_a_quantity_and_every_measured_quantity_has_its_measure():
    assert {quantity.measure for quantity in QUANTITIES} == {"", *NAMES}
    assert len(set(NAMES)) == len(NAMES)


def test_no_column_is_there_twice_and_what_a_score_sums_up_exists():
    names = [(column.view, column.name) for column in ALL]
    assert len(set(names)) == len(names)
    metrics = {name for view, name in names if view in ("layers", "pairs")}
    assert {quantity.rows for quantity in QUANTITIES if quantity.rows} <= metrics
    assert all(quantity.measure == "" or quantity.formula for quantity in QUANTITIES)


def test_thresholds_are_fields_of_the_config_whose_default_has_a_first():
    for quantity in QUANTITIES:
        assert ("@" in quantity.formula) <= bool(quantity.threshold), quantity.name
        if quantity.threshold:
            assert MeasureConfig.model_fields[quantity.threshold].default[0] > 0


def test_the_default_measures_are_those_not_on_request_and_all_can_be_asked_for():
    default = RunConfig.model_fields["measures"].default
    assert default == tuple(measure.name for measure in MEASURES if not measure.on_request)
    pinned = "usefulness loss weights variance attention geometry experts early_exit causal permutation"
    assert default == tuple(pinned.split()), "run_id depends on it: a new measure is on request"
    assert RunConfig(measures=tuple(NAMES)).measures == tuple(NAMES)
    with pytest.raises(ValueError, match="released_code"):
        RunConfig(measures=("released",))


def test_columns_are_derived_from_the_record():
    record = Quantity(
        "x", "share < @", "share", tables=("runs", "layers", "heads"), has_interval=True, has_error=True,
        threshold="weight_eps",
    )  # fmt: skip
    columns = {(column.view, column.name): column.meaning for column in record.columns()}
    assert list(columns) == [
        *(("runs", name) for name in ("x", "x_lo", "x_hi", "x_se")),
        ("layers", "x"), ("layers", "x_se"), ("heads", "x"), ("heads", "x_se"),
    ]  # fmt: skip
    assert columns["runs", "x"] == "mean over layers of share < weight_eps[0]"
    assert columns["layers", "x"] == "share < @, mean over heads"
    assert columns["heads", "x"] == "share < @, of the head"
    assert record.axis_label == "x (share)" and record.range == (0, 1)


def test_direction_and_its_sign():
    assert [quantities.sign(name) for name in ("val_loss", "causal_score", "steps", "unknown")] == [-1, 1, -1, -1]
    assert quantities.rankable("val_loss").better == "low"
    with pytest.raises(ValueError, match="no measured quantity 'val_los'; did you mean 'val_loss'"):
        quantities.rankable("val_los")
    with pytest.raises(ValueError, match=r"'steps' has no better direction \(optimiser steps taken\)"):
        quantities.rankable("steps")


def test_every_stage_of_the_chain_has_quantities_of_runs():
    for stage in get_args(Stage):
        assert stage == "" or set(quantities.OF_STAGE[stage]) <= set(IN_RUNS) != set()


def test_values_come_with_whole_intervals_only():
    summary = {"val_loss": 2.0, "val_loss_lo": 1.0, "val_loss_hi": 3.0, "causal_score": 0.5, "causal_score_lo": 0.1}
    shown = [(column.name, value, ends) for column, value, ends in quantities.with_intervals(summary)]
    assert shown == [("val_loss", 2.0, (1.0, 3.0)), ("causal_score", 0.5, None)]
