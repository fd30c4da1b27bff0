"""Toy definitions: what can be said is built, what cannot is one line that names the fix."""

from pathlib import Path

import pytest

from sparsedepth.config.load import build, read_yaml
from sparsedepth.toy.config import ToyConfig, ToyDefinition

FILE = Path(__file__).parents[2] / "sweeps" / "toy.yaml"
WORDS = {"name": "a", "question": "b", "hypothesis": "c"}


def definition(**fields) -> ToyDefinition:
    return build(ToyDefinition, {**WORDS, "n_layers": [2, 3], **fields}, "test")


def test_the_committed_definition_is_the_papers_setting():
    written = build(ToyDefinition, read_yaml(FILE), str(FILE))
    groups = written.groups()
    assert {(g.d_model, g.width_ff, g.vocab_size, g.teacher_layers, g.batch_size) for g in groups} == {
        (32, 128, 128, 128, 1024)
    }
    kl = [g for g in groups if g.target == "kl"]
    assert [g.n_layers for g in kl] == [6, 12, 16, 24, 32, 48]
    assert all(g.n_students == 2 * 3 * 16 and g.learning_rate(39_999) == 6e-4 for g in kl)
    midpoint = [g for g in groups if g.integrator == "midpoint"]
    assert [g.n_blocks for g in midpoint] == [6, 12, 16, 24, 32, 48]
    assert midpoint[0].learning_rate(0) == pytest.approx(6e-4 * 2 / 3**0.5)
    assert len(written.scaled("micro").groups()) == 13


def test_groups_are_variants_by_depth():
    groups = definition(variants=[{"target": "mse"}, {"rho": [1], "n_layers": [5]}]).groups()
    assert [(g.target, g.n_layers, g.rho) for g in groups] == [
        ("mse", 2, (0.0,)),
        ("mse", 3, (0.0,)),
        ("kl", 5, (1.0,)),
    ]


def test_scales_and_changes_lie_over_the_base():
    one = definition(base={"lr": 0.1, "n_steps": 5}, scales={"micro": {"n_layers": [4], "base": {"n_steps": 2}}})
    (group,) = one.scaled("micro").groups()
    assert (group.n_layers, group.lr, group.n_steps) == (4, 0.1, 2)
    changed = one.with_changes({"n_steps": 9, "n_layers": [7]}).groups()
    assert [(group.n_layers, group.n_steps, group.lr) for group in changed] == [(7, 9, 0.1)]


def test_the_id_names_the_result():
    assert ToyConfig().run_id == ToyConfig(n_steps=40_000).run_id != ToyConfig(n_steps=41_000).run_id


def test_flops_by_hand():
    config = ToyConfig(
        d_model=2, d_ff=3, n_layers=5, integrator="midpoint", teacher_layers=7, batch_size=11, n_steps=13
    )
    # a block multiplies 2 x 3 and 3 x 2: 24 FLOP; 3 students of 10 blocks, three times; 3 teachers of 7 blocks
    assert config.flops == 24 * (3 * 3 * 10 + 3 * 7) * 11 * 13


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"base": {"n_layers": 3}}, "list the depths under 'n_layers'"),
        ({"base": {"temprature": [1]}}, "did you mean 'temperature'"),
        ({"base": {"rho": [1.5]}}, "less than or equal to 1"),
        ({"base": {"temperature": [0]}}, "greater than 0"),
        ({"base": {"seed": [1, 1]}}, "contains a value twice"),
        ({"base": {"target": "mse", "temperature": [0.1]}}, "no effect on target mse"),
        ({"base": {"integrator": "rk4"}}, "'euler' or 'midpoint'"),
        ({"variants": [{}, {}]}, "holds a group twice"),
        ({"variants": [{"n_layers": 3}]}, "must be a list of depths"),
        ({"n_layers": []}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        definition(**fields)


def test_other_wrong_requests():
    with pytest.raises(ValueError, match="no scale 'big'; it has: none"):
        definition().scaled("big")
    with pytest.raises(ValueError, match="variants of 'a' set target"):
        definition(variants=[{"target": "mse"}]).with_changes({"target": "kl"})
