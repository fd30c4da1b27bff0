"""Imports: a stranger's table becomes a store; what it does not say stays unknown; what is wrong is told at once."""

import codecs
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.files import to_yaml
from sparsedepth.scaling.points import read_points
from sparsedepth.store.best import best
from sparsedepth.store.checksums import checksum_of
from sparsedepth.store.connection import open_store
from sparsedepth.store.fences import FENCES, limited
from sparsedepth.store.import_table import import_table
from sparsedepth.store.packs import open_pack
from sparsedepth.store.subject import buildable
from sparsedepth.store.table_file import MAX_ROWS, open_table, read_texts
from sparsedepth.words.best import heading

MAP = """
source: a paper
fields:
  n_layers: depth
  d_model: width
  n_heads: width / 4
  lr: lr
  train_tokens: {of: tokens, unit: thousand}
  params_total: "`N (all)`"
  norm: {of: kind, values: {A: pre, B: post}}
  val_loss: {of: bits, unit: bit}
  usefulness: {of: useful, optional: true}
constants: {seq_len: 64, corpus: c4}
cluster: run
"""
HEADER = "run,depth,width,lr,tokens,N (all),kind,bits,useful"
ROWS = ("a,2,8,0.001,10,100,A,2.0,0.5", "a,2,8,0.001,20,100,A,1.5,", "b,4,8,0.001,10,200,B,1.0,0.25")


def take_in(folder: Path, rows=ROWS, table_map=MAP, header=HEADER):
    """The import of a table of these lines."""
    table, map_path = folder / "runs.csv", folder / "map.yaml"
    table.write_text("\n".join((header, *rows)) + "\n")
    map_path.write_text(table_map)
    return import_table(table, map_path, folder / "theirs")


def frame_of(folder: Path) -> pd.DataFrame:
    with open_store(folder / "theirs") as store:
        return store.frame("select * from runs order by n_layers, train_tokens")


@pytest.mark.parametrize(
    ("tokens", "unit", "whole"), [("4.1", "million", 4_100_000), ("8.2", "billion", 8_200_000_000)]
)
def test_a_whole_number_in_another_unit_is_whole(tmp_path, tokens, unit, whole):
    """Though 4.1 * 1e6 is 4099999.9999999995."""
    table_map = f"source: a paper\nfields: {{n_layers: n, val_loss: l, train_tokens: {{of: t, unit: {unit}}}}}\n"
    take_in(tmp_path, [f"2,3.0,{tokens}"], table_map, "n,l,t")
    assert frame_of(tmp_path)["train_tokens"].tolist() == [whole]
    with pytest.raises(ValueError, match=r"train_tokens is .* a whole number is needed"):
        take_in(tmp_path, ["2,3.0,0.5000000001"], table_map.replace("billion", "million"), "n,l,t")


def test_columns_become_fields_and_the_rest_is_unknown(tmp_path):
    taken = take_in(tmp_path)
    assert (taken.rows, taken.runs, taken.clusters) == (3, 3, 2)
    runs = frame_of(tmp_path)
    assert runs["train_tokens"].tolist() == [10_000, 20_000, 10_000] and runs["n_heads"].tolist() == [2, 2, 2]
    assert runs["val_loss"].tolist() == pytest.approx([1.38629436, 1.03972077, 0.69314718])  # bits times ln 2
    assert runs["tokens_per_param"].tolist() == [100, 200, 50] and runs["tokens_trained"].tolist()[1] == 20_000
    assert runs["norm"].tolist() == ["pre", "pre", "post"] and runs["cluster"].tolist() == ["a", "a", "b"]
    assert runs["usefulness"].tolist()[::2] == [0.5, 0.25] and pd.isna(runs["usefulness"][1])
    assert set(runs["origin"]) == {"a paper"} and set(runs["corpus"]) == {"c4"}
    unknown = set(runs["unknown_fields"][0].split(","))
    assert {"seed", "weight_decay", "init", "tokenizer"} <= unknown and not unknown & {"lr", "norm", "corpus"}
    for name in ("seed", "weight_decay", "n_kv_heads", "device"):
        assert runs[name].isna().all(), name
    assert runs["run_id"].nunique() == 3 and runs["cell_id"].nunique() == 3


LAYERS = """
layers:
- {metric: residual_variance, value: "var_{layer}", layer: 0}
- {metric: residual_growth, value: growth_of_2, layer: 2}
"""


def test_columns_of_layers_are_rows_of_layers(tmp_path):
    """Their blocks are numbered from 0; a number beyond the last layer of a run, and a missing one, is none."""
    rows = [f"{row},{more}" for row, more in zip(ROWS, ("1,4,9,.5", "2,8,NA,.25", "1,2,3,"), strict=True)]
    taken = take_in(tmp_path, rows, MAP + LAYERS, f"{HEADER},var_0,var_1,var_2,growth_of_2")
    assert taken.notes == ("1 value of layers that a run does not have left out",)
    with open_store(tmp_path / "theirs") as store:
        found = store.sql(
            "select n_layers, train_tokens / 1000, layer, metric, value from layers join runs using (run_id)"
        )
    variance = [(depth, tokens, layer, value) for depth, tokens, layer, name, value in found.rows if "var" in name]
    assert sorted(variance) == [
        (2, 10, 1, 1), (2, 10, 2, 4), (2, 20, 1, 2), (2, 20, 2, 8), (4, 10, 1, 1), (4, 10, 2, 2), (4, 10, 3, 3)
    ]  # fmt: skip
    growth = [(depth, tokens, layer, value) for depth, tokens, layer, name, value in found.rows if "var" not in name]
    assert sorted(growth) == [(2, 10, 2, 0.5), (2, 20, 2, 0.25)]
    assert frame_of(tmp_path)["residual_variance_last"].tolist()[:2] == [4, 8]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("{metric: variance, value: lr}", "layers: variance is no metric of layers; "),
        ("{metric: residual_variance, value: 'v{layer}'}", "layers.residual_variance: no column 'v{layer}'"),
        ("{metric: residual_variance, value: kind}", r"fields.residual_variance@1: column 'kind' is \"A\" in row 1"),
        ("{metric: residual_variance, value: bits, layer: -1}", "layer"),
    ],
)
def test_what_is_no_column_of_layers_is_told(tmp_path, wrong, told):
    with pytest.raises(ValueError, match=told):
        take_in(tmp_path, table_map=f"{MAP}layers:\n- {wrong}\n")


def test_the_store_is_a_pack_of_records_that_say_where_they_are_from(tmp_path):
    take_in(tmp_path)
    before = frame_of(tmp_path)
    records = [run.files() for run in open_pack(tmp_path / "theirs").stored_runs]
    for files in records:
        assert {name: checksum_of(files.read(name)) for name in files.marker.files} == files.marker.files
    manifests = [json.loads(files.read("manifest.json")) for files in records]
    assert sorted(manifest["row"] for manifest in manifests) == [1, 2, 3]
    assert {manifest["table"] for manifest in manifests} == {"runs.csv"}
    assert "origin" in before and before["run_id"].isin([files.marker.run_id for files in records]).all()


def test_values_with_blanks_do_not_make_one_cluster_of_two(tmp_path):
    (tmp_path / "t.csv").write_text("depth,loss,run,part\n2,3.0,a b,c\n4,2.5,a,b c\n8,2.0,a,b c\n")
    (tmp_path / "map.yaml").write_text("source: x\nfields: {n_layers: depth, val_loss: loss}\ncluster: [run, part]\n")
    taken = import_table(tmp_path / "t.csv", tmp_path / "map.yaml", tmp_path / "theirs")
    assert taken.clusters == 2


def test_rows_without_a_cluster_stand_for_themselves(tmp_path):
    taken = take_in(tmp_path, (*ROWS, ",8,8,0.001,10,400,A,2.0,", ",16,8,0.001,10,800,A,2.0,"))
    runs = frame_of(tmp_path)
    assert taken.clusters == 4 and runs["cluster"].isna().tolist() == [False, False, False, True, True]
    points = read_points(tmp_path / "theirs", cluster="cluster")["cluster"]
    assert sorted(points) == sorted([*runs["cluster"][:3], *runs["run_id"][3:]])
    points = read_points(tmp_path / "theirs", cluster="d_model,seed")["cluster"]  # no seed is known
    assert sorted(points) == sorted(runs["run_id"])
    table = tmp_path / "points.csv"
    lines = ("d_model,n_layers,num_tokens,loss,run,part", "8,2,10,3,a,1", "8,2,20,2,,1", "8,4,20,2.5,,", "8,4,30,2,a,1")
    table.write_text("\n".join(lines))
    assert read_points(table, cluster="run,part")["cluster"].tolist() == ["a 1", "row 2", "row 3", "a 1"]


def test_a_condition_and_rows_without_a_value(tmp_path):
    table_map = MAP.replace("lr: lr", "lr: lr\n  seed: {of: s, optional: true}")
    table_map += "where: kind == 'A' and tokens >= 20\n"
    taken = take_in(tmp_path, [f"{row},1" for row in ROWS], table_map, f"{HEADER},s")
    assert (taken.runs, taken.excluded) == (1, 2) and frame_of(tmp_path)["seed"].tolist() == [1]
    rows = (*ROWS, "c,8,8,0.001,10,400,A,,")
    (tmp_path / "two").mkdir()
    with pytest.raises(
        ValueError, match=r"val_loss has no value in 1 row, first in row 4 .line 5.; state missing: leave_out"
    ):
        take_in(tmp_path / "two", rows)
    assert take_in(tmp_path / "two", rows, MAP + "missing: leave_out\n").incomplete == 1


@pytest.mark.parametrize("missing", ["refuse", "leave_out"])
@pytest.mark.parametrize("infinite", ["inf", "Infinity", "1e999"])
def test_a_run_with_an_infinite_loss_diverged_and_is_never_left_out(tmp_path, infinite, missing):
    """As `judge` takes it; nor does it lack other results, but for a setting that it does not state."""
    table_map = f"{MAP.replace('optional: true', 'optional: false')}missing: {missing}\n"
    rows = ("a,2,8,0.001,10,100,A,2,1", f"c,8,8,0.001,10,400,A,{infinite},")
    assert take_in(tmp_path, rows, table_map).incomplete == 0
    assert frame_of(tmp_path)["outcome"].tolist() == ["ok", "diverged"]


@pytest.mark.parametrize(
    ("bits", "useful", "outcome"),
    [("-inf", "1", "diverged"), ("1e999", "", "diverged"), ("", "1", "ok"), ("1", "inf", "ok")],
)
def test_an_infinite_loss_is_of_a_run_that_diverged_also_where_it_may_be_missing(tmp_path, bits, useful, outcome):
    """What is not finite has no value; without a loss the run is not known to have diverged."""
    table_map = MAP.replace("unit: bit}", "unit: bit, optional: true}")
    take_in(tmp_path, (*ROWS[:2], f"b,4,8,0.001,10,200,B,{bits},{useful}"), table_map)
    last = frame_of(tmp_path).iloc[-1]
    assert last["outcome"] == outcome and pd.isna(last["val_loss"]) == (bits != "1")
    assert pd.isna(last["usefulness"]) == (useful != "1")


def test_na_is_a_missing_number_and_a_text(tmp_path):
    """norm: None is post, NA is missing; the last two rows share the cluster NA."""
    table_map = MAP.replace("{of: kind, values: {A: pre, B: post}}", "{of: kind, values: {A: pre, None: post}}")
    table_map = table_map.replace("lr: lr", "lr: {of: lr / 2, optional: true}\n  qk_norm: {of: q, optional: true}")
    rows = ("a,2,8,NA,10,100,A,2,NA,NA", "NA,4,8,1,10,100,None,2,None,true", "NA,8,8,nan,10,100,None,2,,")
    taken = take_in(tmp_path, rows, table_map, f"{HEADER},q")
    runs = frame_of(tmp_path)
    assert runs["norm"].tolist() == ["pre", "post", "post"] and taken.clusters == 2
    assert runs["lr"].isna().tolist() == runs["qk_norm"].isna().tolist() == [True, False, True]
    assert runs["usefulness"].isna().all()
    (tmp_path / "two").mkdir()
    unlisted = (*ROWS[:2], "b,4,8,0.001,10,200,NA,1.0,0.25")
    optional = MAP.replace("B: post}", "B: post}, optional: true")
    with pytest.raises(ValueError, match=r"'kind' is \"NA\" in row 3 .line 4., which `values` does not list"):
        take_in(tmp_path / "two", unlisted, optional)
    take_in(tmp_path / "two", unlisted, optional.replace("B: post", "NA: null"))
    assert frame_of(tmp_path / "two")["norm"].tolist()[:2] == ["pre", "pre"]
    assert frame_of(tmp_path / "two")["norm"].isna()[2]
    (tmp_path / "three").mkdir()
    unmapped = MAP.replace("  norm: {of: kind, values: {A: pre, B: post}}\n", "") + "where: kind == 'NA'\n"
    assert take_in(tmp_path / "three", unlisted, unmapped).runs == 1


def test_a_column_may_be_called_row_number(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("row_number,loss\n5,2.5\n5,bad\n")
    with open_table(read_texts(path, lambda names: ["row_number"])) as table:
        assert table.rows("row_number", "texts") == [(1, "5"), (2, "5")]


def test_values_may_be_whole_numbers(tmp_path):
    table_map = MAP.replace("n_layers: depth", "n_layers: {of: depth, values: {small: 8, large: 16}}")
    take_in(tmp_path, (ROWS[0].replace(",2,", ",small,", 1), ROWS[2].replace(",4,", ",large,", 1)), table_map)
    assert frame_of(tmp_path)["n_layers"].tolist() == [8, 16]


def test_the_best_of_a_tuned_field_stands_for_a_configuration(tmp_path):
    rows = [
        f"r{lr},{depth},8,{lr},10,100,A,{2 + abs(lr - 0.002) / depth},{{}}"
        for depth in (2, 4)
        for lr in (0.001, 0.002, 0.004)
    ]
    take_in(tmp_path, rows, MAP.replace("  usefulness: {of: useful, optional: true}\n", "") + "tuned: [lr]\n")
    runs = frame_of(tmp_path)
    assert runs.loc[runs["tuning"] != "rejected", "lr"].tolist() == [0.002, 0.002]
    with open_store(tmp_path / "theirs") as store:
        ranking = best(store)
    assert ranking.n_runs == 2 and "imported from a paper" in heading(ranking) and "seed" in heading(ranking)


def settings_at(runs):
    """The rows of the frame `effects` on settings."""
    effects = effects_frame(cells_of(runs, "val_loss"))
    return effects[effects["question"] == "setting"].to_dict("records")


def test_recipes_of_others_runs_fail_their_first_test(tmp_path):
    """Three seeds, an effect of 0.5 bit of norm: seen, and yet no evidence, since other choices are unknown."""
    kinds = [(i, kind) for i in range(3) for kind in "AB"]
    rows = [f"r{i},2,8,0.001,10,100,{kind},{2 + 0.5 * (kind == 'B') + 0.01 * i},,{i}" for i, kind in kinds]
    take_in(tmp_path, rows, MAP.replace("lr: lr", "lr: lr\n  seed: s"), f"{HEADER},s")
    runs = frame_of(tmp_path)
    (effect,) = settings_at(runs)
    assert effect["estimate"] == pytest.approx(0.5 * 0.693147, abs=1e-5) and effect["seeds"] == 3
    recipe = derive(runs)
    assert "imported from a paper" in recipe.unknown and recipe.config is not None
    assert recipe.config.train_tokens % recipe.config.batch_tokens == 0
    assert {"weight_decay", "tokenizer", "n_kv_heads"} <= {*recipe.defaulted}
    assert not {"lr", "norm", "d_model", "seed"} & {*recipe.defaulted}
    for width, n_heads in ((100, 2), (64, 4), (6, 1)):  # of an even width each
        assert build(RunConfig, buildable({"d_model": width}), "x").n_heads == n_heads
    card = derive_card(runs)
    assert not card.tests or card.tests[0].outcome == "failed"
    comments = [line for line in to_yaml(card).splitlines() if line.startswith("#")]
    assert any("Not stated by the imported table" in line for line in comments)


def test_what_a_table_does_not_say_is_neither_dropped_nor_filled_in(tmp_path):
    """No seed and no lr: an effect without an interval, and a recipe's table that names no value of the defaults."""
    unstated = MAP.replace("  lr: lr\n", "").replace("  n_heads: width / 4\n", "")
    kinds = [(n, kind) for n in (2, 4) for kind in "AB"]
    rows = [f"r{n}{kind},{n},8,,16.384,100,{kind},{2 + 0.5 * (kind == 'B')},," for n, kind in kinds]
    take_in(tmp_path, rows, unstated)
    runs = frame_of(tmp_path)
    effects = settings_at(runs)
    assert [(row["estimate"], row["seeds"]) for row in effects] == [(pytest.approx(0.346574, abs=1e-6), 1)] * 2
    assert {row["reason"] for row in effects} == {
        "only one seed in common: an interval needs two, or three budgets (effects --as speedup)"
    }
    recipe = derive(runs)
    assert (recipe.baseline_seeds, recipe.candidates[0].effect.lr_baseline) == (1, None)


def test_sizes_that_this_decoder_refuses_are_compared_all_the_same(tmp_path):
    """One expert a token, whose gates nobody states, and 1,000 tokens in steps of 192: the baseline of the recipe's
    table is the run, though a configuration of our own has whole steps."""
    experts = MAP.replace("  norm:", "  n_experts: e\n  top_k: k\n  d_expert: x\n  norm:")
    experts = experts.replace("{of: tokens, unit: thousand}", "tokens")
    experts = experts.replace("seq_len: 64", "seq_len: 64, batch_tokens: 192")
    rows = [
        f"r{i}{kind},2,8,0.001,1000,100,A,{2 + 0.1 * i + 0.5 * (kind == 1)},,{4 * kind},{kind},{4 - kind}"
        for i in range(2)
        for kind in (1, 2)
    ]
    take_in(tmp_path, rows, experts, f"{HEADER},e,k,x")
    runs = frame_of(tmp_path)
    (effect,) = settings_at(runs)
    assert effect["estimate"] == effect["estimate"]
    assert (derive(runs).baseline_seeds or 0) > 0


def test_every_mistake_of_a_map_is_told_at_once(tmp_path):
    wrong = MAP.replace("depth", "dept").replace("width / 4", "width / (4").replace("lr: lr", "lrr: lr")
    with pytest.raises(ValueError, match=r"fields.lrr is no field of a run and no measured quantity; did you mean 'lr"):
        take_in(tmp_path, table_map=wrong)
    with pytest.raises(ValueError) as told:
        take_in(tmp_path, table_map=wrong.replace("lrr: lr", "lr: lr + nothing") + "where: depth =\n")
    with pytest.raises(ValueError, match=r'constants.seq_len is "long": a whole number is needed'):
        take_in(tmp_path, table_map=MAP.replace("seq_len: 64", "seq_len: long"))
    for part in (
        "fields.n_layers: no column 'dept'",
        "fields.n_heads: 'width / (4' is no expression",
        "no column 'nothing'",
        "where: 'depth =' is no expression",
        "the table has the columns run, ",
    ):
        assert part in str(told.value)
    assert "\n" not in str(told.value) and not (tmp_path / "theirs").exists()
    assert str(told.value).count("the table has the columns") == 1


@pytest.mark.parametrize(
    ("field", "kind"), [("tie_embeddings: width * 1", "true or false"), ("norm_kind: width * 1", "text")]
)
def test_what_is_no_number_is_not_computed(tmp_path, field, kind):
    with pytest.raises(ValueError, match=f"{kind} must be a column, and 'width \\* 1' is arithmetic"):
        take_in(tmp_path, table_map=MAP.replace("  lr: lr", f"  lr: lr\n  {field}"))


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("0.001,10", "fast,10", "column 'lr' is \"fast\" in row 1"),
        ("0.001,10", "-1,10", "lr=-1.0 must be greater than 0"),
        ("0.001,10", "inf,10", "column 'lr' is \"inf\" in row 1"),
        ("2,8", "2.5,8", "n_layers is 2.5 in row 1 (line 2) (and in 1 more rows): a whole number is needed"),
        ("2.0,0.5", "2.0,50", "usefulness=50 must be from 0 to 1; state its unit, or multiply in `of`: 50.0 in row 1"),
        ("2.0,0.5", "-2.0,0.5", "val_loss=-1.38629 must be from 0 to inf"),
    ],
)
def test_a_value_that_is_wrong_is_told_with_its_row(tmp_path, was, now, told):
    rows = [row.replace(was, now) for row in ROWS]
    with pytest.raises(ValueError) as error:
        take_in(tmp_path, rows)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_true_is_no_number_and_a_huge_number_none_that_is_used(tmp_path):
    """In JSON and Parquet."""
    take_in(tmp_path)
    whole = pd.read_csv(tmp_path / "runs.csv")
    for column, map_name, place in (
        ("depth", "map.yaml", "fields.n_layers"),
        ("width", "map.yaml", "fields.n_heads"),
        ("useful", "map.yaml", "fields.usefulness"),
    ):
        told = f"{place}: column '{column}' is \"true\" in row 2: a number is needed"
        table = whole.astype({column: object})
        table.loc[1, column] = True
        table.to_json(tmp_path / "t.json", orient="records")
        with pytest.raises(ValueError, match=told):
            import_table(tmp_path / "t.json", tmp_path / map_name, tmp_path / "new")
    whole.assign(useful=[True, False, True]).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="column 'useful' is \"true\" in row 1"):
        import_table(tmp_path / "t.parquet", tmp_path / "map.yaml", tmp_path / "new")
    (tmp_path / "t.jsonl").write_text(f'{{"lr": 1{"0" * 400}, "depth": 2}}')
    (tmp_path / "lr.yaml").write_text("source: x\nfields: {n_layers: depth, lr: lr, val_loss: lr}\n")
    with pytest.raises(ValueError, match="column 'lr' is \"1000"):
        import_table(tmp_path / "t.jsonl", tmp_path / "lr.yaml", tmp_path / "new")


def test_tables_that_are_none(tmp_path):
    for header, told in ((HEADER.replace("depth", "run"), "is twice"), ("", "no columns")):
        with pytest.raises(ValueError, match=told):
            take_in(tmp_path, (), header=header)
    (tmp_path / "runs.json").write_text('{"a": [1]}')
    (tmp_path / "cut.json").write_text('[{"a": 1}, {"a": 2},')
    (tmp_path / "list.jsonl").write_text('[{"a": 1}]')
    (tmp_path / "runs.jsonl").write_text('{"a": 1}\n\nhello\n')
    (tmp_path / "long.csv").write_text(f"{HEADER}\n{ROWS[0]},1\n")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="holds nothing"):
        import_table(tmp_path / "runs.csv", tmp_path / "empty.yaml", tmp_path / "theirs")
    for name, told in (
        ("runs.jsonl", "Malformed JSON .* in line 3"),
        ("long.csv", "Expected Number of Columns: 9 Found: 10"),
        ("runs.json", "it must be a list of objects, one per run; objects on lines of their own are a .jsonl"),
        ("cut.json", "it must be a list of objects"),
        ("list.jsonl", "it must be an object on each line, one per run"),
        ("none.csv", "does not exist"),
    ):
        with pytest.raises(ValueError, match=told):
            import_table(tmp_path / name, tmp_path / "map.yaml", tmp_path / "theirs")


def test_the_command_is_one_line_of_error_or_names_what_is_unknown(tmp_path, command):
    root = Path(__file__).parents[2] / "sparsedepth/examples/maps"
    said, _ = command("import", root / "example.csv", "--map", root / "example.yaml", "-o", tmp_path / "theirs")
    assert "108 runs in 54 clusters, from 108 rows" in said and "weight_decay" in said
    (tmp_path / "map.yaml").write_text("source: x\n")
    for table_map, out in ((tmp_path / "map.yaml", "new"), (root / "example.yaml", "theirs")):
        _, error = command("import", root / "example.csv", "--map", table_map, "-o", tmp_path / out, code=2)
        assert error.count("\n") == 1 and error.startswith("sparsedepth: error: ")


@pytest.mark.parametrize(
    "text",
    ["(SELECT 1)", "width FROM texts", "width) FROM texts, (SELECT 1", "1; DROP TABLE texts", "*", "columns(*)",
     "avg(width)", "read_text('/etc/passwd')", "width < 2", "'a'", "[1]", "width +", "(" * 300, "1 -- " * 200,
     "width, lr", "current_setting('home_directory')", "(FROM read_csv('/etc/passwd') LIMIT 1)", "$1", "ln(width - 8)"],
)  # fmt: skip
def test_an_expression_is_one_number_of_a_row(tmp_path, text):
    with pytest.raises(ValueError, match=r"fields\.n_heads: ") as told:
        take_in(tmp_path, table_map=MAP.replace("width / 4", json.dumps(text)))
    assert "\n" not in str(told.value) and "root:" not in str(told.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.yaml", "runs.csv"]


def test_an_expression_is_sql_in_double_precision(tmp_path):
    texts = ("width ** 2 / 32", "round(sqrt(width) - 1.2)", "coalesce(useful, 4) * 0 + 2", "`N (all)` / 50 * 1")
    names = ("n_heads", "n_kv_heads", "n_experts", "top_k")
    fields = "\n  ".join(f"{name}: {json.dumps(text)}" for name, text in zip(names, texts, strict=True))
    take_in(tmp_path, ROWS[:2], MAP.replace("n_heads: width / 4", fields))
    assert frame_of(tmp_path)[[*names]].to_numpy().tolist() == [[2] * 4] * 2


def test_only_mapped_columns_are_read_and_bounds_hold_before_the_rest(tmp_path):
    """100 kB of text in an unmapped column of 50,000 rows of a Parquet file, which needs 5 GB; rows; columns."""
    take_in(tmp_path)
    columns = pd.read_csv(tmp_path / "runs.csv").to_dict("list")
    rows = {name: values + [None] * (50_000 - 3) for name, values in columns.items()}
    note = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int8()), ["x" * 10**5])
    pq.write_table(pa.table({**rows, "note": note}), tmp_path / "t.parquet")
    (tmp_path / "leave.yaml").write_text(MAP + "missing: leave_out\n")
    with limited(60):
        assert import_table(tmp_path / "t.parquet", tmp_path / "leave.yaml", tmp_path / "new").runs == 3
    (tmp_path / "t.jsonl").write_text("{}\n" * (MAX_ROWS + 10))
    (tmp_path / "t.csv").write_text(",".join(f"c{i}" for i in range(30_000)) + "\n")
    for name, told in (("t.jsonl", "more than 50,000 rows"), ("t.csv", "30,000 columns; at most")):
        with pytest.raises(ValueError, match=told):
            import_table(tmp_path / name, tmp_path / "map.yaml", tmp_path / "other")


def test_tables_as_others_write_them(tmp_path):
    """A byte order mark, a suffix in upper case, an index of pandas, whole numbers beside a missing one. A column or
    key that is there twice is an error."""
    take_in(tmp_path)
    ids = frame_of(tmp_path)["run_id"].tolist()
    table = pd.read_csv(tmp_path / "runs.csv")
    (tmp_path / "mark.jsonl").write_bytes(codecs.BOM_UTF8 + table.to_json(orient="records", lines=True).encode())
    (tmp_path / "upper.CSV").write_bytes(codecs.BOM_UTF8 + (tmp_path / "runs.csv").read_bytes())
    table.set_index(["run", "lr"]).to_parquet(tmp_path / "index.parquet")
    for name in ("mark.jsonl", "upper.CSV", "index.parquet"):
        import_table(tmp_path / name, tmp_path / "map.yaml", tmp_path / f"of-{name}")
        with open_store(tmp_path / f"of-{name}") as store:
            rows = store.sql("select run_id from runs order by n_layers, train_tokens").rows
        assert [run_id for (run_id,) in rows] == ids
    (tmp_path / "values.yaml").write_text("source: x\nfields:\n  n_layers: d\n  val_loss: l\n"
                                          "  norm: {of: k, values: {'1': pre}, optional: true}\n")  # fmt: skip
    (tmp_path / "null.json").write_text('[{"d": 2, "l": 1, "k": 1}, {"d": 4, "l": 1, "k": null}]')
    import_table(tmp_path / "null.json", tmp_path / "values.yaml", tmp_path / "null")
    with open_store(tmp_path / "null") as store:
        assert store.sql("select norm from runs order by n_layers").rows == (("pre",), (None,))
    (tmp_path / "twice.jsonl").write_text('{"d": 2, "l": 1, "l": 2}\n')
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 2, ["l", "l"]), tmp_path / "twice.parquet")
    for name, told in (("twice.jsonl", "key 'l' is twice in line 1"), ("twice.parquet", "column 'l' is twice")):
        with pytest.raises(ValueError, match=told):
            import_table(tmp_path / name, tmp_path / "values.yaml", tmp_path / "twice")


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_values_keep_their_identity_in_every_format(tmp_path, form):
    """Whole numbers beside a missing one, ids of 19 digits that differ in the last, dates, truth values; as pandas
    writes them. `values` lists '1' and 'true'; the condition tells ids apart; LOSS is another column; a note
    has line ends to str.splitlines alone."""
    ids = [1234567890123456788, 1234567890123456789, 1234567890123456790]
    table = pd.DataFrame({"LOSS": [9.0] * 3, "depth": [2, 4, 8], "loss": [3.0, 2.0, 1.0], "id": ids,
                          "k": [1, None, 2], "flag": [True, False, True], "day": ["2024-01-02"] * 3,
                          "note": "\u2028\x85"})  # fmt: skip
    path = tmp_path / f"t.{form}"
    if form == "parquet":
        table["day"] = pd.to_datetime(table["day"]).dt.date
        table.to_parquet(path, index=False)
    elif form in ("csv", "tsv"):
        table.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    else:
        path.write_text(table.to_json(orient="records", lines=form == "jsonl", force_ascii=False))
    (tmp_path / "map.yaml").write_text(
        "source: x\nfields:\n  n_layers: depth\n  val_loss: loss\n  tie_embeddings: flag\n"
        "  norm: {of: k, values: {'1': pre, '2': post}, optional: true}\n"
        "  precision: {of: flag, values: {'true': bf16, 'false': fp32}}\n"
        "cluster: [id, day]\nwhere: id >= 1234567890123456789 and (flag or not flag)\n"
    )
    assert import_table(path, tmp_path / "map.yaml", tmp_path / "new").runs == 2
    with open_store(tmp_path / "new") as store:
        rows = store.sql('select norm, "precision", tie_embeddings, cluster, val_loss from runs order by n_layers').rows
    clusters = [f"{id} 2024-01-02" for id in ids]
    assert rows == ((None, "fp32", False, clusters[1], 2), ("post", "bf16", True, clusters[2], 1))


@pytest.mark.parametrize(
    ("form", "encoding"), [("CSV", "utf-32"), ("Tsv", "utf-16"), ("JSON", "utf-16"), ("jsonl", "utf-16-be")]
)
def test_text_in_the_encodings_of_spreadsheets_is_read(tmp_path, form, encoding):
    texts = {"CSV": "größe,loss\n2,1\n", "Tsv": "größe\tloss\n2\t1\n"}
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    content = texts.get(form, '{"größe": 2, "loss": 1}\n')
    content = f"[{content}]" if form == "JSON" else content
    (tmp_path / f"t.{form}").write_bytes(mark + content.encode(encoding))
    (tmp_path / "map.yaml").write_text("source: x\nfields: {n_layers: größe, val_loss: loss}\n")
    assert import_table(tmp_path / f"t.{form}", tmp_path / "map.yaml", tmp_path / "new").runs == 1


def test_a_mapped_text_that_decodes_to_gigabytes_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(FENCES, "memory_limit", "200MB")
    note = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int8()), ["x" * 10**5])
    numbers = pa.array(range(1, 50_001))
    pq.write_table(pa.table({"depth": numbers, "loss": numbers, "note": note}), tmp_path / "t.parquet")
    (tmp_path / "map.yaml").write_text("source: x\nfields: {n_layers: depth, val_loss: loss}\ncluster: note\n")
    with limited(60), pytest.raises(ValueError, match=r"its mapped columns need more than 200MB of memory$"):
        import_table(tmp_path / "t.parquet", tmp_path / "map.yaml", tmp_path / "new")


def with_map(old: str, new: str) -> dict[str, str]:
    return {"table_map": MAP.replace(old, new)}


RATE = {"header": HEADER.replace("lr", "rate")}


@pytest.mark.parametrize(
    ("wrong", "says", "right"),
    [
        ({"header": HEADER.replace("useful", "bits")}, "'bits' is twice in its header; rename one of them", {}),
        (RATE, r"no column 'lr'.*the table has the columns .*rate", {**RATE, **with_map("lr: lr", "lr: rate")}),
        (with_map("B: post", "C: post"), r'"B" in row 3.* `values` does not list; list it there', {}),
        (with_map("thousand", "k"), "unit='k' is not known; choose one of thousand", {}),
        (with_map(", optional: true", ""), "state missing: leave_out, or optional: true", {}),
        (with_map("width / 4", "width / 5"), "a whole number is needed; change `of`", {}),
        (with_map("{of: bits, unit: bit}", "bits / (depth - 2)"), "is Infinity in row 1 .*: no finite number", {}),
        (with_map("cluster", "where: depth > 9\ncluster"), "no row meets where: depth > 9; change it", {}),
        ({"rows": (*ROWS, ROWS[0])}, r"row 1 .line 2. and row 4 .line 5. are equal in all mapped fields", {}),
    ],
)
def test_advice_on_a_table_works(tmp_path, wrong, says, right):
    """The mistake is told with its fix; the table, or the map, with the fix is read."""
    with pytest.raises(ValueError, match=says):
        take_in(tmp_path, **wrong)
    assert take_in(tmp_path, **right).runs == 3


def test_advice_on_a_file_works(tmp_path):
    """An encoding, a suffix and a row for each step are told with their fix; the file with the fix is read."""
    (tmp_path / "map.yaml").write_text(MAP)
    text = "\n".join([HEADER, *ROWS]) + "\n"
    latin, steps, other = (tmp_path / name for name in ("latin.csv", "steps.csv", "runs.dat"))
    latin.write_bytes((text + "ä").encode("latin-1"))
    steps.write_text(f"{HEADER}\n" + f"{ROWS[0]}\n" * (MAX_ROWS + 1))
    other.write_text(text)
    for file, says in (
        (latin, "save it as UTF-8"),
        (steps, "a row must be a run, not a step of one"),
        (other, r"use one of \.csv"),
    ):
        with pytest.raises(ValueError, match=says):
            import_table(file, tmp_path / "map.yaml", tmp_path / "new")
        fixed = file.with_suffix(".csv")
        fixed.write_text(text, encoding="utf-8")
        assert import_table(fixed, tmp_path / "map.yaml", tmp_path / file.stem).runs == 3
