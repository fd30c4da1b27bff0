"""The front by hand: dominated cells, ties, intervals over seeds, diverged cells left out."""

import itertools
from pathlib import Path

import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of, labelled_grid as grid

from sparsedepth.plots.points import front, pareto
from sparsedepth.quantities import axis_label
from sparsedepth.store.connection import open_store
from sparsedepth.store.saved_queries import ask


def summary(config):
    shift = {0.0: 0.0, 0.1: 0.2, 0.3: 0.1}[config.weight_decay]
    return {
        "val_loss": 3.0 + shift + 0.01 * config.seed,
        "usefulness": 0.1 if config.weight_decay == 0.3 else 0.05,
        "train_flops": 1e12,
    }


def test_cells_are_means_over_seeds():
    best = front(grid({"weight_decay": [0.0, 0.1, 0.3], "seed": [0, 1, 2]}, summary, n_layers=4))
    cells = best.data.set_index("kind")
    assert best.data["n_seeds"].tolist() == [3, 3, 3]
    assert cells.loc["baseline", "val_loss"] == pytest.approx(3.01)
    assert cells.loc["baseline", "val_loss_hi"] == pytest.approx(3.01 + 4.302653 * 0.01 / 3**0.5)
    by_value = best.data.sort_values("val_loss")["on_front"].tolist()
    assert by_value == [True, True, False]  # lowest loss; more useful; beaten in both


def test_the_proposals_of_a_search_have_no_baseline():
    best = front(grid({"weight_decay": [0.0, 0.1, 0.3], "seed": [0, 1]}, summary, n_layers=4), objectives=["val_loss"])
    assert best.data["kind"].tolist() == ["proposal"] * 3
    assert best.page().get_supxlabel().startswith("3 proposals, mean over seeds.")
    best = front(grid({"weight_decay": [0.0, 0.1, 0.3]}, summary, n_layers=4), objectives=["val_loss"])
    assert best.page().get_supxlabel().startswith("3 proposals, one seed each.")


def test_the_front_of_a_search_is_that_of_its_own_objectives():
    """Loss 1, 2, 3 (lower is better) and variance 9, 4, 5: the third is beaten in both. Usefulness is not asked for."""
    values = {0.0: (1.0, 9.0), 0.1: (2.0, 4.0), 0.3: (3.0, 5.0)}

    def summary(config):
        loss, variance = values[config.weight_decay]
        return {"val_loss": loss, "residual_variance_last": variance, "usefulness": loss, "train_flops": 1e9 * loss}

    runs = grid({"weight_decay": [*values]}, summary, n_layers=4)
    best = front(runs, objectives=["val_loss", "residual_variance_last"])
    assert dict(zip(best.data["val_loss"], best.data["on_front"], strict=True)) == {1.0: True, 2.0: True, 3.0: False}
    (axis,) = best.page().axes
    assert axis.get_xlabel() == axis_label("residual_variance_last") and axis.get_xscale() == "log"
    assert axis.get_ylabel() == axis_label("val_loss") and axis.get_yscale() == "linear"
    four = ["val_loss", "residual_variance_last", "usefulness", "train_flops"]
    page = front(runs, objectives=four).page()
    assert len(page.axes) == 6 and {axis.get_xlabel() for axis in page.axes} >= {axis_label("train_flops")}


def test_diverged_and_unmeasured():
    runs = grid({"weight_decay": [0.0, 0.1, 0.3], "seed": [0, 1]}, summary, n_layers=4)
    runs.loc[(runs["weight_decay"] == 0.3) & (runs["seed"] == 1), "outcome"] = "diverged"
    runs["usefulness"] = None
    best = front(runs)
    page = best.page()
    said = " ".join(page.get_supxlabel().split())
    assert len(best.data) == 2 and len(page.axes) == 1 and "1 configuration with a diverged run" in said
    assert "joint Pareto front of train_flops, val_loss. Line" in said


def test_configurations_that_lack_a_quantity_of_the_others_are_told():
    """As those of another folder, which did not measure usefulness."""
    runs = grid({"weight_decay": [0.0, 0.1, 0.3], "seed": [0, 1]}, summary, n_layers=4)
    runs.loc[runs["weight_decay"] == 0.3, "usefulness"] = None
    best = front(runs)
    said = " ".join(best.page().get_supxlabel().split())
    assert len(best.data) == 2 and "Not shown: 1 configuration without all of these quantities." in said


def test_one_budget_is_no_panel_but_told():
    """Costs that differ by a router's weights are one. Alone it is drawn."""
    runs = grid({"weight_decay": [0.0, 0.1, 0.3]}, summary, n_layers=4)
    runs["train_flops"] *= [1.0, 1.001, 1.0]
    (axis,) = (page := front(runs).page()).axes
    assert axis.get_xlabel() == axis_label("usefulness")
    assert "Not drawn, as it is the same everywhere: train_flops." in " ".join(page.get_supxlabel().split())
    runs["train_flops"] *= [1.0, 1.1, 1.0]
    assert len(front(runs).page().axes) == 3


@pytest.mark.parametrize(
    ("costs", "labels"),
    [([1e9, 1e9, 1e9], {"9e8", "9.6e8", "1.02e9", "1.08e9"}), ([1e9, 2e9, 7e9], {"1e9", "2e9", "5e9"})],
)
def test_cost_labels_are_distinct(costs, labels):
    """Costs that differ by nothing, or by a router's few weights, gave '1G 1G 1G'."""
    runs = grid({"weight_decay": [0.0, 0.1, 0.3]}, summary, n_layers=4)
    page = front(runs.assign(train_flops=[cost + 10 * i for i, cost in enumerate(costs)], usefulness=None)).page()
    page.canvas.draw()
    low, high = page.axes[0].get_xlim()
    ticks = zip(page.axes[0].get_xticks(), page.axes[0].get_xticklabels(), strict=True)
    assert {label.get_text() for at, label in ticks if low <= at <= high} == labels


def test_a_degenerate_score_is_replaced_by_its_sound_form():
    """Usefulness is relative to losses of 0.003 and less: what the blocks add to the loss is drawn in its place."""

    def solved(config):
        known = summary(config)
        absolute = {"affine_loss_added": 0.2 + 0.1 * config.seed, "bigram_loss": 4.0}
        return known | absolute | {"val_loss": known["val_loss"] / 1000, "usefulness": 1e-5 * config.seed}

    best = front(grid({"weight_decay": [0.0, 0.1, 0.3], "seed": [0, 1]}, solved, n_layers=4))
    page = best.page()
    said = " ".join(page.get_supxlabel().split())
    assert "joint Pareto front of train_flops, val_loss, affine_loss_added. Line" in said
    assert "in place of usefulness (it is relative to a loss below 0.1 nat/token)" in said
    assert page.axes[1].get_ylabel().startswith("loss added with the layer")


def test_the_figure_and_the_saved_question_have_one_front():
    with open_store(Path(__file__).parents[2] / "results" / "quickstart") as store:
        answer, drawn = ask(store, "pareto"), pareto(store).data
    assert {row["cell_id"] for row in answer.records()} == set(drawn.loc[drawn["on_front"], "cell_id"])


def test_an_interval_ends_at_the_least_and_largest_value_of_its_quantity():
    """As in `best`: Student's interval of three losses one apart, and of three shares, reaches beyond."""

    def values(config):
        return {"val_loss": 0.5 + config.seed, "usefulness": 1 - 0.2 * config.seed, "train_flops": 1e9}

    cells = front(grid({"weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}, values, n_layers=4)).data
    assert (cells["val_loss_lo"] == 0).all() and (cells["usefulness_hi"] == 1).all()


def test_a_setting_has_one_name_at_all_budgets(tmp_path):
    """Its tokens are a cost, on an axis of the figure, and no part of its name."""
    for tokens, decay in itertools.product((8192, 16384), (0.0, 0.1)):
        known = {"val_loss": 3.0 - tokens / 16384 + decay, "usefulness": decay, "train_flops": 1e6 * tokens}
        make_run(tmp_path, config_of(weight_decay=decay, train_tokens=tokens), known)
    with open_store(tmp_path) as store:
        kinds = pareto(store).data["kind"]
    assert sorted(kinds) == ["baseline", "baseline", "weight_decay=0.1", "weight_decay=0.1"]
