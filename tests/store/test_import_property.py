"""Any table of others is a first-class results folder: every command answers it or says in a line why not, and its
values are those of the table, whatever subset of the optional fields it states and whatever its names are. So is a
folder of runs that lack measures, all of them or some."""

import math
import random

import pandas as pd
import pytest
import yaml
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.quantities import QUANTITIES
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.quantities.quantity import Quantity
from sparsedepth.store.connection import open_store
from sparsedepth.store.import_table import import_table

OPTIONAL = ("d_model", "n_heads", "lr", "seed", "train_tokens", "params_total", "norm", "weight_decay", "train_flops",
            "usefulness", "seq_len", "outcome", "seconds", "device")  # fmt: skip
NAMES = ("{}", "{} ", "my {}", "{}.x", "{} (all)", "größe_{}", "1{}", "select {}", "{}\u2009", 'a"{}"')
FOLDERS = ("plain", "a b", "runs[1]", "lr=0.1", "ä'", "{x}")
QUICK = ("best", "effects")
ALL = (*QUICK, "status", "recipe", "query --ask variance", "query --ask depth",
       "plot --figure all -o {out}/figures", "report -o {out}/page.html")  # fmt: skip


def value(draw: random.Random, field: str, depth: int, seed: int):
    width = 8 * (1 + seed % 2)
    return {
        "d_model": width, "n_heads": 2, "lr": draw.choice([1e-3, 2e-3]), "seed": seed,
        "train_tokens": 1000 * (1 + seed % 3),
        "params_total": 1000 * depth, "norm": draw.choice(["pre", "post"]), "weight_decay": 0.1 * (seed % 2),
        "train_flops": 1e9 * depth, "usefulness": draw.choice([0.25, math.nan]), "seq_len": 32,
        "outcome": "diverged" if draw.random() < 0.1 else "ok", "seconds": 1.5 * depth, "device": "cpu",
        "n_layers": depth, "val_loss": 3 - depth / 10 + seed / 100 + draw.random() / 1000,
    }[field]  # fmt: skip


def made_up(number: int, folder) -> tuple[pd.DataFrame, dict[str, str]]:
    """A table with a map, and the table's values by field."""
    draw = random.Random(number)
    fields = ["n_layers", "val_loss", *(name for name in OPTIONAL if draw.random() < 0.5)]
    rows = [(depth, seed) for depth in draw.choice([(2,), (2, 4), (2, 4, 8)]) for seed in range(draw.choice([1, 2, 4]))]
    table = pd.DataFrame([{name: value(draw, name, *row) for name in fields} for row in rows])
    names = {name: draw.choice(NAMES).format(name) for name in fields}
    table["cluster"] = [f"run {number}" for number in range(len(table))]  # tells equal rows apart
    names["cluster"] = draw.choice(NAMES).format("id")
    path = folder / draw.choice(FOLDERS) / f"t.{draw.choice(['csv', 'tsv', 'json', 'jsonl', 'parquet'])}"
    path.parent.mkdir()
    theirs = table.assign(**{"": math.nan} if draw.random() < 0.3 and path.suffix in (".csv", ".tsv") else {})
    theirs = theirs.rename(columns=names)
    if path.suffix == ".parquet":
        theirs.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        theirs.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    else:
        theirs.to_json(path, orient="records", lines=path.suffix == ".jsonl", double_precision=15)
    entries = {name: {"of": own.strip(), "optional": True} for name, own in names.items() if name != "cluster"}
    entries |= {name: {**entries[name], "optional": False} for name in ("n_layers", "val_loss")}
    (folder / "map.yaml").write_text(
        yaml.safe_dump({"source": "x", "fields": entries, "cluster": names["cluster"].strip()}, allow_unicode=True)
    )
    return table, path


def check(number: int, folder, command, asked: tuple[str, ...]) -> None:
    table, path = made_up(number, folder)
    out = folder / "theirs"
    import_table(path, folder / "map.yaml", out)
    with open_store(out) as store:
        runs = store.frame("select * from runs order by n_layers, val_loss")
    wanted = table.sort_values(["n_layers", "val_loss"], ignore_index=True)
    assert len(runs) == len(wanted), number
    for name in table:
        found, expected = runs[name], wanted[name]
        if expected.dtype.kind in "if":
            assert found.astype(float).tolist() == pytest.approx(expected.astype(float).tolist(), nan_ok=True), name
        else:
            assert found.tolist() == expected.tolist(), name
    for name in set(OPTIONAL) - set(table) - {"outcome"}:
        assert runs[name].isna().all(), name
    ask(number, out, command, asked)


def ask(number: int, out, command, asked: tuple[str, ...]) -> None:
    for text in asked:
        first, *rest = text.format(out=out.parent).split()
        said, error, code = command(first, out, *rest)
        assert code in (0, 2), (number, text, error)
        last = error.splitlines()[-1] if error else ""  # after progress
        assert code == 0 or last.startswith("sparsedepth: error: "), (number, text, error)
        assert "Traceback" not in error and "nan" not in said.lower().split(), (number, text, said)


def number_of(draw: random.Random, quantity: Quantity):
    least, most = quantity.range
    value = draw.uniform(max(least, -1.0), min(most, 4.0))
    return round(abs(value) + 1) if quantity.type == "BIGINT" else value


def runs_that_lack_measures(number: int, folder) -> dict[str, dict]:
    """Runs of a grid, each with the numbers of some measures: the same, or its own; and their summaries by run."""
    draw, made = random.Random(number), {}
    known = [measure.name for measure in MEASURES if not measure.on_request]
    common = draw.sample(known, draw.randrange(1, len(known)))
    has_layers = draw.random() < 0.5
    for depth in draw.choice([(2,), (2, 4), (2, 4, 8)]):
        for setting in draw.choice([({},), ({}, {"depth_scale": "lns"}), ({}, {"n_kv_heads": 1}, {"norm": "peri"})]):
            for seed in range(draw.choice([1, 2, 3])):
                mine = draw.sample(common, draw.randrange(1, len(common) + 1)) if draw.random() < 0.3 else common
                config = RunConfig(n_layers=depth, seed=seed, n_heads=2, measures=tuple(mine), **setting)
                own = [each for each in QUANTITIES if each.measure in mine and each.type != "VARCHAR"]
                summary = {each.name: number_of(draw, each) for each in own if "runs" in each.tables}
                facts = {"params_total": 1000 * depth, "train_flops": 1e9 * depth, "tokens_trained": 10**6}
                if is_diverged := draw.random() < 0.1:
                    summary = {"outcome": "diverged", "diverged_step": 3, "diverged_cause": "loss is NaN"}
                rows = [
                    {"step": 1, "layer": layer, "metric": each.name, "value": number_of(draw, each), "n": 8}
                    for each in own
                    if "layers" in each.tables and not each.threshold and has_layers and not is_diverged
                    for layer in range(1, depth + 1)
                ]
                run = make_run(folder, config, {**facts, **summary}, rows)
                made[run.name] = summary
    return made


def check_runs(number: int, folder, command, asked: tuple[str, ...]) -> None:
    made = runs_that_lack_measures(number, folder / "ours")
    with open_store(folder / "ours") as store:
        for row in store.sql("select * from runs").records():
            own = made[row["run_id"]]
            for quantity in QUANTITIES:
                if quantity.measure and "runs" in quantity.tables:
                    assert row[quantity.name] == own.get(quantity.name), (number, quantity.name)
    ask(number, folder / "ours", command, asked)


@pytest.fixture
def said(capsys):
    """What a command prints, and its exit code; any exception of ours fails the test."""
    from sparsedepth.cli.main import run

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            run([*map(str, arguments)])
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if not line.startswith("sparsedepth: warning: ")]
        return out, "".join(f"{line}\n" for line in errors), ended.value.code

    return call


@pytest.mark.parametrize("number", range(30))
def test_a_table_is_read_whatever_it_states(number, tmp_path, said):
    check(number, tmp_path, said, QUICK if number % 15 == 0 else ())


@pytest.mark.parametrize("number", range(12))
def test_runs_are_read_whatever_they_were_measured_with(number, tmp_path, said):
    check_runs(number, tmp_path, said, QUICK if number % 6 == 0 else ())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_100_folders_of_runs_that_lack_measures_are_ranked_judged_drawn_and_reported(tmp_path, said):
    for number in range(12, 112):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        check_runs(number, folder, said, ALL)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_300_tables_are_read_ranked_judged_drawn_and_reported(tmp_path, said):
    for number in range(30, 330):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        check(number, folder, said, ALL)
