"""What is said of runs, of the search they come from and of scores, from records made by hand."""

from pathlib import Path
from types import SimpleNamespace

from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.degeneracy import LayerMetrics
from sparsedepth.store.setting import Progress
from sparsedepth.store.subject import Imported
from sparsedepth.words.degeneracy import layer_metrics_caption
from sparsedepth.words.differences import data_text, only_tuning_text, pending_text
from sparsedepth.words.runs import damage_text, import_note, layers_hint, search_text, version_text


def test_packages_of_several_versions_are_named_with_their_runs():
    counts = {"torch": {"2.12": 1, "2.11": 3}, "numpy": {"2.1": 4, "2.2": 0}}
    said = "packages differ between the runs: numpy 2.1 (4 runs), 2.2 (here); torch 2.11 (3 runs), 2.12 (1 run)"
    assert version_text(counts) == said and version_text({}) == ""
    assert "\x1b" not in version_text({"torch": {"\x1b[31m": 1, "2": 1}})


def test_imported_runs_are_told_with_what_is_unknown():
    found = Imported(2, {"paper B", "paper A"}, {"lr", "seed", "top_k"})
    wanted = "2 runs are imported from paper A, paper B, with 3 of their choices unknown (seed, lr, ...)"
    assert import_note(found) == wanted and import_note(None) == ""
    assert import_note(Imported(1, {"paper"}, {"lr"})).startswith("1 run is imported from paper, with 1 of their")
    assert import_note(Imported(3, {WATCHED}, {"lr"})).startswith("3 runs are of a loop elsewhere, with 1 of their")


def test_a_search_is_named_by_its_sampler():
    search = SimpleNamespace(sampler="tpe", objectives=("val_loss", "train_flops"), varied=("lr", "top_k"))
    said = search_text(search)
    assert said.startswith("a TPE search over lr, top_k, without a baseline; the best of many is optimistic, and which")
    assert "front" not in search_text(SimpleNamespace(sampler="random", objectives=("val_loss",), varied=("lr",)))


def test_only_a_number_of_layers_has_a_hint():
    assert "--by needed_layers`" in layers_hint("needed_layers")
    assert layers_hint("val_loss") == layers_hint("no_column") == ""


def test_tuning_is_told_as_far_as_its_plan_is_known():
    assert only_tuning_text(Progress(3, 30)) == "only tuning runs are complete so far (3 of 30)"
    assert only_tuning_text(Progress(3, 0)) == "only tuning runs are complete so far (3)"
    assert only_tuning_text(None) == ""


def test_data_that_differ_are_named():
    said = "configurations differ in corpus, tokenizer: losses on different data are not comparable"
    assert data_text(SimpleNamespace(data=("corpus", "tokenizer"))) == said
    assert data_text(SimpleNamespace(data=())) == ""


def test_metrics_divided_by_a_small_loss_are_told():
    found = LayerMetrics({"affine_loss_increase": "affine_loss_added", "skip_loss_increase": "skip_loss_increase"}, [])
    why = "(it is relative to a loss below 0.1 nat/token)"
    assert layer_metrics_caption(found, 0.1) == f" Drawn in place of affine_loss_increase {why}: affine_loss_added."
    alone = LayerMetrics({"skip_loss_increase": "skip_loss_increase"}, ["skip_loss_increase"])
    assert layer_metrics_caption(alone, 0.1) == f" No evidence {why}: skip_loss_increase."


def test_damaged_runs_are_counted_and_the_first_five_named():
    damaged = [DamagedRun(Path(f"runs/{number:012x}"), "summary.json", "is missing") for number in range(7)]
    assert damage_text(damaged[:1]) == "1 damaged run left out: 000000000000 (summary.json)"
    assert damage_text(damaged).endswith("000000000004 (summary.json) and 2 more") and damage_text([]) == ""


def test_how_many_planned_runs_are_pending():
    assert pending_text(Progress(3, 8)) == "pending: 5 of the 8 planned runs are not complete (sparsedepth status)"
    assert pending_text(None) == ""
