"""Matched sizes, with answers worked out by hand; branches of a sweep, and what cannot be one."""

import pytest

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.budgets import amount, match, shared_steps, trunk_names
from sparsedepth.plan.price import PricingSetup, price_of
from sparsedepth.plan.tasks import Plan
from sparsedepth.words.status import trunks_text
from sparsedepth.words.sweep import matched_lines, plan_notes

BASE = {"d_model": 64, "n_heads": 4, "d_ff": 160, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}


def sweep(**fields) -> SweepDefinition:
    values = {"name": "s", "question": "q", "hypothesis": "h", "base": {**BASE, **fields.pop("base", {})}, **fields}
    return build(SweepDefinition, values, "s.yaml")


def matches(**fields):
    definition = sweep(**fields)
    return match(definition, definition.replicated_grid())


@pytest.mark.parametrize("matched", ["params_total", "params_active", "flops"])
def test_what_one_key_value_head_saves_goes_into_the_feed_forward(matched):
    """n_kv_heads 4 -> 1 saves 2 x 64 x 16 x 3 = 6144 weights a layer, and d_ff costs 3 x 64 = 192 each: 32 more."""
    whole, shared = matches(matched=matched, free="d_ff", space={"n_kv_heads": [4, 1]})
    assert (whole.free, whole.size, whole.ratio) == (None, None, 1.0)
    assert shared.cell == {"n_kv_heads": 1, "d_ff": 192} and shared.ratio == 1.0


def test_experts_match_the_dense_twin_in_active_parameters_but_for_the_router():
    """d_ff 160 = top_k 2 x d_expert 80; the router's 64 x 8 is the mismatch."""
    variants = [{}, {"n_experts": 8, "top_k": 2}]
    dense, routed = matches(matched="params_active", free="d_ff", variants=variants, base={"n_layers": 4})
    assert dense.size is None and routed.cell == {"n_experts": 8, "top_k": 2, "d_expert": 80}
    counted = cost(sweep(base={"n_layers": 4}).run_config({}, 0)).params_active
    assert routed.ratio == pytest.approx(1 + 4 * 64 * 8 / counted)


def test_each_depth_has_a_baseline_of_its_own_and_the_width_keeps_heads_even():
    """n_heads 3: d_model moves in steps of lcm(8, 6) = 24. A baseline keeps its own size."""
    fields = {"base": {"d_model": 48, "n_heads": 3}, "space": {"n_layers": [2, 4], "d_ff": [128, 512]}}
    found = matches(matched="flops", free="d_model", tolerance=0.3, **fields)
    assert [one.config.n_layers for one in found] == [2, 2, 4, 4]
    assert [one.size for one in found] == [None, 24, None, 24]
    assert all(abs(one.ratio - 1) <= 0.3 for one in found)


def test_the_nearest_size_is_taken_on_either_side():
    """Of two neighbours the nearer: no other multiple of 8 is closer."""
    base = {"d_model": 96, "n_heads": 4}
    definition = sweep(matched="flops", free="d_ff", space={"n_kv_heads": [4, 2, 1]}, base=base)
    target = amount(definition.run_config({"n_kv_heads": 4}, 0), definition)
    for one in match(definition, definition.replicated_grid())[1:]:
        off = {
            size: abs(amount(definition.run_config({**one.cell, "d_ff": size}, 0), definition) - target)
            for size in (one.size - 8, one.size, one.size + 8)
        }
        assert min(off, key=lambda size: off[size]) == one.size and one.size % 8 == 0


@pytest.mark.parametrize("matched", ["tokens", "steps"])
def test_tokens_and_steps_agree_exactly(matched):
    with pytest.raises(ValueError, match=f"matched in {matched}.* has 1,?"):
        matches(matched=matched, space={"train_tokens": [1280, 1408]})
    with pytest.raises(ValueError, match=f"matched in {matched}"):  # 0.1% more, within the tolerance of the others
        matches(matched=matched, space={"train_tokens": [128_000, 128_128]})
    assert len(matches(matched=matched, space={"n_layers": [1, 9]})) == 2


TUNING = {"space": {"n_layers": [2]}, "tuning_seeds": [7, 8]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"matched": "flops", "space": {"n_kv_heads": [4, 1]}}, "name a size to solve for"),
        ({"matched": "flops", "free": "d_expert", "space": {"n_kv_heads": [4, 1]}}, "name a size to solve for"),
        ({"matched": "params_total", "free": "d_ff", "space": {"vocab_size": [264, 9999]}}, "tolerance 1.0%"),
        (
            {
                "matched": "flops",
                "free": "train_tokens",
                "across": "depth",
                "tolerance": 1e-6,
                "space": {"n_layers": [3, 4]},
            },
            "more train_tokens, or a larger 'tol",
        ),
        ({"matched": "flops", "free": "d_ff", "tolerance": 1e-6, "space": {"seq_len": [32, 64]}}, "at the best d_ff"),
        ({"matched": "tokens", "tune": {"train_tokens": [1280, 2560, 5120]}, **TUNING}, "tokens"),
        ({"matched": "params_total", "tune": {"d_ff": [16, 32, 64]}, **TUNING}, "params_total"),
    ],
)
def test_a_mismatch_above_the_tolerance_is_refused_before_anything_runs(fields, words):
    with pytest.raises(ValueError, match="(?s)matched in.*" + words):
        Plan(sweep(**fields))


def test_sizes_on_the_way_need_not_be_ones_that_a_run_may_have():
    """One key/value head saves 2 x 128 x 96 weights of a layer, and the next width is 136: 256 has not to be measured.
    A norm of 16 groups takes widths of 32 channels and more."""
    base = {"d_model": 128, "d_ff": None, "n_layers": 12, "fit_tokens": 256}
    fields = {"matched": "params_total", "free": "d_model", "variants": [{}, {"n_kv_heads": 1}]}
    _, narrow = matches(**fields, base=base)
    assert narrow.size == 136 and abs(narrow.ratio - 1) < 0.01
    groups = {"norm_kind": "group", "norm_groups": 16, "d_model": 128}
    _, grouped = matches(**fields, tolerance=0.2, base=groups)
    assert grouped.size is not None and grouped.size % 32 == 0


def test_the_residual_mismatch_is_stated():
    space = {"n_layers": [2], "seq_len": [32, 64]}
    definition = sweep(seeds=2, matched="flops", free="d_ff", space=space, tolerance=0.05)
    found = Plan(definition)
    head, line = plan_notes(found)
    assert [head, line] == [*matched_lines(found)]
    assert head.startswith("matched in flops: sizes of 1 cell, largest mismatch ")
    assert line.startswith("  n_layers=2, seq_len=64: d_ff=")
    assert not [*plan_notes(Plan(sweep(seeds=2)))]
    axes = {"n_layers": [2], "n_kv_heads": [4, 2, 1], "seq_len": [32, 64, 128]}
    (head,) = plan_notes(
        Plan(sweep(seeds=2, matched="flops", free="d_ff", space=axes, tolerance=0.1, base={"batch_tokens": 256}))
    )
    assert head.startswith("matched in flops: sizes of 8 cells, ") and head.endswith("; the table has them")


def test_a_branch_is_no_matched_cell_of_its_own():
    """Its tokens are a share of its trunk's, so that the trunk's mismatch is not the branch's."""
    base = {"schedule": "wsd", "warmup_tokens": 1280, "train_tokens": 128 * 400}
    matched = {"matched": "flops", "across": "depth", "free": "train_tokens", "branch_at": [0.25, 0.5]}
    found = Plan(sweep(seeds=2, **matched, space={"n_layers": [4, 2]}, base=base, tolerance=0.05))
    assert [one.free for one in found.matches] == [None] * 5 + ["train_tokens"]
    _, note = plan_notes(found)
    assert "n_layers=2: train_tokens=" in note


def test_a_branch_of_whole_steps_matches_that_of_the_first_cell_or_is_refused():
    """Trunks of 40 and 60 steps end their first branches after 5 and 8, 6% apart; of 64 and 96 after 8 and 12, as apart
    as the trunks. Seven hundredths of 100 steps are 7, whatever the rounding of 0.07 x 100."""
    base = {"d_model": 16, "n_heads": 2, "d_ff": 48, "vocab_size": 264, "schedule": "wsd", "warmup_tokens": 128}
    fields = {**FLOPS_ACROSS, "space": {"n_layers": [2, 1]}, "branch_at": [0.125, 0.25, 0.5]}

    def found(steps, **more):
        return matches(**{**fields, **more}, base={**base, "train_tokens": 128 * steps})

    words = r"branch_at=0.125 is step 8 of 60 in .*n_layers.: 1.* step 5 of 40 in the first cell, \+.*'tolerance'"
    with pytest.raises(ValueError, match=words):
        found(40)
    assert [one.ratio for one in found(40, tolerance=0.1)][4] == pytest.approx(1.061, abs=1e-3)
    assert max(abs(one.ratio - 1) for one in found(64)) < 0.01
    (branch, _) = found(100, matched="tokens", across=None, free=None, branch_at=[0.07], space={})
    assert branch.config.n_steps == 7


def test_what_cannot_answer_is_noted_before_it_runs():
    one_seed, high = plan_notes(Plan(sweep(seeds=1, space={"lr": [4.0e-3, 4.0e3]})))
    assert one_seed.startswith("one seed: no difference has an interval") and one_seed.endswith("use 3 seeds")
    assert high.startswith("lr=4000 is above 0.5")
    assert not [*plan_notes(Plan(sweep(seeds=2, space={"lr": [4.0e-3, 0.5]})))]


def test_an_objective_that_is_relative_to_the_loss_is_noted_with_its_absolute_form():
    search = {"sampler": "nsga2", "n_trials": 12, "space": {"n_layers": [2, 4]}}
    (note,) = plan_notes(Plan(sweep(objectives=["val_loss", "usefulness"], **search)))
    assert note.startswith("objective usefulness is relative to the loss") and "affine_loss_added" in note
    assert not [*plan_notes(Plan(sweep(objectives=["val_loss", "affine_loss_added"], **search)))]


@pytest.mark.parametrize(("sampler", "first"), [("tpe", 10), ("nsga2", 8)])
def test_a_search_that_ends_before_it_learns_is_noted(sampler, first):
    def notes(n_trials):
        return [*plan_notes(Plan(sweep(sampler=sampler, n_trials=n_trials, space={"n_layers": [2, 4]})))]

    assert f"draws its first {first} proposals at random" in " ".join(notes(first))
    assert notes(first + 1) == []


@pytest.mark.parametrize("search", [{}, {"sampler": "tpe", "n_trials": 11, "space": {"n_layers": [2, 4]}}])
@pytest.mark.parametrize(("tokenizer", "tokens"), [("byte", 257), ("bpe:300", 300)])
def test_a_vocabulary_below_the_tokenizers_is_refused_before_any_run(tokenizer, tokens, search):
    fields = {"corpus": "stdlib", "tokenizer": tokenizer}
    Plan(sweep(base={**fields, "vocab_size": tokens}, **search))
    with pytest.raises(ValueError, match=f"has {tokens} tokens and the model vocab_size={tokens - 1}"):
        Plan(sweep(base={**fields, "vocab_size": tokens - 1}, **search))


ROUTED = {"n_experts": 4, "top_k": 2}
FLOPS_ACROSS = {"matched": "flops", "across": "depth", "free": "train_tokens"}
CELLS = {"space": {"n_layers": [8]}, "cells": [{"n_layers": 2}, {"n_layers": 2, "depth_scale": "lns"}]}


def test_depths_spend_the_flops_of_the_first_cell_in_whole_batches():
    """A layer costs the same at each depth: with a head of few words 8 layers cost about as much as 2 on four times the
    tokens."""
    fields = {**FLOPS_ACROSS, "base": {"vocab_size": 8}}
    deep, shallow, lns = matches(**fields, **CELLS)
    definition = sweep(**fields)
    per_token = [cost(definition.run_config({"n_layers": n}, 0)).flops_per_token for n in (8, 2)]
    assert (deep.size, deep.ratio) == (None, 1.0)
    assert shallow.cell["train_tokens"] == round(1280 * per_token[0] / per_token[1] / 128) * 128 == lns.size
    assert 4.5 * 1280 > shallow.size > 3.5 * 1280 and abs(shallow.ratio - 1) < 0.01


def test_depths_spend_the_time_of_the_first_cell():
    """10 steps of .3 s at 8 layers are 30 steps of .1 s at 2, whatever the setting."""
    fields = {"matched": "time", "across": "depth", "free": "train_tokens", "step_seconds": {8: 0.3, 2: 0.1}}
    deep, shallow, lns = matches(**fields, **CELLS)
    assert deep.size is None and shallow.size == 30 * 128 == lns.size and shallow.ratio == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"no step_seconds of n_layers=4; `sparsedepth plan FILE --set .*--calibrate`"):
        matches(**fields, space={"n_layers": [8, 4]})


@pytest.mark.parametrize("free", ["d_ff", "d_model"])
@pytest.mark.parametrize("matched", ["params_total", "flops"])
def test_across_depths_a_width_can_be_free(free, matched):
    """A shallower model is made wider to spend what the deep one does."""
    fields = {"matched": matched, "across": "depth", "free": free, "tolerance": 0.05}
    deep, shallow = matches(**fields, space={"n_layers": [8, 4]}, base={"vocab_size": 8})
    assert deep.size is None and abs(shallow.ratio - 1) <= 0.05
    assert shallow.size > {"d_ff": 160, "d_model": 64}[free] and shallow.size % 8 == 0


def test_tokens_are_solved_for_a_schedule_that_short_runs_cannot_have():
    wsd = {"schedule": "wsd", "warmup_tokens": 256, "vocab_size": 8}
    _, deep, _, shallow = matches(**FLOPS_ACROSS, space={"n_layers": [8, 2]}, base=wsd, branch_at=[0.5])
    assert deep.size is None and shallow.size > 3.5 * 1280


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"matched": "flops", "across": "depth", "space": {"n_layers": [2, 8]}}, "first cell .*'free: train_tokens'"),
        ({"matched": "params_total", "across": "depth", "space": {"n_layers": [2, 8]}}, "'free: d_ff'"),
        ({"matched": "tokens", "across": "depth"}, "matched: flops"),
        ({"matched": "params_total", "free": "train_tokens"}, "changes FLOPs, not params_total"),
        ({"matched": "time", "across": "depth", "free": "d_ff"}, "add across: depth, free: train_tokens"),
        ({**FLOPS_ACROSS, "space": {"n_layers": [2, 64]}}, "at the best train_tokens; choose another 'free'"),
        ({"matched": "flops", "free": "d_ff", "base": ROUTED, "space": {"d_expert": [8, 16]}}, "d_expert must vary in"),
    ],
)
def test_what_cannot_be_matched_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        matches(**fields)


WSD = {"n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 8, "batch_tokens": 32, "train_tokens": 32 * 80}
WSD |= {"schedule": "wsd", "warmup_tokens": 128, "measures": ["loss"], "val_tokens": 64}


def plan(**fields) -> Plan:
    """A sweep with branches, their cells by hand."""
    return Plan(sweep(**{"branch_at": [0.125, 0.25, 0.5], **fields, "base": {**WSD, **fields.get("base", {})}}))


def test_each_share_is_the_run_that_trains_to_it_alone():
    runs = [planned.config for planned in plan(seeds=2).runs()]
    assert [(config.n_steps, config.warmup_steps, config.stable_steps, config.seed) for config in runs] == [
        (steps, 4, steps - steps // 5, seed) for steps in (10, 20, 40, 80) for seed in (0, 1)
    ], "the shortest first, so that both trunks are there before they are gone on from"
    alone = plan(branch_at=[], base={"train_tokens": 32 * 20}).runs()
    assert alone[0].run_id == runs[2].run_id
    assert len({(config.trunk_key, config.seed) for config in runs}) == 2


def test_a_trunk_is_counted_once():
    runs = [planned.config for planned in plan().runs()]
    assert shared_steps(runs) == [0, 8, 16, 32]
    assert sum(config.n_steps for config in runs) - sum(shared_steps(runs)) == 64 + 2 + 4 + 8 + 16
    cosine = [config.model_copy(update={"schedule": "cosine"}) for config in runs]
    assert shared_steps(cosine) == [0, 0, 0, 0]


def test_a_trunk_goes_on_from_branches_that_are_done():
    """Of 128 steps the longest shorter branch, which is done, has made 32; with or without idle workers."""
    *done, trunk = [planned.config for planned in plan().runs()]
    own = price_of([trunk], PricingSetup()).train_flops * (trunk.n_steps - shared_steps([trunk], done)[0])
    for workers in (1, 4):
        left = price_of([trunk], PricingSetup(workers=workers), done=done)
        assert left.train_flops == pytest.approx(own / trunk.n_steps) and shared_steps([trunk], done) == [32]


def test_status_names_trunk_and_branches():
    runs = sorted((planned.config for planned in plan(seeds=2).runs()), key=lambda config: config.seed)
    names = trunk_names(runs)
    key = runs[0].trunk_key[:6]
    assert [names[config.run_id] for config in runs[:4]] == [
        *(f"branch {number} of 3 of trunk {key}" for number in (1, 2, 3)),
        f"trunk {key}",
    ]
    done = {config.run_id for config in runs[:6]}  # the first trunk, and two branches of the second
    assert trunks_text(names, done) == "2 trunks (1 complete) with 6 branches (5 complete)"
    alone = trunk_names([planned.config for planned in plan(branch_at=[]).runs()])
    assert alone == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"branch_at": [0.5, 0.25]}, "must be ascending"),
        ({"branch_at": [0.5, 1.0]}, "less than 1"),
        ({"branch_at": [0.0]}, "greater than 0"),
        ({"branch_at": [0.05]}, "ends after 4 steps, of which 4 are warm-up and 1 decay"),
        ({"branch_at": [0.001]}, "is no step between them"),
        ({"branch_at": [0.3125], "space": {"batch_tokens": [32, 64]}}, "step 12 of 40 in .* step 25 of 80 in "),
        ({"base": {"warmup_tokens": None, "warmup_frac": 0.05}}, "set warmup_tokens: 128 in the base"),
        ({"base": {"schedule": "cosine"}}, "needs schedule=wsd.*schedule: wsd in the base"),
        ({"sampler": "random", "n_trials": 4, "space": {"lr": {"low": 1e-3, "high": 1e-2}}}, "needs sampler 'grid'"),
    ],
)
def test_what_cannot_be_a_branch_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        plan(**fields)


def test_a_trunk_is_priced_once():
    """80 steps with branches at 10, 20 and 40 take 94 steps in place of 150."""
    setup = PricingSetup(workers=1)
    runs = [planned.config for planned in plan(seeds=3).runs()]
    whole, alone = price_of(runs, setup), [price_of([config], setup) for config in runs]
    assert whole.tokens == 3 * 94 * 32 and sum(one.tokens for one in alone) == 3 * 150 * 32
    assert whole.train_flops == pytest.approx(94 / 150 * sum(one.train_flops for one in alone))
    assert whole.seconds.value < sum(one.seconds.value for one in alone)
    assert price_of(runs, PricingSetup(workers=4)).tokens == 3 * 150 * 32  # of four workers one meets no trunk
    whole_bytes = sum(kind.runs * kind.params_total for kind in whole.kinds)
    assert whole.disk_bytes > 16 * whole_bytes, "a trunk's state, and the record"


def test_a_run_to_come_is_counted_once_though_it_is_another_s_branch():
    tuned = {"tune": {"lr": [1e-3, 2e-3, 4e-3]}, "tuning_seeds": [101], "space": {"train_tokens": [32 * 40, 32 * 80]}}
    runs = plan(**tuned, matched="params_total", branch_at=[0.5]).expected_runs()
    assert len({run.run_id for run in runs}) == len(runs) == 3 * (3 + 1)


SHAPES = {"matched": ["params_blocks", "flops"], "free": ["width", "train_tokens"], "across": "depth"}


def test_a_width_is_solved_for_with_its_heads_and_feed_forward_part():
    """0.33 M parameters in the blocks of 8 layers of width 64: by hand, L (4 d^2 + 3 d d_ff), heads of 16."""
    base = {"d_model": 64, "n_heads": 4, "d_ff": 144, "seq_len": 32, "batch_tokens": 512, "train_tokens": 2**19}
    found = matches(**SHAPES, base=base, space={"n_layers": [8, 4, 16, 32]})
    target = 8 * (4 * 64**2 + 3 * 64 * 144)
    spent = cost(found[0].config).train_flops(2**19)
    for one in found:
        config = one.config
        params = config.n_layers * (4 * config.d_model**2 + 3 * config.d_model * config.d_ff)
        assert params == cost(config).params_blocks == pytest.approx(target, rel=0.01)
        assert config.d_model == 16 * config.n_heads and 1 <= config.d_ff / config.d_model <= 4
        assert cost(config).train_flops(config.train_tokens) == pytest.approx(spent, rel=0.01)
    assert {one.config.n_layers: one.config.d_model for one in found} == {8: 64, 4: 96, 16: 48, 32: 32}


def test_a_width_is_solved_for_with_experts_whose_size_follows_in_steps():
    base = {"d_model": 64, "n_heads": 4, "seq_len": 32, "batch_tokens": 512, "train_tokens": 2**19}
    experts = {"n_experts": 4, "top_k": 2}
    found = matches(**SHAPES, base=base, space={"n_layers": [8, 4]}, variants=[{}, experts])
    target, *others = [cost(one.config).params_blocks for one in found]
    assert others == pytest.approx([target] * 3, rel=0.01)
    assert [one.config.n_experts for one in found] == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"space": {"n_layers": [8, 400]}}, r"no width of heads of 16 channels.*n_layers.*400.*smaller heads"),
        ({"across": None}, r"add across: depth"),
        ({"free": "d_ff"}, r"must be \[params_blocks, flops\], \[width, train_tokens\]"),
        ({"matched": ["flops", "tokens"]}, r"must be \[params_blocks, flops\]"),
        ({"space": {"n_layers": [8, 4], "d_ff": [64, 128]}}, r"d_ff must vary in one place"),
        ({"variants": [{}, {"n_experts": 4, "top_k": 2, "d_expert": 8}]}, r"d_expert must vary in one place"),
    ],
)
def test_a_width_that_cannot_be_solved_for_is_refused(changes, told):
    base = {"d_model": 64, "n_heads": 4, "seq_len": 32, "batch_tokens": 512, "train_tokens": 2**19}
    with pytest.raises(ValueError, match=told):
        matches(**{**SHAPES, "base": base, "space": {"n_layers": [8, 4]}, **changes})
