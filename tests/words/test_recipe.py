"""Sentences of a recipe from made-up records, word by word."""

from types import SimpleNamespace

import pytest

from sparsedepth.words.recipe import domain_text, held_out_text, nothing_finished, told_by_outcome


@pytest.mark.parametrize(
    ("corpora", "groups", "text"),
    [
        (["task:k_hop", "task:state_tracking"], ["A5"], "task k_hop, state_tracking of A5"),
        (["task:state_tracking"], ["S5", "A5"], "task state_tracking S5, A5"),
        (["stdlib", "task:k_hop"], ["A5"], "corpus stdlib, task:k_hop"),
        ([], [], "corpus unknown"),
    ],
)
def test_the_domain_names_a_task_with_its_groups_and_sizes_shortly(corpora, groups, text):
    sizes = {"width {}": (64.0, 64.0), "{} tokens": (288_000.0, 1_300_000.0)}
    said = domain_text(corpora, groups, sizes, ["cpu", "NVIDIA H200 (139 GB)", "cpu"])
    assert said == f"{text}, width 64, 288k to 1.3M tokens, CPU, NVIDIA H200"


def test_a_store_without_results_says_what_it_has():
    assert nothing_finished(3, 0, False) == "only tuning runs are complete so far (3)"
    assert nothing_finished(0, 0, True).startswith("no finished run: models that were only measured")
    assert nothing_finished(0, 0, False) == "no finished run"
    assert nothing_finished(0, 8, False) == "all 8 complete runs diverged: run them again with a lower lr"


def test_tests_are_told_by_outcome_where_there_is_little_room():
    tests = [
        SimpleNamespace(name=name, outcome=outcome, text=text)
        for name, outcome, text in (
            ("fresh seeds", "not run", "recipe verify CARD"),
            ("in-sample with seeds", "passed", "3 seeds"),
            ("equal cost", "passed", "FLOPs x1"),
        )
    ]
    assert told_by_outcome(SimpleNamespace(tests=tests)) == [
        "passed: in-sample with seeds (3 seeds), equal cost (FLOPs x1)",
        "not run: fresh seeds (recipe verify CARD)",
    ]


def test_what_smaller_depths_recommend_is_told_with_its_outcome_and_errors():
    of = {"fitted_on": (4, 8), "depth": 16, "outcome": "confirmed", "errors": (0.02, 0.05)}
    assert held_out_text(SimpleNamespace(**of, changes=("a=1", "b=2")), False) == (
        "4, 8 layers recommend a=1 and b=2; confirmed at 16; mean error of its predictions 0.02, "
        "of predicting no effect 0.05"
    )
    none = SimpleNamespace(**{**of, "errors": None}, changes=())
    assert held_out_text(none, False) == "4, 8 layers recommend no change at 16"
    other = SimpleNamespace(**{**of, "errors": None}, changes=("a=1",))
    assert held_out_text(other, True) == "4, 8 layers recommend a=1, not this recipe; confirmed at 16"
