"""The definitions in sweeps/: each states its question, and everything that it can emit can be built."""

from pathlib import Path

import pytest
import torch

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import Interval, SweepDefinition
from sparsedepth.model.cost import cost
from sparsedepth.model.decoder import Decoder
from sparsedepth.sweep.plan import check_objective, items

FILES = sorted((Path(__file__).parent.parent.parent / "sweeps").glob("*.yaml"))
CASES = [(path, scale) for path in FILES for scale in (None, *build(SweepDefinition, read_yaml(path), "x").scales)]

pytestmark = pytest.mark.filterwarnings("ignore:depth_scale='lns' with init='scaled'")


def load(path: Path, scale: str | None) -> SweepDefinition:
    return build(SweepDefinition, read_yaml(path), str(path)).scaled(scale)


def configs(definition: SweepDefinition) -> list[RunConfig]:
    """Every configuration that the definition can emit, up to the inside of a range: its two ends stand for it."""
    if definition.sampler == "grid":
        return [run for item in items(definition) for run in item.runs(definition)]
    ends = {
        name: [axis.low, axis.high] if isinstance(axis, Interval) else axis for name, axis in definition.space.items()
    }
    values = definition.model_dump(exclude_unset=True) | {"space": ends, "sampler": "grid"}
    values.pop("n_trials")
    return configs(build(SweepDefinition, values, "ends"))


def test_one_definition_for_each_question():
    names = {path.stem for path in FILES}
    assert names == {"quickstart", "depth", "weight_decay", "seq_len", "gqa", "moe", "lns", "recipe_ladder", "search"}


@pytest.mark.parametrize(("path", "scale"), CASES, ids=lambda case: case.stem if isinstance(case, Path) else case)
def test_everything_it_emits_can_be_built(path, scale):
    definition = load(path, scale)
    assert definition.question and definition.hypothesis and definition.cost
    assert definition.name == path.stem + (f"-{scale}" if scale else "")
    check_objective(definition)
    shapes = {config.model_copy(update={"seed": 0}).run_id: config for config in configs(definition)}
    assert shapes
    for config in shapes.values():
        with torch.device("meta"):
            model = Decoder(config)
        assert sum(p.numel() for p in model.parameters()) == cost(config).params_total


@pytest.mark.parametrize("scale", [None, "micro"])
def test_the_dense_twins_of_moe_match(scale):
    """In active parameters and in all, within 1%: the router is the difference."""
    definition = load(next(path for path in FILES if path.stem == "moe"), scale)
    for depth in {config.n_layers for config in configs(definition)}:
        runs = [config for config in configs(definition) if config.n_layers == depth and config.seed == 0]
        dense, wide = sorted((c for c in runs if not c.n_experts), key=lambda c: c.d_ff or 0)
        routed, raw = (c for c in runs if c.n_experts)
        assert cost(routed) == cost(raw)
        assert cost(dense).params_active == pytest.approx(cost(routed).params_active, rel=0.01)
        assert cost(wide).params_total == pytest.approx(cost(routed).params_total, rel=0.01)


def test_sequence_lengths_read_the_same_text_in_the_same_step():
    for scale in (None, "micro"):
        runs = configs(load(next(path for path in FILES if path.stem == "seq_len"), scale))
        assert len({(run.batch_tokens, run.chunk_len, run.eval_seq_len) for run in runs}) == 1
        assert len({run.seq_len for run in runs}) >= 4
