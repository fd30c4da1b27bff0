"""`tune: {at: ...}`: lr chosen at one shape and carried to the others; losses are made up."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.made_up_runs import make_run

from sparsedepth.cli.calls import plan as plan_call
from sparsedepth.config.cost import cost
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.cells import cells_of, read_runs
from sparsedepth.effects.frame import depth_effects, setting_effects
from sparsedepth.effects.listing import listing
from sparsedepth.plan.tasks import Plan, no_results
from sparsedepth.store.connection import open_store
from sparsedepth.sweep.results_folder import ResultsIndex, claim
from sparsedepth.words.effects import effects_text

RATES = [0.001, 0.002, 0.004]
BASE = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}
BASE |= {"parametrisation": "completep", "base_width": 16, "base_depth": 2}
BEST = {"none": 0.002, "lns": 0.004}
"""The best lr of each setting at 2 layers, of lns the highest tried."""


def definition(**changes) -> SweepDefinition:
    values = {"name": "s", "question": "q", "hypothesis": "h", "base": BASE, "space": {"n_layers": [4, 8]}}
    values |= {"variants": [{}, {"depth_scale": "after_branch"}], "tune": {"at": {"n_layers": 2}, "lr": RATES}}
    return build(SweepDefinition, {**values, "tuning_seeds": [5, 6], "seeds": [0, 1, 2], **changes}, "s.yaml")


def loss(config) -> float:
    best = 0.004 if config.depth_scale != "none" else 0.002
    noise = 0.004 * np.random.default_rng((config.n_layers, config.seed, config.depth_scale == "none")).normal()
    gain = -0.1 * (config.depth_scale != "none")
    return 3 + gain + 0.2 * math.log2(config.lr / best) ** 2 + noise - 0.05 * math.log2(config.n_layers)


def fill(results, asked: SweepDefinition) -> Plan:
    """As a sweep does: until no run is left."""
    claim(results, asked)
    plan, index = Plan(asked), ResultsIndex(results, asked)
    while left := [one for one in plan.runs(index.loss_of) if not (results / "runs" / one.run_id).exists()]:
        for one in left:
            summary = {"val_loss": loss(one.config), "val_loss_common": loss(one.config), "tokens_trained": 1280}
            make_run(results, one.config, {**summary, "train_flops": 1e6 * one.config.n_layers})
    return plan


def test_each_setting_is_tuned_at_the_shape_alone_and_runs_everywhere_at_what_was_best_there(tmp_path):
    """2 settings, 3 rates and one beyond the edge at 2 layers with 2 seeds; 4 cells of 3 seeds at the best."""
    plan = fill(tmp_path, definition())
    index = ResultsIndex(tmp_path, definition())
    runs = [one.config for one in plan.runs(index.loss_of)]
    tuning = {(one.n_layers, one.depth_scale, one.lr) for one in runs if one.seed in (5, 6)}
    rates = {"none": RATES, "after_branch": [*RATES, 0.008]}
    assert tuning == {(2, scale, lr) for scale in rates for lr in rates[scale]}
    results = {(one.n_layers, one.depth_scale, one.lr) for one in runs if one.seed in (0, 1, 2)}
    assert results == {(n, scale, lr) for n in (4, 8) for scale, lr in (("none", 0.002), ("after_branch", 0.004))}
    assert len(runs) == 7 * 2 + 4 * 3 and not plan.is_open(index.loss_of)
    assert plan.expected == 6 * 2 + 4 * 3, "before any result, without the extension"


def test_a_shape_among_those_of_the_sweep_is_tuned_once_and_its_tuning_is_no_extra(tmp_path):
    plan = Plan(definition(space={"n_layers": [2, 4, 8]}))
    assert plan.expected == 6 * 2 + 6 * 3
    everywhere = Plan(definition(space={"n_layers": [2, 4, 8]}, tune={"lr": RATES}))
    assert everywhere.expected == 3 * 6 * 2 + 6 * 3


def test_the_price_says_what_is_saved(tmp_path):
    """At 2 layers in place of 4 and 8: by hand from the FLOPs of each run."""
    (tmp_path / "s.yaml").write_text(json.dumps(definition().model_dump(mode="json", exclude_unset=True)))
    priced = plan_call(str(tmp_path / "s.yaml"), on="a100").priced
    flops = {
        n: next(kind.train_flops for kind in priced.price.kinds if kind.varied["n_layers"] == n) for n in (2, 4, 8)
    }
    results = 2 * 3 * (flops[4] + flops[8])
    assert priced.price.train_flops == pytest.approx(2 * 6 * flops[2] + results)
    assert priced.flops_tuned_everywhere == pytest.approx(2 * 6 * (flops[4] + flops[8]) + results)
    assert priced.as_json()["flops_tuned_everywhere"] == priced.flops_tuned_everywhere


def test_the_sweep_of_depth_costs_at_most_40_percent_if_tuned_at_its_shallowest():
    """12 layers with 3 lr x 3 seeds in place of 12, 16, 24, 32; then 3 seeds each: (9 x 12 + 3 x 84) / (12 x 84) = 36%,
    but that the embedding and attention are the same share of no depth."""
    values = read_yaml(Path(__file__).parents[2] / "sparsedepth/examples" / "depth.yaml")
    values["tune"]["at"] = {"n_layers": 12}
    values["base"] |= {"parametrisation": "completep", "base_width": values["base"]["d_model"]}
    carried = build(SweepDefinition, values, "depth.yaml")
    spent = [
        sum(run.flops for run in plan.runs()) + sum(run.flops for run in plan.to_come(no_results))
        for plan in (Plan(carried), Plan(carried.model_copy(update={"tune_at": {}})))
    ]
    assert spent[0] / spent[1] == pytest.approx(0.36, abs=0.04)


def cells(results):
    with open_store(results) as store:
        runs = read_runs(store, "val_loss")
    return runs, cells_of(runs, "val_loss")


def test_a_carried_run_is_a_result_and_says_where_its_value_was_chosen(tmp_path):
    fill(tmp_path, definition())
    runs, found = cells(tmp_path)
    carried = runs[runs["n_layers"] > 2]
    assert {*carried["tuning"]} == {"carried"} and {*carried["carried_from"]} == {"n_layers=2"}
    assert {*runs.loc[runs["n_layers"] == 2, "tuning"]} == {"tuning", "rejected"}
    effects = setting_effects(found)
    assert [*effects["at"]] == ["carried lr"] * 2 and [*effects["n_layers"]] == [4, 8]
    assert [*effects["lr"]] == [0.004] * 2 and [*effects["lr_baseline"]] == [0.002] * 2
    assert effects["estimate"].tolist() == pytest.approx([-0.1, -0.1], abs=0.02)
    told = " ".join(effects_text(listing(effects, found)).split())
    assert "lr was chosen at n_layers=2 and carried to the other shapes: intervals there lack the error" in told


def test_the_measured_regret_widens_every_interval_of_carried_runs(tmp_path):
    """By sqrt 2 times the regret: sd^2 = own^2 + 2 regret^2; Student's quantile is that of the fit."""
    widths = []
    for number, changes in enumerate(({}, {"carry_regret": 0.03})):
        fill(tmp_path / str(number), definition(**changes))
        found = cells(tmp_path / str(number))[1]
        widths.append([f["hi"] - f["lo"] for f in (setting_effects(found), depth_effects(found))])
        if changes:
            told = " ".join(effects_text(listing(setting_effects(found), found)).split())
            assert "intervals there have the regret that a sweep has measured, 0.03 nat/token a side" in told
    for own, wider in zip(*widths, strict=True):
        assert (wider > own).all()
        quantile = np.sqrt((wider**2 - own**2) / (2 * 0.03**2)) / 2
        assert ((quantile > 1.95) & (quantile < 4.4)).all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base": {**BASE, "parametrisation": "standard", "base_width": 64, "base_depth": 12}},
         r"n_layers=4, for which parametrisation='standard' has no rule.*'completep'.*carry_regret"),
        ({"base": {**{k: v for k, v in BASE.items() if k != "base_depth"}, "parametrisation": "mup"}},
         r"n_layers=4, for which parametrisation='mup' has no rule"),
        ({"tune": {"at": {"n_layers": 2, "d_model": 32}, "lr": RATES}}, r"heads of 8 channels from 16.*n_heads"),
        ({"tune": {"at": {"n_layer": 2}, "lr": RATES}}, r"tune\.at: unknown key 'n_layer'.*n_layers"),
        ({"tune": {"at": {"weight_decay": 0.2}, "lr": RATES}}, r"tune\.at\.weight_decay: at is a shape"),
        ({"tune": {"at": {"preset": "llama-60m"}, "lr": RATES}}, r"tune\.at\.preset: at is a shape"),
        ({"tune": {"at": {"n_layers": 2, "d_ff": None}, "lr": RATES}}, r"tune\.at\.d_ff: at is a shape"),
        ({"tune": {"at": {"n_layers": [2, 4]}, "lr": RATES}}, r"tune\.at={'n_layers': \[2, 4\]} must be one shape"),
        ({"tune": {"at": [2], "lr": RATES}}, r"tune\.at=\[2\] must be one shape, such as {n_layers: 12, d_model: 64}"),
        ({"tune": {"at": {"n_layers": 2}}}, r"tune\.at, and with it carry_regret, need values"),
        ({"tune": {"lr": RATES}, "carry_regret": 0.01}, r"tune\.at, and with it carry_regret, need values"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_refused_with_a_fix(changes, told):
    with pytest.raises(ValueError, match=told):
        Plan(definition(**changes))


def test_a_measured_regret_opens_what_has_no_rule():
    base = {name: value for name, value in BASE.items() if name not in ("parametrisation", "base_width", "base_depth")}
    assert Plan(definition(base=base, carry_regret=0.01)).expected == 6 * 2 + 4 * 3


def test_what_cannot_be_tuned_at_the_shape_is_left_out_and_not_run_untuned():
    """8 layers have more parameters than 2 and 4, but values are chosen there."""
    most = cost(definition().first_run({"n_layers": 4})).params_total
    fields = {"space": {"n_layers": [8, 2, 4]}, "variants": [{}], "constraints": {"params_total": most}}
    with pytest.raises(ValueError, match="no cell to run: params_total is"):
        Plan(definition(**fields, tune={"at": {"n_layers": 8}, "lr": RATES}))
    plan = Plan(definition(**fields))
    assert [one.cell["n_layers"] for one in plan.matches] == [2, 4]


def test_a_scale_that_replaces_tune_replaces_its_shape():
    scales = {"everywhere": {"tune": {"lr": RATES}}, "elsewhere": {"tune": {"at": {"n_layers": 1}, "lr": RATES}}}
    asked = definition(scales=scales, carry_regret=0.01)
    assert asked.scaled("everywhere").tune_at == {} and Plan(asked.scaled("everywhere")).expected == 4 * 6 + 4 * 3
    assert asked.scaled("elsewhere").tune_at == {"n_layers": 1} and asked.scaled("elsewhere").carry_regret == 0.01
    everywhere = asked.with_changes({"tune": {"lr": RATES}})
    assert everywhere.tune_at == {} and Plan(everywhere).expected == 4 * 6 + 4 * 3
    assert asked.with_changes({"tune": {"at": {"n_layers": 4}, "lr": RATES}}).tune_at == {"n_layers": 4}
