"""Slips of a first hour: each is told with a fix, and what follows the fix works."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.tiny_sweep import sparsedepth

from sparsedepth.cli import main
from sparsedepth.config.sweep import DEFINITION
from sparsedepth.store import packs
from sparsedepth.store.connection import open_store

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
SPACE = SWEEP[SWEEP.index("space") :].strip()


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
        f"quickstar' does not exist; did you mean '{RESULTS}'?",
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
        "one value; several go under 'space' of a sweep, as [4, 12], or in --vary",
        ("plan", "--vary", "n_layers=4, 12"),
    ),
    "quote in a text": (asked("depth_scale = 'it's'"), "as two quotes: 'it''s'", asked("depth_scale <> 'it''s'")),
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
    "list in a mapping": (
        SPACE,
        "space: {n_layers: 4, 12, depth_scale: [none, lns]}",
        "n_layers: 4, 12 must be a list: write [4, 12]",
        "space: {n_layers: [4, 12], depth_scale: [none, lns]}",
    ),
    "colon": ("Is it?", "what: is it?", "put the text in quotes", "'what: is it?'"),
    "bracket": ("Is it?", "[is it\nbase: {}", "put the text in quotes", "'[is it'"),
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


def test_all_mistakes_are_told_at_once(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP.replace("hypothesis: It is.\n", "").replace("d_model", "d_modle"))
    _, err = sparsedepth("plan", path, code=2)
    assert "hypothesis is missing" in err and "'d_modle' (value 16); did you mean 'd_model'" in err


def test_experts_take_one_message(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP.replace("[none, lns]", "[none]") + "variants: [{}, {n_experts: 8}]\n")
    _, err = sparsedepth("plan", path, code=2)
    assert "needs top_k, from 1 to 8; with top_k=1 also renormalise_gates=false" in err
    path.write_text(path.read_text().replace("n_experts: 8", "n_experts: 8, top_k: 1, renormalise_gates: false"))
    sparsedepth("plan", path)


TABLE = "variant,seed,val_loss,tokens\nbase,0,3.1,8\nbase,1,3.2,8\nnew,0,3.0,8\nnew,1,3.1,8\n"
OF_A_FILE = {
    "separator": ("judge", "t.csv", TABLE.replace(",", ";"), "the separator seems to be ';'; save it with commas"),
    "empty field": ("judge", "t.csv", TABLE.replace("new,1,3.1,8", "new,1,3.1,"), "row 4 (line 5) has no tokens; fill"),
    "a table to plan": ("plan", "t.csv", TABLE, "this is a table: sparsedepth judge "),
}


@pytest.mark.parametrize("name", OF_A_FILE)
def test_a_slip_with_a_table_is_told_with_the_fix(name, tmp_path):
    command, file, content, fix = OF_A_FILE[name]
    (tmp_path / file).write_text(content)
    assert fix in sparsedepth(command, tmp_path / file, code=2)[1]


def test_slips_in_commands_of_a_sweep_name_what_is_meant(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    assert f"did you mean --out {tmp_path}/results? Try" in sparsedepth("sweep", path, tmp_path / "results", code=2)[1]
    assert "did you mean" not in sparsedepth("sweep", path, "--set", "lr=1", code=2)[1]
    path.rename(tmp_path / DEFINITION)
    assert "is not on Slurm: press Ctrl-C where its sweep runs" in sparsedepth("stop", tmp_path, code=2)[1]
    log = tmp_path / "work" / "0123456789ab" / "log.txt"
    log.parent.mkdir(parents=True)
    log.touch()
    assert "matches: none; `sparsedepth logs DIR` lists them" in sparsedepth("logs", tmp_path, "zzz", code=2)[1]


def test_a_folder_that_vanishes_is_left_out_and_other_trees_are_not_searched(tmp_path, monkeypatch):
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "gone").mkdir()
    seen, scan = [], os.scandir
    monkeypatch.setattr("os.scandir", lambda folder: [seen.append(Path(folder).name), scan(folder)][1])
    complete = packs.is_complete
    monkeypatch.setattr(
        packs, "is_complete", lambda folder: (folder.name == "gone" and folder.rmdir()) or complete(folder)
    )
    assert packs.find_runs([tmp_path]) == []
    assert seen == [tmp_path.name, "a", "gone"]


def test_ctrl_c_ends_a_query_at_once_and_the_store_answers_on():
    """DuckDB alone noticed it in three of four tries, and else went on to the time limit."""
    with open_store(RESULTS) as store:
        for seconds in (0.05, 0.1, 0.2):
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()
                store.sql("select sum(sqrt(a.range * b.range)) from range(1000000) a, range(100000) b")
            assert time.monotonic() - began < 10
        assert store.sql("select 7").rows == ((7,),)


class Interrupted:
    @staticmethod
    def main(**given):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "said"),
    [("query", "interrupted\n"), ("recipe", "interrupted\n"), ("sweep", "interrupted; run the same ")],
)
def test_only_what_can_be_resumed_says_so_when_interrupted(command, said, monkeypatch, capsys):
    monkeypatch.setattr("typer.main.get_command", lambda app: Interrupted)
    with pytest.raises(SystemExit) as ended:
        main.run([command])
    assert ended.value.code == 130 and capsys.readouterr().err.startswith(f"sparsedepth: error: {said}")
