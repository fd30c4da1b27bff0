"""Presets against the sizes that the papers state, and how they combine with other fields."""

import pytest
import yaml
from support.tiny_sweep import sparsedepth

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.presets import PRESETS, REMEDIES, expand
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.model.decoder import Decoder

MILLION = 1e6

SIZES = {
    # 2502.05795: the names of its models; 58.07 M, 134.11 M, 247.37 M, 367.97 M and 1339.08 M by arithmetic
    "llama-60m": (58.07, 58.07),
    "llama-130m": (134.11, 134.11),
    "llama-250m": (247.37, 247.37),
    "llama-350m": (367.97, 367.97),
    "llama-1b": (1339.08, 1339.08),
    # OLMo as released: 151.9 and 319.9 M without the table that reads tokens, and all 1176.8 and 6888.1 M of the larger
    # two, by its model cards; ours have the weights of RMSNorm besides. Qwen2.5: 494.03 M with its biases
    "olmo-60m": (85.07, 85.07),
    "olmo-150m": (151.9 + 38.6, 151.9 + 38.6),
    "olmo-300m": (319.9 + 51.5, 319.9 + 51.5),
    "olmo-1b": (1176.8, 1176.8),
    "olmo-7b": (6888.1, 6888.1),
    "qwen2.5-0.5b": (494.03, 494.03),
    # 2603.15389: from the released configs
    "dense-400m": (475, 475),
    "dense-1b-12": (1011, 1011),
    "dense-1b-16": (1280, 1280),
    "dense-1b-24": (1817, 1817),
    "dense-1b-32": (2353, 2353),
    "moe-2b-400m": (1980, 398),
    "moe-7b-1b": (6920, 1280),
    "moe-7b-1b-released": (13_400, 2080),
}
"""Millions of parameters, total and active, as stated to 3 or 4 digits."""


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_papers(name):
    counted = cost(build(RunConfig, {"preset": name}, "test"))
    total, active = SIZES[name]
    assert counted.params_total / MILLION == pytest.approx(total, rel=0.005)
    assert counted.params_active / MILLION == pytest.approx(active, rel=0.005)


def test_budgets_are_whole_steps_of_what_is_stated():
    steps = {name: build(RunConfig, {"preset": name}, "test").n_steps for name in PRESETS}
    assert [steps[f"llama-{size}"] for size in ("130m", "250m", "350m", "1b")] == [20_000, 40_000, 60_000, 100_000]
    assert [steps[f"dense-1b-{depth}"] for depth in (12, 16, 24, 32)] == [19_073] * 4
    assert steps["dense-400m"] == steps["moe-7b-1b"] == 4768
    tokens = {name: build(RunConfig, {"preset": name}, "test").train_tokens for name in ("olmo-7b", "qwen2.5-0.5b")}
    assert tokens == {"olmo-7b": 4768 * 2**22, "qwen2.5-0.5b": 1430 * 2**22}
    config = build(RunConfig, {"preset": "llama-1b"}, "test")
    assert round(config.warmup_frac * config.n_steps) == 1000


def test_a_preset_is_its_fields():
    """The name leaves no trace: a run is recognised however its fields were written."""
    spelt = build(RunConfig, dict(PRESETS["llama-60m"].fields), "test")
    assert build(RunConfig, {"preset": "llama-60m"}, "test").run_id == spelt.run_id
    assert "preset" not in spelt.model_dump()


def test_presets_in_a_sweep():
    fields = {"name": "a", "question": "b?", "hypothesis": "c", "base": {"preset": "dense-1b-16", "lr": 4e-4}}
    sweep = build(SweepDefinition, {**fields, "space": {"n_layers": [12, 32]}}, "test")
    runs = [sweep.run_config(cell, 0) for cell in sweep.grid()]
    assert [(run.n_layers, run.d_model, run.lr) for run in runs] == [(12, 2048, 4e-4), (32, 2048, 4e-4)]


def test_an_unknown_preset_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"run\.yaml: preset='llama-130' is not known; did you mean 'llama-130m'"):
        build(RunConfig, {"preset": "llama-130"}, "run.yaml")
    with pytest.raises(ValueError, match="known presets: llama-60m, "):
        expand({"preset": "?"})


def test_the_command_line_lists_them_and_prints_one_as_a_run_file(tmp_path):
    out, _ = sparsedepth("presets")
    assert all(name in out for name in PRESETS) and "58073600" in out and "2603.15389" in out
    lr = {line.split()[0]: line.split()[6] for line in out.splitlines() if line.startswith(tuple(PRESETS))}
    assert [lr[name] for name in ("llama-60m", "olmo-7b", "dense-400m")] == ["0.001000", "-", "0.001000"]
    out, _ = sparsedepth("presets", "moe-7b-1b-released")
    assert "13.4 B" in out.splitlines()[1]
    assert build(RunConfig, yaml.safe_load(out), "test") == build(RunConfig, {"preset": "moe-7b-1b-released"}, "test")
    _, err = sparsedepth("presets", "moe-7b", code=2)
    choice = "choose one of: moe-7b-1b, moe-7b-1b-released"
    assert err == f"sparsedepth: error: preset='moe-7b' is not known; {choice}\n"
    _, err = sparsedepth("presets", "llama-60m", "--format", "csv", code=2)
    assert "--format csv is for the list" in err


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_goes_on_any_model_and_overrides_no_field_of_the_base(name):
    base = {"n_layers": 4, "d_model": 32, "n_heads": 2, "seq_len": 32, "sliding_window": 8, "train_tokens": 8192}
    given = {"name": "s", "question": "q", "hypothesis": "h", "base": base, "variants": [{}, {"preset": name}]}
    plain, remedied = (build(SweepDefinition, given, "s").run_config(cell, 0) for cell in
                       build(SweepDefinition, given, "s").grid())  # fmt: skip
    changed = {field for field in RunConfig.model_fields if getattr(plain, field) != getattr(remedied, field)}
    assert changed == {*REMEDIES[name].fields} and REMEDIES[name].source


def test_nanochats_scalars_start_as_its_code_sets_them():
    """1.15 - 0.10 i / (n - 1) and 0.20 - 0.15 i / (n - 1)."""
    model = Decoder(build(RunConfig, {"preset": "nanochat-scalars", "n_layers": 3, "d_model": 16}, "test"))
    assert [block.stream_scalar.item() for block in model.blocks] == pytest.approx([1.15, 1.10, 1.05])
    assert [block.first_scalar.item() for block in model.blocks] == pytest.approx([0.2, 0.125, 0.05])
