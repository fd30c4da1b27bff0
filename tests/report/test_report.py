"""The report's sentences and tables: numbers of the rows, escaped names, a reproducible file."""

import itertools
import re
from types import SimpleNamespace

import pytest
import yaml
from support.budget_results import budget_results
from support.made_up_runs import make_run
from support.report_folder import HOSTILE, fill

from sparsedepth.cli.figures import report
from sparsedepth.config.run import RunConfig
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.forest import cells_of_store, effects_of
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.recipe.card import Verification, write_card
from sparsedepth.recipe.verify import with_verification
from sparsedepth.report import page as report_page
from sparsedepth.report.content import content
from sparsedepth.report.page import advice_of, write_report
from sparsedepth.report.tables import TableCell, cell, table_of, table_of_effects
from sparsedepth.store.connection import open_store
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.recipe import effect_text, sentence


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    fill(folder, corpus=HOSTILE)
    return folder


@pytest.fixture(scope="module")
def contents(results):
    with open_store(results) as store:
        return content(store, [results])


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_the_answers_come_first_with_effect_verdict_basis_and_figure(contents):
    """Both depths have the same effect, and so the deeper one no lower loss."""
    use, variance, depth, cost = contents.answers
    assert use.answer.startswith(sentence(contents.card))
    assert "At 4 layers use depth_scale=lns: val_loss lower by 0.299" in use.answer
    assert use.answer.endswith("that at 2 layers has the lowest val_loss: 2.711, depth_scale=lns.")
    assert use.effect.startswith("-0.299 nat/token (-0.3") and use.verdict.startswith("lower, adjusted p ")
    assert (use.basis, use.figure) == ("equal tokens, 3 seeds", "effects")
    assert variance.answer == "At 4 layers depth_scale=lns lowers the residual variance."
    assert variance.effect.startswith("depth_scale=lns at 4 layers ×0.2") and variance.figure == "variance"
    assert depth.answer.endswith("no runs at equal FLOPs, so the cost of depth is not judged.")
    assert cost.answer.startswith(
        "depth_scale=lns: ×1 training FLOPs, ×1 parameters and ×1 active parameters, relative"
    )


def test_the_summary_states_the_findings(contents):
    assert contents.summary[0].startswith("Tests passed: in-sample with seeds (3 seeds, adjusted p ")
    assert contents.summary[1].startswith("Tests not run: ")
    assert "12 runs of 4 configurations finished, at n_layers 2, 4, with 3 seeds each." in contents.summary
    assert any("n_layers=4, depth_scale=lns: val_loss lower, -0.299 nat/token" in line for line in contents.summary)
    assert contents.summary[-1].startswith("2 runs diverged, failed or ended early")


def test_one_row_per_depth_has_the_recipe_its_evidence_and_cost(contents):
    table, note = contents.first
    names = ["n_layers", "use", "lr", "seeds", "val_loss", "gain", "detectable", "training FLOPs"]
    assert [column.name for column in table.columns][:8] == names
    rows = texts(table)
    assert [row[:2] for row in rows] == [["2", "depth_scale=lns"], ["4", "depth_scale=lns"]]
    for row in rows:
        assert row[3] == "3" and row[5].startswith("-0.299 nat/token (95% interval -0.3") and row[7] == "x1"
    assert "baseline: depth_scale=none" in note
    assert any("are shown to be lower or higher" in line for line in contents.summary)


def test_a_search_has_no_card_effects_or_links(tmp_path):
    """No proposal is a baseline: no recipe, no effects; what was best, and what tells more."""
    for lr, loss in ((0.001, 2.5), (0.002, 2.0), (0.004, 2.25)):
        make_run(tmp_path, RunConfig(n_layers=6, lr=lr), {"val_loss": loss})
    axes = {"lr": {"low": 0.001, "high": 0.01, "log": True}}
    definition = {"name": "s", "question": "q", "hypothesis": "h", "sampler": "tpe", "n_trials": 3, "space": axes}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(definition))
    with open_store(tmp_path) as store:
        contents = content(store, [tmp_path])
    assert (contents.card, contents.effects, contents.links) == (None, None, ())
    (best,) = contents.answers
    assert (best.answer, best.figure) == ("Best of 3 proposals: val_loss 2 at n_layers=6, lr=0.002.", "slices")
    assert [row[0] for row in texts(contents.first[0])] == ["2"]
    assert contents.summary[0].startswith("A TPE search over lr, without a baseline")


def test_of_a_single_run_the_answers_are_what_it_reached(tmp_path):
    measured = {"val_loss": 2.5, "residual_variance_last": 12.0, "train_flops": 1e12}
    make_run(tmp_path, RunConfig(n_layers=6), measured | {"needed_layers": 4.0})
    with open_store(tmp_path) as store:
        answers = content(store, [tmp_path]).answers
    assert [line.answer for line in answers] == [
        "val_loss 2.5 nat/token after 6 layers.",
        "Last layer: 12 after 6 layers.",
        "4 of 6 layers are needed.",
        "1e+12 training FLOPs.",
    ]
    assert {(line.verdict, line.figure) for line in answers} == {("one run, not compared", "layer_profile")}


def test_of_a_single_run_that_diverged_no_answer_says_that_it_was_not_measured(tmp_path):
    make_run(tmp_path, RunConfig(n_layers=6), {"outcome": "diverged", "train_flops": 1e12})
    with open_store(tmp_path) as store:
        answers = [line.answer for line in content(store, [tmp_path]).answers]
    assert answers[0] == "val_loss is not known: the run diverged." and answers[3] == "1e+12 training FLOPs."


def test_of_runs_that_all_diverged_that_is_what_is_said(tmp_path):
    """And no advice names a depth of None, or leaves its reason out."""
    for seed, scale in itertools.product(range(2), ("none", "lns")):
        make_run(
            tmp_path, RunConfig(n_layers=6, depth_scale=scale, seed=seed), {"outcome": "diverged", "train_flops": 1e12}
        )
    with open_store(tmp_path) as store:
        found = content(store, [tmp_path])
        told = "all 4 complete runs diverged: run them again with a lower lr"
        assert [line.answer for line in found.answers[1:3]] == [told] * 2
        assert "0 runs of 0 configurations finished, at n_layers 6, with 0 seeds each." in found.summary
        assert found.card.provenance.command.startswith(f"sparsedepth recipe {tmp_path} --objective ")
        with pytest.raises(NothingToDraw, match=r"^no compute multiplier: no run has finished$"):
            FIGURES["ladder"].drawing(store)


def test_unknown_times_are_no_time(tmp_path):
    for seed in range(2):
        make_run(tmp_path, RunConfig(seed=seed), {"val_loss": 2.0}, manifest={"device": "cuda", "packages": {}})
    with open_store(tmp_path) as store:
        found = content(store, [tmp_path])
    assert [row[:2] for row in texts(found.provenance)] == [["device", "cuda"]]
    assert found.card.provenance.hours == {}


def test_the_best_depth_is_the_highest_where_higher_is_better(results):
    with open_store(results) as store:
        found = [content(store, [results], objective=name) for name in ("causal_score", "val_loss")]
    told = [of.answers[0].answer for of in found]
    assert "that at 2 layers has the highest causal_score" in told[0] and "has the lowest val_loss" in told[1]


def test_the_card_holds_all_its_fields(contents):
    advice = advice_of(contents.card)
    titles = ["Rule", "Settings", "Tests", "Provenance"]
    assert re.findall(r"<h4>(.*?)</h4>", advice["page"]) == titles
    assert len(advice["tests"]) == 5 and advice["paragraph"][-1].startswith("Seen only on corpus ")


def test_the_card_page_has_no_links(card, monkeypatch):
    hostile = "# a\n\n[b](http://evil) ![c](http://evil/c.png) <http://evil> <b>d</b>\n\n| e |\n| --- |\n| **f** |\n"
    monkeypatch.setattr(report_page, "card_markdown", lambda *_: hostile)
    page = report_page.card_html(card)
    assert "<h3>a</h3>" in page and "<td><strong>f</strong></td>" in page
    assert not re.search(r"<a |<img|<b>|href=|src=", page)


def verified(card, outcome):
    gain = card.recipe.changes[0].effect
    verification = Verification(seeds=(3, 4, 5), run_ids=(), gain=gain, outcome=outcome, ingredients=())
    return with_verification(card, verification)


@pytest.fixture(scope="module")
def card(results):
    with open_store(results) as store:
        runs = store.frame("select * from runs order by run_id")
    return derive_card(result_rows(runs), objective="val_loss", folders=[results])


def test_a_verification_is_shown_with_its_recipe(results, card):
    with open_store(results) as store:
        contents = content(store, [results], verified=verified(card, "not confirmed"))
    gain = effect_text(card.recipe.changes[0].effect)
    assert f"The recipe was not confirmed on fresh seeds 3, 4, 5: val_loss {gain}." in contents.summary
    advice = advice_of(contents.card)
    assert {test.name: test.outcome for test in advice["tests"]}["fresh seeds"] == "failed"
    assert "not confirmed on fresh seeds 3, 4, 5" in advice["page"]


def test_the_tables_hold_the_rows(contents):
    names = [column.name for column in contents.runs.columns]
    assert names[0] == "run_id" and "depth_scale" in names and "permutation_score" not in names
    assert len(contents.runs.rows) == 13
    (diverged,) = [row for row in contents.runs.rows if row[names.index("outcome")].text == "diverged"]
    missing = diverged[names.index("val_loss")]
    assert (missing.text, missing.key) == ("–", "")
    losses = [row for row in texts(contents.effects) if row[0] == "val_loss"]
    assert [row[2] for row in losses] == ["2", "4"]
    assert {(row[3], row[4], row[7], row[8]) for row in losses} == {("-0.299", "–", "nat/token", "lower")}
    ratios = [row for row in texts(contents.effects) if row[0] == "residual_variance_last"]
    assert {(row[3], row[4][0], row[7]) for row in ratios} == {("–", "×", "ratio")}
    assert {row[0] for row in texts(contents.methods)} >= {"val_loss", "residual_variance_last", "causal_score"}


def test_failures_by_cause(contents):
    assert {(row[0], row[1]) for row in texts(contents.failures)} == {("1", "diverged"), ("1", "failed")}


def test_provenance_shows_known_facts_only(contents):
    facts = {row[0]: row[1:] for row in texts(contents.provenance)}
    assert facts["code"] == ["sparsedepth 0.1, commit abc with uncommitted changes", "12"]
    assert facts["packages"] == ["torch 2.13.0", "13"]
    assert "secret" not in str(contents.provenance)
    assert len(contents.run_ids) == 13


def test_numbers_sort_as_numbers_and_stand_with_equal_decimals():
    """Of one unit; a unit of small values has decimals of its own."""
    sizes = [TableCell("-0.113", -0.113), TableCell("+0.0521", 0.0521), TableCell("+0.0608", 0.0608)]
    ratios = [TableCell("×12.1", 12.1, "r"), TableCell("×0.4", 0.4, "r"), cell(None)]
    table = table_of(
        {"size": "", "ratio": "", "worth": ""}, zip(sizes, ratios, ["x1.2 (1 to 2)", "x0.9", None], strict=True)
    )
    assert [column.is_number for column in table.columns] == [True, True, True]
    assert texts(table) == [["-0.1130", "×12.1", "x1.2 (1 to 2)"], ["+0.0521", "×0.4", "x0.9"], ["+0.0608", "–", "–"]]
    assert [row[2].key for row in table.rows] == [1.2, 0.9, ""]


def test_a_small_outlier_keeps_its_digits_and_an_id_is_a_text():
    """To two decimals 0.0061 would be 0.01."""
    ids = ("903939903e73", "123456789012", "0a0000000000", "000000000001", "00000000e001")
    table = table_of({"size": "", "run_id": ""}, zip((12.34, 23.45, 34.56, 45.67, 0.0061), ids, strict=True))
    assert [row[0] for row in texts(table)] == ["12.34", "23.45", "34.56", "45.67", "0.006100"]
    assert [column.is_number for column in table.columns] == [True, False]
    assert [row[1].key for row in table.rows] == [*ids]


def test_columns_are_numeric_only_if_every_known_cell_is():
    table = table_of({"a": "", "b": ""}, [(1, "x"), (None, 2)])
    assert [column.is_number for column in table.columns] == [True, False]
    assert [cell(value).text for value in (12_345, 1.0, 0.1 + 0.2, 2e12, True, "a\nb", float("nan"))] == [
        "12,345", "1", "0.3000", "2.000e+12", "true", "a\\nb", "–",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def page_of_two_figures(results, tmp_path_factory):
    """Two small ones stand for all: drawing is tested with the plots. The page, and the bytes that were said."""
    path = tmp_path_factory.mktemp("page") / "a.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "FIGURES", {name: FIGURES[name] for name in ("variance", "learning_rate")})
        size = write_report([results], path)
        yield path, size


def test_hostile_names_are_escaped_and_nothing_is_loaded(page_of_two_figures):
    page = page_of_two_figures[0].read_text()
    assert "<script>window.hostile" not in page and "&lt;script&gt;window.hostile" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#|https://arxiv.org/abs/[0-9.]+["'])[^"']*""", page)
    assert not re.findall(r"@import|url\((?!#)", page)
    assert page.count("<script>") == 1 and page.count("<script") == 1 + page.count('<script type="application/json">')
    assert "default-src 'none'" in page
    assert "Not drawn: learning_rate" in page and 'href="https://arxiv.org/abs/2603.15389"' in page


def test_the_same_results_give_the_same_file(results, page_of_two_figures, tmp_path):
    path, size = page_of_two_figures
    assert size == write_report([results], tmp_path / "b.html") == path.stat().st_size < 1_000_000
    assert path.read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_wrong_input_is_refused_before_a_picture_is_drawn(results, card, tmp_path, monkeypatch):
    monkeypatch.setattr(report_page, "draw_pictures", lambda *_: pytest.fail("drawn"))
    out = tmp_path / "page.html"
    path = write_card(tmp_path / "card", card)
    with pytest.raises(ValueError, match="holds no verification"):
        write_report([results], out, card=path)
    (change,) = card.recipe.changes
    other = change.model_copy(update={"effect": change.effect.model_copy(update={"setting": "weight_decay=1"})})
    stranger = card.model_copy(update={"recipe": card.recipe.model_copy(update={"candidates": (other,)})})
    path = write_card(tmp_path / "card", verified(stranger, "confirmed"))
    with pytest.raises(ValueError, match=r"verified weight_decay=1 .* recommend depth_scale=lns at"):
        write_report([results], out, card=path)


def test_a_store_of_measured_models_alone(results, tmp_path, monkeypatch):
    with open_store(results) as store:
        runs = store.frame("select * from runs order by run_id")
    unknown = ["train_tokens", "outcome", "n_layers", "seed", "depth_scale"]
    runs[unknown] = None
    runs["model"] = "gpt2"

    monkeypatch.setattr("sparsedepth.report.content.all_runs", lambda store: runs)
    monkeypatch.setattr("sparsedepth.report.content.table_of_models", lambda *_: None)  # it reads the store itself
    contents = content(SimpleNamespace(damaged=()), [tmp_path])
    assert contents.card is None and contents.effects is None
    assert contents.summary == ("13 models measured without a known training configuration.",)


def test_with_three_budgets_effects_on_the_loss_have_their_worth_in_compute(tmp_path):
    """LNS does what the baseline does with 1.3 times the compute."""
    folder = budget_results(tmp_path / "results")
    with open_store(folder) as store:
        of = content(store, [folder])
        worths = {(4, "depth_scale=lns", 10**9): (9.0, None, None)}  # at a budget that is not that of the effects
        elsewhere = table_of_effects(effects_of(store), cells_of_store(store), worths)
    place = [column.name for column in of.effects.columns].index("compute")
    assert [row[place].key for row in of.effects.rows if row[0].text == "val_loss"] == pytest.approx([1.3, 1.3], 0.02)
    assert {row[place].text for row in of.effects.rows if row[0].text != "val_loss"} <= {"–"}
    assert {row[place].text for row in elsewhere.rows} == {"–"}
    assert "times the compute" in of.answers[1].answer  # that on depth is the first, as it has runs at equal FLOPs


def test_into_a_folder_the_report_is_report_html(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report_page, "write_report", lambda folders, out, *rest: out.write_text("page"))
    report([tmp_path], tmp_path)
    assert (tmp_path / "report.html").read_text() == "page" and "report.html" in capsys.readouterr().out


def test_a_number_of_arxiv_is_a_link_and_all_else_text():
    found = report_page.linked("as in 2603.15389, <b>1.2345</b> and 9999.12345")
    link = '<a href="https://arxiv.org/abs/2603.15389">2603.15389</a>'
    assert found == f"as in {link}, &lt;b&gt;1.2345&lt;/b&gt; and 9999.12345"
