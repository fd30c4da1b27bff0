"""`sparsedepth init`: every template is valid as it is, and with any one of its commented lines brought in."""

import itertools
import re
from pathlib import Path

import pytest
import yaml
from support.tiny_sweep import sparsedepth

import sparsedepth as sparsedepth_package
from sparsedepth.cli.describe import init, template
from sparsedepth.cli.input_file import kind_of, read_input
from sparsedepth.cli.pricing import forecasts
from sparsedepth.config.load import build, parse_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.data.sequences import open_source
from sparsedepth.plan.tasks import Plan
from sparsedepth.store.table_map import TableMap

MODELS = {"sweep": SweepDefinition, "run": RunConfig, "import": TableMap}
FREE = {"free": None, "across": None}
OPTIONAL = re.compile(r"^# (?=\w+: )(?!extends)", re.MULTILINE)


def with_each_choice(text):
    """The text, and the text with one commented line brought in; '# A run: ...' is prose, whose key has a space."""
    yield text
    for found in OPTIONAL.finditer(text):
        line = text[found.end() :].partition("\n")[0]
        key = line.partition(":")[0]
        without = re.sub(rf"^{key}:.*\n", "", text[: found.start()], flags=re.MULTILINE)
        yield without + line + "\n" + text[found.end() + len(line) + 1 :]


@pytest.mark.parametrize("kind", MODELS)
def test_a_template_and_each_of_its_choices_is_valid(kind):
    texts = list(with_each_choice(template(kind, "mine.yaml")))
    assert len(texts) > 1
    for text in texts:
        config = build(MODELS[kind], parse_yaml(text, "mine.yaml"), "mine.yaml")
        if isinstance(config, SweepDefinition):
            assert Plan(config).expected > 1
            assert not config.scales or config.scaled("small").base["train_tokens"] == 8192


@pytest.mark.parametrize("kind", MODELS)
def test_init_writes_a_file_of_its_kind_once(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    init(kind)
    path = tmp_path / f"{kind}.yaml"
    printed = capsys.readouterr().out
    assert f"{kind}.yaml --out" in printed
    if kind != "import":  # its template names no folder
        command = printed.splitlines()[-1].strip()
        assert re.search(rf"{command}\s", path.read_text()), "the file names another command"
    assert kind_of(yaml.safe_load(path.read_text())) == kind and read_input(path, kind)
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        init(kind)
    with pytest.raises(ValueError, match="does not exist; create it"):
        init(kind, tmp_path / "gone" / "x.yaml")
    assert path.read_text() == "mine" and [*tmp_path.iterdir()] == [path]


def test_a_command_to_paste_quotes_its_file(tmp_path, capsys):
    path = tmp_path / "my sweep.yaml"
    init("sweep", path)
    assert f"  sparsedepth plan '{path}'\n  sparsedepth sweep '{path}' --out " in capsys.readouterr().out
    assert f"#   sparsedepth plan '{path}' " in path.read_text()


def test_the_template_can_answer_and_the_former_one_could_not():
    """Its forecast lies below the bigram table at every depth; 32 steps, as before, leave every depth above."""
    definition = build(SweepDefinition, parse_yaml(template("sweep", "mine.yaml"), "mine.yaml"), "mine.yaml")
    for steps, can_answer in ((300, True), (32, False)):
        found = forecasts(Plan(definition.with_changes({"train_tokens": 1024 * steps, "matched": "steps"} | FREE)))
        assert [row.high < row.bigram_loss for row in found] == [can_answer] * 3


def test_a_forecast_counts_how_often_a_run_reads_its_text(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("\n\n".join(f"This is paragraph {i} of a short text." for i in range(1500)))
    definition = build(SweepDefinition, parse_yaml(template("sweep", "mine.yaml"), "mine.yaml"), "mine.yaml")
    plan = Plan(definition.with_changes({"corpus": str(text), "train_tokens": 2**20, "matched": "steps"} | FREE))
    n_tokens = len(open_source(plan.expected_runs()[0], tmp_path / "tokens").corpus.train)
    assert n_tokens < text.stat().st_size
    for row in forecasts(plan):
        assert row.passes == pytest.approx(2**20 / n_tokens, rel=0.01) and row.is_learned_by_heart


def test_init_takes_a_text_of_ones_own(tmp_path, capsys):
    (tmp_path / "my text.txt").write_text("a\n\nb")
    init("sweep", tmp_path / "mine.yaml", corpus=str(tmp_path / "my text.txt"))
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["base"]["corpus"] == str(tmp_path / "my text.txt")
    with pytest.raises(ValueError, match="gone"):
        init("sweep", tmp_path / "other.yaml", corpus=str(tmp_path / "gone.txt"))
    with pytest.raises(ValueError, match="for a sweep or a run"):
        init("import", tmp_path / "map.yaml", corpus="stdlib")
    with pytest.raises(ValueError, match="does not change the example 'text_flops'; leave it out, and edit the copy"):
        init("sweep", tmp_path / "like.yaml", corpus="stdlib", like="text_flops")


@pytest.mark.slow
def test_the_template_beats_its_bigram_table_and_answers_about_depth(tmp_path):
    path, out = tmp_path / "mine.yaml", tmp_path / "out"
    init("sweep", path)
    said, _ = sparsedepth("sweep", path, "--out", out)
    assert "query" in said.partition("next:")[2] and "--ask depth" in said
    assert "worth their cost" in sparsedepth("query", out, "--ask", "depth")[0]
    sql = "select count(*) filter (val_loss < bigram_loss) as below from runs"
    assert sparsedepth("query", out, sql)[0].split()[-1] == "18"


@pytest.mark.parametrize(("kind", "name"), [("sweep", "depth"), ("import", "gemstones")])
def test_init_copies_an_example(kind, name, tmp_path, capsys):
    init(kind, tmp_path / "mine.yaml", like=name)
    assert capsys.readouterr().out.endswith(f" --out results/my-{name}\n")
    own = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert kind_of(own) == kind and ("name" not in own or own["name"] == name)
    with pytest.raises(ValueError, match="did you mean 'quickstart'"):
        init("sweep", tmp_path / "other.yaml", like="quickstar")
    with pytest.raises(ValueError, match="see `presets`"):
        init("run", tmp_path / "run.yaml", like="depth")


def test_examples_are_whole_files():
    """A copy stands alone: none extends another file."""
    folder = Path(sparsedepth_package.__file__).parent / "examples"
    for path in folder.glob("*.yaml"):
        assert "extends" not in yaml.safe_load(path.read_text()), path
    assert len([*folder.glob("*.yaml")]) > 15


def test_a_ladder_has_budgets_that_double_by_one_dial(tmp_path, capsys):
    """8, 9, 10 layers of 4 times the width, 32, 36, 40, in heads of 16, 18 or 20."""
    init("sweep", tmp_path / "mine.yaml", ladder=4)
    advice = capsys.readouterr().out.splitlines()[-1].strip()
    assert advice.endswith(" --out results/my-ladder") and advice in (tmp_path / "mine.yaml").read_text()
    (sizes,) = yaml.safe_load((tmp_path / "mine.yaml").read_text())["zip"]
    assert sizes["n_layers"] == [8, 9, 10, 11] and sizes["d_model"] == [32, 36, 40, 44]
    assert sizes["n_heads"] == [2, 2, 2, 2] and sizes["weight_decay"] == [0.1, 0.079, 0.064, 0.053]
    runs = Plan(SweepDefinition(**yaml.safe_load((tmp_path / "mine.yaml").read_text()))).runs()
    flops = sorted({run.flops for run in runs})
    assert len(runs) == 8
    for number, (low, high) in enumerate(itertools.pairwise(flops)):
        assert high / low == pytest.approx(2, rel=2e-3), number
    for wrong in ({"ladder": 2}, {"ladder": 4, "like": "depth"}):
        with pytest.raises(ValueError, match="--ladder"):
            init("sweep", tmp_path / "other.yaml", **wrong)
