"""Fair sweeps end to end, from the command line, with real runs: tuned and matched, and without a file."""

import re
from pathlib import Path

import pytest
import yaml
from support.tiny_sweep import BASE, corpus, definition, sparsedepth, table

from sparsedepth.cli.input_file import sweep_definition
from sparsedepth.config.run import RunConfig
from sparsedepth.store.connection import open_store


def test_a_tuned_and_matched_sweep(tmp_path):
    """lr is tuned with seed 9 of each configuration; the results run at its best, which `best` alone ranks."""
    results = tmp_path / "results"
    fields = {"base": {"train_tokens": 128 * 10, "measures": ["loss"]}, "space": {"n_layers": [1]}}
    fields |= {"matched": "params_total", "free": "d_ff", "tolerance": 0.05, "variants": [{}, {"n_kv_heads": 1}]}
    path = definition(tmp_path, **fields, tune={"lr": [1e-3, 3e-3, 9e-3]}, tuning_seeds=[9])
    out, _ = sparsedepth("sweep", path, "--out", results, "--workers", 2)
    assert "matched in params_total: sizes of 1 cell" in out and "n_kv_heads=1, n_layers=1: d_ff=56 (+1.08%)" in out
    with open_store(results) as store:
        rows = store.sql("select n_kv_heads, d_ff, lr, seed, tuning from runs order by all").rows
    for heads, width in ((1, 56), (2, 48)):
        mine = [(lr, seed, role) for n, d_ff, lr, seed, role in rows if (n, d_ff) == (heads, width)]
        tried = {lr for lr, seed, _ in mine if seed == 9}
        assert tried >= {1e-3, 3e-3, 9e-3} and len(tried) <= 4
        (best,) = {lr for lr, seed, _ in mine if seed == 1}
        assert {role for lr, _, role in mine if lr != best} == {"rejected"}
        role = "edge" if best in (min(tried), max(tried)) else "best"
        assert {seed: role for lr, seed, role in mine if lr == best} == {0: role, 1: role, 9: "tuning"}
    assert "2 configurations, 4 runs" in out


def test_a_sweep_without_a_file(tmp_path):
    fields = {"corpus": str(corpus(tmp_path)), "train_tokens": 128 * 5, "n_layers": 7, "measures": ["loss"]}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**BASE, **fields}))
    arguments = ("sweep", "--vary", "n_layers=1,2", "--base", tmp_path / "base.yaml", "--set", "lr=1e-2")
    arguments += ("--seeds", "1", "--out", tmp_path / "results", "--workers", "1")
    out, _ = sparsedepth(*arguments)
    assert "ad-hoc: What does n_layers change?" in out and "2 runs into" in out
    written = yaml.safe_load((tmp_path / "results" / "sweep.yaml").read_text())
    assert written["space"] == {"n_layers": [1, 2]} and written["base"]["lr"] == 0.01
    configs = {**written["base"], "seed": 0}
    assert set(table(tmp_path / "results")) == {RunConfig(**configs, n_layers=n).run_id for n in (1, 2)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a definition file, or --vary"),
        ({"file": Path("x.yaml"), "vary": ["lr=1"]}, "define a sweep without a file"),
        ({"file": Path("x.yaml"), "seeds": 2}, "define a sweep without a file"),
        ({"file": Path("x.yaml")}, "x.yaml does not exist"),
        ({"vary": ["lr"]}, "must have the form key=value,value"),
        ({"vary": ["lr=1", "lr=2"]}, "given twice"),
        ({"vary": ["lr=1e-3"], "settings": ["lr=1e-3"]}, "--vary already sets lr"),
        ({"vary": ["lr=1e-3"], "scale": "micro"}, "give the file"),
        ({"vary": ["learning_rate=1"]}, "unknown key 'learning_rate'"),
        ({"vary": ["lr=1]"]}, "is not plain YAML"),
    ],
)
def test_what_makes_no_sweep_is_one_clear_line(options, words):
    with pytest.raises(ValueError, match="(?s).*" + re.escape(words)) as caught:
        sweep_definition(**{"file": None, **options})
    assert "\n" not in str(caught.value)
