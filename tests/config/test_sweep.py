"""Sweep definitions: cells, scales, and what is refused."""

import time

import pytest

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Prune
from sparsedepth.config.sweep import SweepDefinition, ad_hoc, read_definition
from sparsedepth.plan.tasks import Plan
from sparsedepth.sweep.status import varied_fields
from sparsedepth.words.sweep import run_text

WORDS = {"name": "s", "question": "q", "hypothesis": "h"}


def sweep(**fields) -> SweepDefinition:
    return build(SweepDefinition, {**WORDS, **fields}, "s.yaml")


def test_cells_are_variants_crossed_with_the_space():
    definition = sweep(
        space={"n_layers": [2, 3]}, variants=[{}, {"n_experts": 2, "top_k": 2}], base={"d_model": 16, "n_heads": 2}
    )
    assert list(definition.grid()) == [
        {"n_layers": 2},
        {"n_layers": 3},
        {"n_experts": 2, "top_k": 2, "n_layers": 2},
        {"n_experts": 2, "top_k": 2, "n_layers": 3},
    ]
    run = definition.run_config({"n_layers": 3}, seed=7)
    assert (run.d_model, run.n_layers, run.seed) == (16, 3, 7)


def test_a_scale_lays_over_base_and_replaces_the_rest():
    definition = sweep(
        base={"d_model": 64, "lr": 0.1, "max_corpus_tokens": 5},
        space={"n_layers": [12, 32]},
        seeds=[0, 1, 2],
        branch_at=[0.25, 0.5],
        scales={
            "micro": {
                "hypothesis": "as at full size",
                "base": {"d_model": 16, "max_corpus_tokens": None},
                "space": {"n_layers": [2]},
                "branch_at": [0.5],
            }
        },
    )
    micro = definition.scaled("micro")
    assert (definition.branch_at, micro.branch_at) == ([0.25, 0.5], [0.5])
    assert micro.name == "s-micro" and micro.seeds == [0, 1, 2]
    assert (micro.question, micro.hypothesis) == ("q", "as at full size")
    assert micro.base == {"d_model": 16, "lr": 0.1, "max_corpus_tokens": None}
    assert list(micro.grid()) == [{"n_layers": 2}]
    assert definition.scaled(None) is definition
    with pytest.raises(ValueError, match="no scale 'huge'; it has: micro"):
        definition.scaled("huge")


@pytest.mark.parametrize("key", ["space", "tune", "zip"])
def test_a_scale_whose_base_sets_what_the_sweep_varies_is_refused(key):
    """The values of the sweep would be run, and those of the scale not."""
    more = {"tuning_seeds": [9]} if key == "tune" else {}
    axes = {"lr": [0.1, 0.2, 0.4]} | ({"weight_decay": [0.0, 0.1, 0.2]} if key == "zip" else {})
    varied = {key: [axes] if key == "zip" else axes, **more}
    wrong = sweep(**varied, scales={"micro": {"base": {"lr": 0.3}}})
    with pytest.raises(
        ValueError, match=rf"scales\.micro\.base\.lr of sweep 's' would do nothing: its {key} varies lr"
    ):
        wrong.scaled("micro")
    own = {key: varied[key]}
    assert sweep(**varied, scales={"micro": {"base": {"lr": 0.3}, **own}}).scaled("micro").base == {"lr": 0.3}


def test_the_base_can_be_changed_but_not_what_varies():
    definition = sweep(base={"lr": 0.1}, space={"n_layers": [2]}, variants=[{}, {"n_kv_heads": 1}])
    assert definition.with_changes({"lr": 0.2, "d_model": 32}).base == {"lr": 0.2, "d_model": 32}
    with pytest.raises(ValueError, match="seed is for replicates"):
        definition.with_changes({"seed": 3})
    for name in ("n_layers", "n_kv_heads"):
        with pytest.raises(ValueError, match=f"varies {name}"):
            definition.with_changes({name: 1})


TPE = {"sampler": "tpe", "n_trials": 2}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"space": {"n_layer": [1]}}, "did you mean 'n_layers'"),
        ({"space": {"seed": [1]}}, "seed is for replicates"),
        ({"space": {"n_layers": []}}, "space.n_layers"),
        ({"base": {"seed": 1}}, "seed is for replicates"),
        ({"seeds": [1, 1]}, "seeds=[1, 1] must not repeat a value"),
        ({"seeds": []}, "seeds"),
        ({"sampler": "tpe", "space": {"lr": {"low": 1e-4, "high": 1e-2}}}, "needs n_trials"),
        ({"n_trials": 3}, "no meaning with sampler 'grid'"),
        ({"space": {"lr": {"low": 1e-4, "high": 1e-2}}}, "needs a list of values"),
        ({**TPE, "space": {"lr": {"low": 2, "high": 1}}}, "low < high"),
        ({**TPE, "space": {"lr": [1.0]}, "variants": [{"n_layers": 1}]}, "variants and cells"),
        ({**TPE, "space": {"n_layers": {"low": 2, "high": 8}}}, "and n_layers is an integer; add whole: true"),
        ({**TPE, "space": {"n_layerz": {"low": 2, "high": 8}}}, "space: unknown key 'n_layerz'"),
        (
            {**TPE, "space": {"d_ff": {"low": 0.4, "high": 8, "whole": True}}},
            "=0.4 and high=8.0 must be whole numbers",
        ),
        ({"objectives": ["val_loss", "val_loss"]}, "must not repeat a value"),
        ({"space": {"lr": [1.0]}, "variants": [{}, {"lr": 2.0}]}, "lr must vary in one place"),
        ({"space": {"lr": [1.0]}, "tune": {"lr": [1.0, 2.0, 4.0]}}, "lr must vary in one place"),
        ({"tune": {"lr": [1.0, 2.0]}}, "tune.lr"),
        ({"tune": {"lr": [1.0, 2.0, 4.0]}}, "tune.lr needs several seeds that are not in seeds=[0]: tuning"),
        ({"tuning_seeds": [0, 5]}, "tuning_seeds=[0, 5] shares [0] with the seeds of the results"),
        ({"tuning_seeds": [9], "variants": [{"seeds": 10}]}, "shares [9] with the seeds of the results"),
        ({"space": {"n_layers": [3, 3]}}, "space.n_layers=[3, 3] must not repeat a value"),
        ({"variants": [{"seeds": "all"}]}, "seeds='all' must be a list of seeds"),
        ({"tune": {"lr": [1.0, 4.0, 2.0]}}, "must be ascending"),
        ({"tune": {"n_layers": [1, 2, 3]}, "tuning_seeds": [9]}, "put n_layers in the space"),
        ({"tune": {"lr": [0.0, 4.0, 2.0]}}, "tune.lr"),
        ({"tune": {"learning_rate": [1.0, 2.0, 4.0]}}, "unknown key 'learning_rate'"),
        ({**TPE, "space": {"n_layers": [1]}, "tune": {"lr": [1.0, 2.0, 4.0]}}, "does not go"),
        ({"zip": [{"lr": [1.0, 2.0]}]}, "two fields or more"),
        ({"zip": [{"lr": [1.0, 2.0], "n_layers": [1]}]}, "equally many values"),
        ({"zip": [{"lr": [1.0, 1.0], "n_layers": [1, 2]}]}, "must not repeat"),
        ({"only": {"top_k": {"n_experts": [4]}}}, "needs an axis 'top_k'"),
        ({"space": {"top_k": [1]}, "only": {"top_k": {"experts": 4}}}, "did you mean 'n_experts'"),
        ({"exclude": [{"n_layer": 4}]}, "did you mean 'n_layers'"),
        ({"exclude": [{}]}, "exclude"),
        ({"exclude": [{"n_layers": 2, "seed": 0}]}, "select cells, whose seed is not known yet"),
        ({"tune": {"lr": [1, 2, 4]}, "tuning_seeds": [9], "exclude": [{"lr": 4}]}, "cells, whose lr is not known yet"),
        ({"free": "d_ff"}, "is solved for parameters or FLOPs"),
        ({"free": "n_layers", "matched": "flops"}, "free='n_layers'"),
        ({"free": "d_ff", "matched": "flops", "variants": [{}, {"d_ff": 8}]}, "d_ff must vary in one place"),
        ({"constraints": {"val_loss": 3.0}}, "constraints.val_loss"),
        ({"constraints": {"params_total": 0}}, "greater than 0"),
        ({"sampler": "nsga2", "n_trials": 2, "space": {"lr": [1.0]}, "matched": "flops"}, "needs sampler 'grid'"),
        ({"prune": {"by": "train_loss", "at": [0.5]}}, "prune needs another sampler"),
        ({"prune": {"by": "val_loss", "at": [0.5]}}, "prune.by"),
        ({"prune": {"by": "train_loss", "at": [0.5, 0.25]}}, "must be ascending"),
        ({"prune": {"by": "train_loss", "at": [1.5]}}, "prune.at"),
        ({"name": "../escape"}, "name="),
        ({**TPE, "space": {"lr": {"low": 1e-4, "high": float("inf")}}}, "space.lr.high=inf"),
        ({"space": {"lr": [1.0, float("nan")]}}, "space.lr.1=nan"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"space": {"lr": [1.0 + n for n in range(100)], "n_layers": [*range(1, 1001)]}}, "100,000 cells with 1 runs"),
        ({"space": {"lr": [1.0 + n for n in range(100_000)]}}, "shorten the axes, or let a sampler choose"),
        (
            {"sampler": "random", "n_trials": 10**9, "space": {"lr": [1.0]}},
            "1,000,000,000 cells with 1 runs each",
        ),
        ({"seeds": 10**9}, "the limit of 20,000 runs per results folder"),
        ({"seeds": 12_000, "branch_at": [0.5], "base": {"schedule": "wsd"}}, "1 cells with 24,000 runs"),
        ({"question": "\x1b[2J"}, "question='\\x1b[2J' must be plain text"),
        ({"sampler": "magic"}, "sampler='magic'"),
    ],
)
def test_a_mistake_in_a_definition_is_one_line_that_names_it_at_once(fields, words):
    began = time.process_time()
    with pytest.raises(ValueError) as caught:
        sweep(**fields)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert time.process_time() - began < 2


def test_pruning_that_no_logged_step_can_reach_is_refused():
    """Ten steps, at half of them: the window is (4.5, 5], so every step or every fifth must be logged."""
    rule = Prune(by="train_loss", at=[0.5])
    for log_every in (1, 5):
        rule.check_window(10, log_every)
    with pytest.raises(ValueError, match=r"prune.at=0.5: a run of 10 steps with log_every=2 logs none .* to 1 or less"):
        rule.check_window(10, 2)
    for sampler in ("random", "tpe"):
        searched = {"sampler": sampler, "n_trials": 2, "space": {"lr": {"low": 0.1, "high": 1.0}}}
        base = {"d_model": 16, "n_heads": 2, "batch_tokens": 512, "train_tokens": 5120}
        with pytest.raises(ValueError, match="nothing would ever be pruned"):
            Plan(sweep(**searched, base=base, prune={"by": "train_loss", "at": [0.5]}))


def test_zipped_axes_move_together():
    definition = sweep(zip=[{"seq_len": [32, 64], "lr": [0.1, 0.2]}], space={"n_layers": [2, 3]})
    assert list(definition.grid()) == [
        {"n_layers": 2, "seq_len": 32, "lr": 0.1},
        {"n_layers": 2, "seq_len": 64, "lr": 0.2},
        {"n_layers": 3, "seq_len": 32, "lr": 0.1},
        {"n_layers": 3, "seq_len": 64, "lr": 0.2},
    ]


def test_an_axis_without_a_meaning_is_left_out_of_the_cell():
    """top_k only with experts: the dense cell comes once, not once for each top_k."""
    definition = sweep(space={"n_experts": [0, 4, 8], "top_k": [2, 4]}, only={"top_k": {"n_experts": [4, 8]}})
    assert list(definition.grid()) == [
        {"n_experts": 0},
        {"n_experts": 4, "top_k": 2},
        {"n_experts": 4, "top_k": 4},
        {"n_experts": 8, "top_k": 2},
        {"n_experts": 8, "top_k": 4},
    ]


@pytest.mark.parametrize("first", ["top_k", "n_experts"])
def test_a_field_that_is_left_out_takes_along_those_that_need_it(first):
    only = {"top_k": {"n_experts": 4}, "n_experts": {"norm": "pre"}}
    only = {name: only[name] for name in sorted(only, key=lambda name: name != first)}
    definition = sweep(space={"norm": ["pre", "post"], "n_experts": [4], "top_k": [1, 2]}, only=only)
    experts = [{"norm": "pre", "n_experts": 4, "top_k": top_k} for top_k in (1, 2)]
    assert list(definition.grid()) == [*experts, {"norm": "post"}]


def test_excluded_cells_and_cells_listed_one_by_one():
    definition = sweep(
        base={"n_heads": 4},
        space={"n_layers": [2, 3], "n_kv_heads": [4, 1]},
        exclude=[{"n_layers": 3, "n_kv_heads": [1, 2]}, {"weight_decay": 0.5}],
        cells=[{"n_layers": 9}, {"n_layers": 2, "n_kv_heads": 4}, {"n_layers": 2, "weight_decay": 0.5}],
    )
    assert list(definition.grid()) == [
        {"n_layers": 2, "n_kv_heads": 4},
        {"n_layers": 2, "n_kv_heads": 1},
        {"n_layers": 3, "n_kv_heads": 4},
        {"n_layers": 9},
    ]
    assert list(sweep(cells=[{"n_layers": 9}]).grid()) == [{"n_layers": 9}], "a list alone adds no cell of its own"
    assert list(sweep(exclude=[{"n_layers": 12}]).grid()) == [], "a condition sees the defaults"


def test_a_condition_sees_what_follows_from_other_fields():
    variants = [{}, {"n_kv_heads": 1}]
    assert list(sweep(base={"n_heads": 2}, variants=variants, exclude=[{"n_kv_heads": 2}]).grid()) == variants[1:]
    task = {"corpus": "task:state_tracking", "seq_len": 16}
    assert list(sweep(base=task, variants=variants, exclude=[{"task_group": "S5"}]).grid()) == []
    only = {"n_layers": {"n_kv_heads": 2}}
    cells = list(sweep(base={"n_heads": 2}, variants=variants, space={"n_layers": [3]}, only=only).grid())
    assert cells == [{"n_layers": 3}, {"n_kv_heads": 1}]


TUNED = {"tune": {"lr": [0.1, 0.2, 0.4]}, "tuning_seeds": [9]}


@pytest.mark.parametrize(
    ("fields", "cell", "expected"),
    [
        (TUNED, {"n_layers": 4, "lr": 0.1}, "n_layers=4 lr=0.1 seed=3"),
        ({}, {"n_layers": 4, "n_kv_heads": 1}, "n_layers=4 n_kv_heads=1 seed=3"),
        ({}, {"n_layers": 4, "weight_decay": 0.5}, "n_layers=4 seed=3"),
        ({"sampler": "random", "n_trials": 3}, {"n_layers": 4}, "n_layers=4 n_kv_heads=2 weight_decay=0.5 seed=3"),
    ],
)
def test_a_run_is_named_by_depth_tuned_fields_and_what_differs_from_the_base(fields, cell, expected):
    base = {"n_heads": 2, "d_model": 16, "weight_decay": 0.5, "n_layers": 2}
    space = {"n_layers": [4, 8], "n_kv_heads": [2, 1], "weight_decay": [0.5, 1.0]}
    definition = sweep(base=base, space=space, **fields)
    assert run_text(varied_fields(definition, definition.run_config(cell, 3))) == expected


def test_a_preset_in_a_variant_stands_for_its_fields():
    base = {"lr": 0.1, "d_model": 64, "n_heads": 4, "train_tokens": 131072}
    definition = sweep(base=base, variants=[{}, {"preset": "llama-60m", "d_ff": 96}])
    _, cell = definition.grid()
    assert (cell["n_layers"], cell["d_ff"], cell["beta2"]) == (8, 96, 0.999) and "preset" not in cell
    assert "lr" not in cell and "d_model" not in cell, "fields of the base lie over the preset's, as in one file"
    spelt = definition.run_config({"preset": "llama-60m", "d_ff": 96}, 3)
    run = definition.run_config(cell, 3)
    assert run == spelt and varied_fields(definition, run)["n_layers"] == 8
    for layers, n_cells in ((8, 1), (12, 1), (9, 2)):
        excluding = sweep(base=base, variants=definition.variants, exclude=[{"n_layers": layers}])
        assert len(list(excluding.grid())) == n_cells
    for fields in ({"space": {"preset": ["llama-60m"]}}, {"exclude": [{"preset": "llama-60m"}]}):
        with pytest.raises(ValueError, match="preset stands for many fields: set it in the base, in variants or in"):
            sweep(**fields)
    with pytest.raises(ValueError, match="preset='llama-60m' of the base conflicts with presets in variants or cells"):
        sweep(base={"preset": "llama-60m"}, variants=[{"preset": "llama-130m"}])


def test_what_varies_is_told_once_in_order():
    definition = sweep(
        space={"n_layers": [2, 3]},
        variants=[{}, {"n_kv_heads": 1}, {"n_kv_heads": 2, "init": "scaled"}],
        tune={"lr": [1.0, 2.0, 4.0]},
        tuning_seeds=[101],
        matched="flops",
        free="d_ff",
    )
    assert definition.varied == ["n_layers", "lr", "n_kv_heads", "init", "d_ff"]


def test_variants_and_cells_may_have_seeds_of_their_own():
    definition = sweep(
        space={"n_layers": [2]}, variants=[{"seeds": 2}, {"n_kv_heads": 1}], cells=[{"d_ff": 8, "seeds": [7]}]
    )
    assert list(sweep(cells=[{"n_layers": 9}, {"n_layers": 9, "seeds": [7]}], seeds=2).replicated_grid()) == [
        ({"n_layers": 9}, [0, 1, 7])
    ], "a cell that stands twice"
    assert list(definition.replicated_grid()) == [
        ({"n_layers": 2}, [0, 1]),
        ({"n_kv_heads": 1, "n_layers": 2}, [0]),
        ({"d_ff": 8}, [7]),
    ]
    assert definition.result_seeds == [0, 1, 7] and "seeds" not in definition.varied


def test_tuning_seeds_are_counted_from_101_and_shared_only_by_name():
    tuned = {"space": {"n_layers": [2]}, "tune": {"lr": [1.0, 2.0, 4.0]}}
    assert sweep(**tuned, tuning_seeds=3).tuning_seeds == [101, 102, 103]
    assert sweep(**tuned, tuning_seeds=[0], reuse_tuning_seeds=True).tuning_seeds == [0]
    for wrong in ({}, {"tuning_seeds": 3}):  # the seeds that are advised may be taken
        with pytest.raises(ValueError, match=r"tuning_seeds: \[106, 107, 108\]"):
            sweep(**tuned, **wrong, seeds=[101, 105])
    assert sweep(**tuned, tuning_seeds=[106, 107, 108], seeds=[101, 105]).seeds == [101, 105]


def test_a_folder_of_before_tuning_had_seeds_was_tuned_with_its_first(tmp_path):
    content = "name: s\nquestion: q\nhypothesis: h\nspace: {n_layers: [2]}\ntune: {lr: [1, 2, 4]}\nseeds: [4, 5]\n"
    (tmp_path / "sweep.yaml").write_text(content)
    definition = read_definition(tmp_path)
    assert definition is not None and (definition.tuning_seeds, definition.reuse_tuning_seeds) == ([4], True)
    assert read_definition(tmp_path / "nothing") is None


def test_the_sweep_of_a_command_line():
    definition = ad_hoc({"n_kv_heads": [1, 2], "n_layers": [2]}, 3, {"n_layers": 9, "lr": 0.1})
    assert definition.seeds == [0, 1, 2] and definition.base == {"lr": 0.1}
    assert definition.question == "What do n_kv_heads and n_layers change?"
    assert list(definition.grid()) == [{"n_kv_heads": 1, "n_layers": 2}, {"n_kv_heads": 2, "n_layers": 2}]
    with pytest.raises(ValueError, match="needs a definition file, or --vary"):
        ad_hoc({}, 1, {})
    with pytest.raises(ValueError, match="--base sets seed=4, and the seeds of --vary are 0 to 2; leave it out"):
        ad_hoc({"n_layers": [2]}, 3, {"seed": 4})
    assert ad_hoc({"n_layers": [2]}, 3, {"seed": 0}).seeds == [0, 1, 2]  # as `init run` writes it
    with pytest.raises(ValueError, match="did you mean 'n_layers'"):
        ad_hoc({"n_layer": [1]}, 1, {})


@pytest.mark.parametrize(
    "axes", [{"space": {"sliding_window": [None, 8]}}, {"zip": [{"sliding_window": [None, 8], "lr": [1, 2]}]}]
)
def test_null_is_a_value_of_an_axis(axes):
    definition = sweep(**axes, base={"n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 16})
    assert [cell["sliding_window"] for cell in definition.grid()] == [None, 8]
    assert [definition.run_config(cell, seed=0).sliding_window for cell in definition.grid()] == [None, 8]
    left = sweep(**axes, base={"n_layers": 2, "seq_len": 16}, exclude=[{"sliding_window": None}])
    assert [cell["sliding_window"] for cell in left.grid()] == [8]
    with pytest.raises(ValueError, match=r"n_layers.*None|None.*n_layers"):
        Plan(sweep(space={"n_layers": [None, 2]}))


def test_sizes_that_yaml_reads_as_floats_are_whole():
    whole, floats = ({"d_model": kind(64), "n_heads": kind(4)} for kind in (int, float))
    assert build(RunConfig, floats, "x").run_id == build(RunConfig, whole, "x").run_id
    assert len(Plan(sweep(tune={"d_model": [8, 16, 32]}, tuning_seeds=[7, 8], matched="steps")).runs()) == 6
    assert len(Plan(sweep(tune={"seq_len": [16, 32, 64]}, tuning_seeds=[7, 8], base={"n_layers": 2})).runs()) == 6
