"""Matched sizes, with answers worked out by hand."""

import pytest

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.budgets import amount, match, summary
from sparsedepth.plan.tasks import Plan

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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"matched": "flops", "space": {"n_kv_heads": [4, 1]}}, "name a size to solve for"),
        ({"matched": "flops", "free": "d_expert", "space": {"n_kv_heads": [4, 1]}}, "name a size to solve for"),
        ({"matched": "params_total", "free": "d_ff", "space": {"vocab_size": [264, 9999]}}, "tolerance 1.0%"),
        ({"matched": "flops", "free": "d_ff", "tolerance": 1e-6, "space": {"seq_len": [32, 64]}}, "at the best d_ff"),
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
    definition = sweep(matched="flops", free="d_ff", space={"n_layers": [2], "seq_len": [32, 64]}, tolerance=0.05)
    found = Plan(definition)
    assert found.notes() == summary(definition, found.matches)
    head, line = found.notes()
    assert head.startswith("matched in flops: sizes of 1 cells, largest mismatch ")
    assert line.startswith("  n_layers=2, seq_len=64: d_ff=")
    assert Plan(sweep()).notes() == []


def test_an_objective_that_is_relative_to_the_loss_is_noted_with_its_absolute_form():
    search = {"sampler": "nsga2", "n_trials": 12, "space": {"n_layers": [2, 4]}}
    (note,) = Plan(sweep(objectives=["val_loss", "usefulness"], **search)).notes()
    assert note.startswith("objective usefulness is relative to the loss") and "affine_loss_added" in note
    assert Plan(sweep(objectives=["val_loss", "affine_loss_added"], **search)).notes() == []


@pytest.mark.parametrize(("sampler", "first"), [("tpe", 10), ("nsga2", 8)])
def test_a_search_that_ends_before_it_learns_is_noted(sampler, first):
    def notes(n_trials):
        return Plan(sweep(sampler=sampler, n_trials=n_trials, space={"n_layers": [2, 4]})).notes()

    assert f"draws its first {first} proposals at random" in " ".join(notes(first))
    assert notes(first + 1) == []


@pytest.mark.parametrize("search", [{}, {"sampler": "tpe", "n_trials": 11, "space": {"n_layers": [2, 4]}}])
@pytest.mark.parametrize(("tokenizer", "tokens"), [("byte", 257), ("bpe:300", 300)])
def test_a_vocabulary_below_the_tokenizers_is_refused_before_any_run(tokenizer, tokens, search):
    fields = {"corpus": "stdlib", "tokenizer": tokenizer}
    Plan(sweep(base={**fields, "vocab_size": tokens}, **search))
    with pytest.raises(ValueError, match=f"has {tokens} tokens and the model vocab_size={tokens - 1}"):
        Plan(sweep(base={**fields, "vocab_size": tokens - 1}, **search))


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
    ],
)
def test_what_cannot_be_matched_across_depths_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        matches(**fields)
