"""Slips of a first hour: each is told with a fix, and what follows the fix works."""

from pathlib import Path

import pytest
from support.tiny_sweep import sparsedepth

RESULTS = str(Path(__file__).parents[2] / "results" / "quickstart")
COUNT = "select count(*) as n from runs where "
SWEEP = """name: a
question: Is it?
hypothesis: It is.
base: {d_model: 16, n_heads: 2, precision: fp32, train_tokens: 1024000}
space:
  n_layers: [4, 12]
  depth_scale: [none, lns]
"""


def asked(condition):
    return "query", RESULTS, COUNT + condition


SLIPS = {
    "text without quotes": (asked("depth_scale = lns"), "write 'lns'", asked("depth_scale = 'lns'")),
    "text in capitals": (asked("depth_scale = LNS"), "write 'lns'", asked("depth_scale = 'lns'")),
    "text in double quotes": (asked('depth_scale = "lns"'), "write 'lns'", asked("depth_scale = 'lns'")),
    "text of a list": (asked("norm in (pre, post)"), "write 'pre'", asked("norm in ('pre', 'post')")),
    "misspelt column": (asked("val_los < 9"), '"val_loss"', asked("val_loss < 9")),
    "no such folder": (
        ("best", f"{RESULTS[:-1]}"),
        "quickstar' does not exist; did you mean 'quickstart'?",
        ("best", RESULTS),
    ),
    "axis without =": (
        ("plan", "--vary", "n_layers", "4,12"),
        "write --vary n_layers=4,12",
        ("plan", "--vary", "n_layers=4,12"),
    ),
    "field without =": (
        ("plan", "--set", "lr", "1e-3", "--vary", "n_layers=4,12"),
        "write --set lr=1e-3",
        ("plan", "--set", "lr=1e-3", "--vary", "n_layers=4,12"),
    ),
    "range of an axis": (
        ("plan", "--vary", "n_layers=4-12"),
        "list each value: 4, 12",
        ("plan", "--vary", "n_layers=4, 12"),
    ),
    "commas in a number": (
        ("plan", "--vary", "n_layers=4,12", "--set", "train_tokens=1,024,000"),
        "write 1024000",
        ("plan", "--vary", "n_layers=4,12", "--set", "train_tokens=1024000"),
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_with_a_fix_that_works(name):
    slip, fix, fixed = SLIPS[name]
    _, err = sparsedepth(*slip, code=2)
    assert fix in err and err.count("\n") == 1
    out, _ = sparsedepth(*fixed)
    if "select" in fixed[-1]:
        assert int(out.split()[-1]) > 0


def test_sql_stands_before_or_after_the_folder():
    query = asked("true")
    assert sparsedepth(*query) == sparsedepth(query[0], query[2], query[1])


IN_FILES = {
    "one value": ("[4, 12]", "12", "write [12]", "[12]"),
    "range": ("[4, 12]", "4-12", "write [4, 12]", "[4, 12]"),
    "list without brackets": ("[4, 12]", "4, 12", "write [4, 12]", "[4, 12]"),
    "text alone": ("[none, lns]", "lns", "write [lns]", "[lns]"),
    "capitals": ("[none, lns]", "[none, LNS]", "did you mean 'lns'?", "[none, lns]"),
    "another name": ("fp32", "float32", "did you mean 'fp32'?", "fp32"),
    "name of torch": ("fp32", "bfloat16", "did you mean 'bf16'?", "bf16"),
    "commas": (": 1024000", ": '1,024,000'", "write 1024000", ": 1024000"),
    "tab": ("  n_layers", "\tn_layers", "indent with spaces", "  n_layers"),
}


@pytest.mark.parametrize("name", IN_FILES)
def test_a_slip_in_a_definition_is_told_with_a_fix_that_works(name, tmp_path):
    right, slip, fix, fixed = IN_FILES[name]
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP.replace(right, slip))
    _, err = sparsedepth("plan", path, code=2)
    assert fix in err and err.count("\n") == 1
    path.write_text(SWEEP.replace(right, fixed))
    sparsedepth("plan", path)
