"""The definitions in sparsedepth/examples/: each states its question, and everything that it can emit can be built."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Interval
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.tasks import Plan, check_objective
from sparsedepth.store.packs import open_pack

FILES = sorted(path for path in (Path(__file__).parent.parent.parent / "sparsedepth/examples").glob("*.yaml"))
CASES = [(path, scale) for path in FILES for scale in (None, *build(SweepDefinition, read_yaml(path), "x").scales)]

pytestmark = pytest.mark.filterwarnings("ignore:depth_scale='lns' with init='scaled'")


def load(path: Path, scale: str | None) -> SweepDefinition:
    return build(SweepDefinition, read_yaml(path), str(path)).scaled(scale)


def configs(definition: SweepDefinition) -> list[RunConfig]:
    """Every configuration that the definition can emit, up to the inside of a range: its two ends stand for it."""
    if not definition.adaptive:
        return [planned.config for planned in Plan(definition).runs()]
    Plan(definition)
    ends = {
        name: [axis.low, axis.high] if isinstance(axis, Interval) else axis for name, axis in definition.space.items()
    }
    values = definition.model_dump(exclude_unset=True) | {"space": ends, "sampler": "grid"}
    for name in ("n_trials", "prune"):
        values.pop(name, None)
    return configs(build(SweepDefinition, values, "ends"))


BUILT: dict[str, int] = {}
"""Fields of a model -> parameters; definitions and scales share many models."""


def built_parameters(config: RunConfig) -> int:
    fields = config.model_dump_json(include=set(ModelConfig.model_fields))
    if fields not in BUILT:
        with torch.device("meta"):
            BUILT[fields] = sum(weight.numel() for weight in Decoder(config).parameters())
    return BUILT[fields]


def test_one_definition_for_each_question():
    by_question = {load(path, None).question: path.stem for path in FILES}
    assert len(by_question) == len(FILES) >= 19, sorted({path.stem for path in FILES} - {*by_question.values()})


@pytest.mark.parametrize(("path", "scale"), CASES, ids=lambda case: case.stem if isinstance(case, Path) else case)
def test_everything_it_emits_can_be_built(path, scale):
    definition = load(path, scale)
    assert definition.question and definition.hypothesis
    n_runs = len(Plan(definition).expected_runs())
    assert int(definition.cost.split()[0]) in (n_runs, n_runs / (1 + len(definition.branch_at))), definition.cost
    assert definition.name == path.stem + (f"-{scale}" if scale else "")
    check_objective(definition)
    same = {"seed": 0, "lr": 1e-3, "weight_decay": 0.1}
    shapes = {config.model_copy(update=same).run_id: config for config in configs(definition)}
    assert shapes
    deep = max(shapes.values(), key=lambda config: config.n_layers)
    for config in [deep, *_shallowest(shapes.values())]:
        assert built_parameters(config) == cost(config).params_total


def test_the_page_on_remedies_counts_those_of_its_scale():
    (hour,) = (load(path, "hour") for path in FILES if path.stem == "depth_knobs")
    page = (FILES[0].parents[2] / "docs/depth-knobs.md").read_text()
    assert f"`hour` of today has {len(hour.variants) - 1} of them ({hour.cost.partition(' of ')[0]})" in page


def _shallowest(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """Of the configurations that differ in depth alone, the first: depth repeats the layers."""
    first = sorted(configs, key=lambda config: -config.n_layers)
    return [*{config.model_copy(update={"n_layers": 1}).run_id: config for config in first}.values()]


@pytest.mark.parametrize("scale", [None, "micro"])
def test_the_dense_twins_of_moe_match(scale):
    """In active parameters and in all, within 1%: the router is the difference."""
    definition = load(next(path for path in FILES if path.stem == "moe"), scale)
    for depth in {config.n_layers for config in configs(definition)}:
        first = definition.tune["lr"][0]
        alike = {"n_layers": depth, "lr": first, "seed": definition.tuning_seeds[0]}
        runs = [config for config in configs(definition) if alike.items() <= config.model_dump().items()]
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


AT_ONE_LR = ("quickstart", "known_depth")
"""The first sweep of a few minutes; scores on trial."""
REPLICATIONS = ("fresh_seeds", "fourfold")
"""These, `trial` and `trial_`: each variant or cell at the lr that an earlier sweep chose."""


def test_what_is_compared_is_tuned_but_for_the_definitions_at_one_lr():
    for path in FILES:
        for scale in (None, *load(path, None).scales):
            definition = load(path, scale)
            if (scale or "").partition("_")[0] == "trial" or scale in REPLICATIONS or path.stem == "lr_transfer_beyond":
                assert all("lr" in one for one in (definition.cells or definition.zip or definition.variants))
                continue
            searched = {**definition.space, **definition.tune}
            assert ("lr" in searched) == (path.stem not in AT_ONE_LR)
            if path.stem not in AT_ONE_LR:  # an interval, or at least three values
                assert isinstance(searched["lr"], Interval) or len(set(searched["lr"])) >= 3, (path, scale)
            assert not definition.tune or (len(definition.tuning_seeds) > 1 and not definition.reuse_tuning_seeds)


@pytest.mark.parametrize("scale", [None, "micro"])
def test_key_value_heads_at_equal_flops(scale):
    """The feed-forward is solved for, to 1% within each depth."""
    definition = load(next(path for path in FILES if path.stem == "gqa_flops"), scale)
    found = Plan(definition).matches
    assert len(found) == 6 and sum(one.free == "d_ff" for one in found) == 4
    for one in found:
        runs = [other.config for other in found if other.config.n_layers == one.config.n_layers]
        spent = [cost(run).flops_per_token for run in runs]
        assert max(spent) <= 1.01 * min(spent) and len({run.d_ff for run in runs}) == 3


def test_the_quickstart_keeps_its_runs():
    """The committed results are the definition's, run by run."""
    definition = load(next(path for path in FILES if path.stem == "quickstart"), None)
    committed = open_pack(FILES[0].parents[2] / "results" / "quickstart").run_ids
    assert {config.run_id for config in configs(definition)} == committed
