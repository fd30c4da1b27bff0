"""Sweep definitions: cells, scales, and what is refused."""

import pytest

from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition

WORDS = {"name": "s", "question": "q", "hypothesis": "h"}


def sweep(**fields) -> SweepDefinition:
    return build(SweepDefinition, {**WORDS, **fields}, "s.yaml")


def test_cells_are_variants_crossed_with_the_space():
    definition = sweep(
        space={"n_layers": [2, 3]}, variants=[{}, {"n_experts": 2, "top_k": 1}], base={"d_model": 16, "n_heads": 2}
    )
    assert list(definition.grid()) == [
        {"n_layers": 2},
        {"n_layers": 3},
        {"n_experts": 2, "top_k": 1, "n_layers": 2},
        {"n_experts": 2, "top_k": 1, "n_layers": 3},
    ]
    run = definition.run_config({"n_layers": 3}, seed=7)
    assert (run.d_model, run.n_layers, run.seed) == (16, 3, 7)


def test_a_scale_lays_over_base_and_replaces_the_rest():
    definition = sweep(
        base={"d_model": 64, "lr": 0.1, "max_corpus_tokens": 5},
        space={"n_layers": [12, 32]},
        seeds=[0, 1, 2],
        scales={"micro": {"base": {"d_model": 16, "max_corpus_tokens": None}, "space": {"n_layers": [2]}}},
    )
    micro = definition.scaled("micro")
    assert micro.name == "s-micro" and micro.seeds == [0, 1, 2]
    assert micro.base == {"d_model": 16, "lr": 0.1, "max_corpus_tokens": None}
    assert list(micro.grid()) == [{"n_layers": 2}]
    assert definition.scaled(None) is definition
    with pytest.raises(ValueError, match="no scale 'huge'; it has: micro"):
        definition.scaled("huge")


def test_the_base_can_be_changed_but_not_what_varies():
    definition = sweep(base={"lr": 0.1}, space={"n_layers": [2]}, variants=[{}, {"n_kv_heads": 1}])
    assert definition.with_base({"lr": 0.2, "d_model": 32}).base == {"lr": 0.2, "d_model": 32}
    with pytest.raises(ValueError, match="seed is a replicate"):
        definition.with_base({"seed": 3})
    for name in ("n_layers", "n_kv_heads"):
        with pytest.raises(ValueError, match=f"varies {name}"):
            definition.with_base({name: 1})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"space": {"n_layer": [1]}}, "did you mean 'n_layers'"),
        ({"space": {"seed": [1]}}, "seed is a replicate"),
        ({"space": {"n_layers": []}}, "space.n_layers"),
        ({"base": {"seed": 1}}, "seed is a replicate"),
        ({"seeds": [1, 1]}, "seed twice"),
        ({"seeds": []}, "seeds"),
        ({"sampler": "tpe", "space": {"lr": {"low": 1e-4, "high": 1e-2}}}, "needs n_trials"),
        ({"n_trials": 3}, "no meaning with sampler 'grid'"),
        ({"space": {"lr": {"low": 1e-4, "high": 1e-2}}}, "needs a list of values"),
        ({"sampler": "tpe", "n_trials": 2, "space": {"lr": {"low": 2, "high": 1}}}, "low < high"),
        ({"sampler": "tpe", "n_trials": 2, "space": {"lr": [1.0]}, "variants": [{}, {"lr": 1.0}]}, "variants belong"),
        ({"name": "../escape"}, "name="),
        ({"sampler": "magic"}, "sampler='magic'"),
    ],
)
def test_mistakes(fields, words):
    with pytest.raises(ValueError) as caught:
        sweep(**fields)
    assert words in str(caught.value) and "\n" not in str(caught.value)
