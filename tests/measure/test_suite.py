"""The whole suite: names and shapes of its rows, disjoint text, determinism, independence of the memory budget."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from reference import FAMILIES, run_config
from support.handmade_models import integers

from sparsedepth import quantities
from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.measure.measurements import Measurements, entries_of
from sparsedepth.measure.suite import SUITE, measure_run, observe_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities.measured import MEASURES

TEXT = np.random.default_rng(7).integers(0, 40, 4000)
BUDGET = {"val_tokens": 640, "measure_tokens": 64, "fit_tokens": 320, "eval_seq_len": 8}


def held_out(seq_len, n_tokens, skip_tokens):
    windows = np.lib.stride_tricks.sliding_window_view(TEXT[skip_tokens:], seq_len + 1)[::seq_len]
    return next_tokens(windows[: n_tokens // seq_len].copy())


def measured(family: str = "dense", *, fields: dict[str, Any] | None = None, text=held_out, **options):
    config = run_config(**{**BUDGET, **FAMILIES[family], **(fields or {})})
    moved = Decoder(config, config.seed + 1)  # other weights than the initial ones, as if they had been trained
    return measure_run(ProbedDecoder(moved), config, text, 1.5, step=9, **options)


def base(metric):
    return metric.split("@")[0]


def nothing_to_share_out(found):
    """Columns of scores none of whose rows is above 0, in a model that is not trained."""
    return {
        f"{score.name}_{column}"
        for score in quantities.PROFILED
        for column in ("largest_share", "centre")
        if all(value <= 0 for _, value in entries_of(score, found.layers, found.pairs))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_is_the_glossarys_and_every_value_a_number(family):
    found = measured(family, fields={"measures": list(SUITE)})
    routed = {"effective_experts", "expert_load_variation", "router_entropy"}
    dense = {"activation_zeros", "activation_sparsity", "activation_units"}
    other_part = dense if family == "moe" else routed
    absent = {*other_part, "solved_difficulty"}  # a text has no difficulties
    names = [quantity.name for quantity in quantities.RUNS]
    expected = {name for name in names[names.index("val_loss") :] if re.sub("_(lo|hi)$", "", name) not in absent}
    assert set(found.summary) == expected
    undefined = {name for name, value in found.summary.items() if value is None}
    assert undefined == nothing_to_share_out(found)
    assert all(math.isfinite(value) for name, value in found.summary.items() if name not in undefined)
    for column in quantities.RUNS:
        if (value := found.summary.get(column.name)) is not None and column.quantity and not column.part:
            low, high = column.quantity.range
            assert low - 1e-6 <= value <= high + 1e-6, (column.name, value)
    tables = (found.layers, found.heads, found.pairs)
    for rows, known in zip(tables, (quantities.LAYERS, quantities.HEADS, quantities.PAIRS), strict=True):
        by_measures = {column.name for column in known if column.quantity and column.quantity.measure}
        assert {base(row["metric"]) for row in rows} == by_measures - other_part
        assert all(row["step"] == 9 and row["n"] > 0 for row in rows)
        places = [tuple(row[key] for key in row if key not in ("value", "n")) for row in rows]
        assert len(set(places)) == len(places)
        missing = [(row["layer"], row["metric"]) for row in rows if row["value"] is None]
        assert missing == ([(5, "causal_effect")] if rows is found.layers else [])


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_of_a_stream_that_is_not_finite_nothing_is_known_but_the_weights(family):
    config = run_config(**BUDGET, **FAMILIES[family], measures=list(SUITE))
    model = Decoder(config)
    with torch.no_grad():
        model.blocks[2].attention.value.weight[0, 0] = math.nan
    found = measure_run(ProbedDecoder(model), config, held_out, 1.5, step=9)
    known = {name for name, value in found.summary.items() if value is not None}
    assert known == {
        "weight_sparsity", "weight_sparsity_rel", "val_loss_tokens", "score_tokens", "permutation_swaps",
    }  # fmt: skip
    values = [row["value"] for rows in (found.layers, found.heads, found.pairs) for row in rows]
    assert all(value is None or math.isfinite(value) for value in values)


def test_rows_by_layer_head_and_pair():
    found = measured()
    layers = {}
    for row in found.layers:
        layers.setdefault(row["metric"], []).append(row["layer"])
    thresholds = ("0.001", "0.0001", "0.01"), ("0.1", "0.01")
    for kind in ("weight", "attention"):
        assert {name for name in layers if re.match(f"{kind}_sparsity(_rel)?@", name)} == {
            *(f"{kind}_sparsity@{t}" for t in thresholds[0]),
            *(f"{kind}_sparsity_rel@{t}" for t in thresholds[1]),
        }
    from_embedding = ("residual_variance", "state_norm", "lens_loss")
    for name, places in layers.items():
        last = {"early_exit_loss": 4, "angle_to_end": 4, "update_angle": 4}.get(name, 5)
        first = 0 if name in (*from_embedding, "early_exit_loss", "angle_to_end") else 1
        assert places == list(range(first, last + 1)), name
    assert {(row["layer"], row["head"]) for row in found.heads} == {(a, b) for a in range(1, 6) for b in range(1, 5)}
    assert sum(row["metric"] == "permutation_effect" for row in found.pairs) == 10
    assert sum(row["metric"] == "angular_distance" for row in found.pairs) == 15  # layers 0 to 5
    assert all(row["layer"] < row["other_layer"] for row in found.pairs)


def test_sample_sizes_are_all_tokens_or_the_scored_ones():
    def every_fourth(seq_len, n_tokens, skip_tokens):
        text = held_out(seq_len, n_tokens, skip_tokens)
        return Sequences(inputs=text.inputs, targets=np.where(np.arange(seq_len) % 4 == 3, text.targets, IGNORED))

    found = measured(text=every_fourth, fields={"measures": list(SUITE)})
    n = {row["metric"]: row["n"] for row in (*found.layers, *found.pairs)}
    scored = {"affine_loss_increase", "affine_loss_added", "affine_accuracy_lost", "skip_loss_increase", "lens_loss",
              "early_exit_loss", "permutation_effect", "removal_drop", "removal_accuracy_lost"}  # fmt: skip
    every = {"residual_variance", "attention_variance", "state_norm", "angular_distance", "causal_effect", "lens_kl",
             "jacobian_deviation_se", "stream_gradient", "update_rank", "activation_zeros"}  # fmt: skip
    assert {n[name] for name in scored} == {16} and {n[name] for name in every} == {64}


def test_the_summary_agrees_with_the_rows_it_sums_up():
    found = measured()

    def mean(rows, metric):
        values = [row["value"] for row in rows if row["metric"] == metric]
        return pytest.approx(np.mean(values), rel=1e-9)

    summary = found.summary
    assert summary["causal_score"] == mean(found.pairs, "causal_effect")
    assert summary["permutation_score"] == mean(found.pairs, "permutation_effect")
    assert summary["usefulness_loss_increase"] == mean(found.layers, "affine_loss_increase")
    assert summary["attention_sparsity"] == mean(found.layers, "attention_sparsity@0.001")
    assert summary["attention_sparsity_rel"] == mean(found.heads, "attention_sparsity_rel@0.1")
    assert summary["weight_sparsity"] == mean(found.layers, "weight_sparsity@0.001")  # blocks of one size
    variance = [row["value"] for row in found.layers if row["metric"] == "residual_variance"]
    assert summary["residual_variance_last"] == variance[-1]
    assert summary["residual_variance_growth"] == pytest.approx((variance[-1] / variance[1]) ** (1 / 4))
    assert summary["effective_layers"] == pytest.approx(5 * summary["usefulness"])
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2) / 1.5)
    assert (summary["val_loss_tokens"], summary["score_tokens"]) == (640, 64)
    for name in ("val_loss", "causal_score", "permutation_score", "usefulness", "residual_variance_last"):
        assert summary[f"{name}_lo"] <= summary[name] <= summary[f"{name}_hi"]


def test_the_maps_are_fitted_on_text_that_is_not_scored():
    asked = []

    def watched(seq_len, n_tokens, skip_tokens):
        asked.append((seq_len, n_tokens, skip_tokens))
        return held_out(seq_len, n_tokens, skip_tokens)

    measured(text=watched)
    assert sorted(asked) == [(8, 640, 0), (16, 64, 0), (16, 320, 64), (16, 640, 0)]


def test_without_another_context_or_bytes_nothing_is_made_up():
    config = run_config(val_tokens=640, measure_tokens=64, fit_tokens=320)
    summary = measure_run(ProbedDecoder(Decoder(config)), config, held_out, step=0).summary
    assert summary["val_loss_common"] == summary["val_loss"]
    assert summary["val_bits_per_byte"] is None
    assert measured().summary["val_loss_common"] != summary["val_loss"]


def test_a_single_layer_has_no_pairs_and_its_scores_are_missing():
    found = measured(fields={"n_layers": 1})
    missing = {name for name, value in found.summary.items() if value is None}
    angles = ("angular_distance_middle", "update_angle")
    scores = ("causal_score", "permutation_score", "early_exit_loss_increase", "residual_variance_growth", *angles)
    expected = {f"{name}{end}" for name in scores for end in ("", "_lo", "_hi")}
    in_depth = {column.name for score in quantities.PROFILED for column in score.depth_columns()} & {*found.summary}
    assert missing - in_depth == expected
    of_one_block = {f"{score.name}_{name}" for score in quantities.PROFILED for name in ("largest_share", "deep_half")}
    assert in_depth - missing <= of_one_block
    assert {row["metric"] for row in found.pairs} == {"angular_distance", "angular_distance_last_token"}


@pytest.mark.parametrize("family", FAMILIES)
def test_twice_the_same_and_the_model_untouched(family):
    config = run_config(**BUDGET, **FAMILIES[family], permutation_pairs=4)
    model = Decoder(config).train()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(3)
    shares = []
    first, second = (
        measure_run(ProbedDecoder(model), config, held_out, step=1, progress=shares.append) for _ in range(2)
    )
    assert first == second
    n_parts = len(config.measures)
    assert shares == sorted(shares[:n_parts]) * 2 and shares[n_parts - 1] == 1.0
    assert torch.initial_seed() == 3 and torch.equal(torch.rand(3), torch.rand(3, generator=torch.manual_seed(3)))
    assert model.training and all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_the_suite_runs_every_measure_and_none_without_a_record():
    assert set(SUITE) == {measure.name for measure in MEASURES}
    made = Measurements(step=0, summary={"val_loss": 1.0}, layers=[{"metric": "causal_effect"}])
    with pytest.raises(AssertionError, match=r"measure 'loss' produces .*causal_effect.* no record"):
        made.check_records("loss")
    with pytest.raises(AssertionError, match=r"new_score"):
        Measurements(step=0, summary={"new_score": 1.0}).check_records("loss")


def test_observations_are_the_layer_rows_of_the_variance():
    config = run_config(**BUDGET)
    probed = ProbedDecoder(Decoder(config))
    rows = observe_variance(probed, torch.from_numpy(held_out(16, 64, 0).inputs), step=9)
    whole = measure_run(probed, config, held_out, step=9).layers
    assert rows == [row for row in whole if row["metric"] == "residual_variance"]
    assert observe_variance(probed, integers(40, 2, 16), step=3)[0]["n"] == 32
