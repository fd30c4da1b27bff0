"""The page of a ladder: four answers and a table, by the numbers of `judge`; of shapes, those of `scaling depth`."""

import numpy as np
import pytest
from support.made_up_runs import MANIFEST, make_run
from support.report_pages import ladder
from support.shape_ladders import shapes

from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.judge_ladder import judge_ladder
from sparsedepth.report.content import content
from sparsedepth.scaling.shapes import shapes_answer
from sparsedepth.scaling.speedup import ladder_of_store
from sparsedepth.store.connection import open_store
from sparsedepth.words.answers import OF_A_LADDER, OF_SHAPES, ladder_line
from sparsedepth.words.scaling import NO_TIMES, shapes_lines


def test_the_page_of_a_ladder_answers_what_it_is_worth(tmp_path):
    """Each budget four times the one before lowers the loss by .3, LNS by .05: a sixth of ln 4 is a factor of 1.26."""
    ladder(tmp_path)
    with open_store(tmp_path) as store:
        of = content(store, [tmp_path])
        (record,) = judge_ladder(ladder_of_store(store).losses, "baseline", {}).table.records()
    worth, drift, beyond, cost = of.answers
    assert tuple(line.question for line in of.answers) == OF_A_LADDER
    assert worth.answer.startswith("depth_scale=lns: worth 1.26 times the compute (1.25 to 1.27) at every size")
    assert worth.verdict.startswith("better, adjusted p 0.0") and worth.figure == "ladder"
    assert drift.verdict.startswith("drift not shown, p 0.") and " at 1e12, 1.26 (" in drift.answer
    assert beyond.answer.endswith("at 2.6e14 FLOPs, four times the largest budget.")
    assert cost.verdict == "counted"
    assert of.card is None, "a recipe of one seed recommends nothing, where the law says what LNS is worth"
    assert not any("shown" in line for line in of.summary), "of one budget alone no effect is shown"
    table, caption = of.first
    names = [column.name for column in table.columns]
    assert caption == "What each setting is worth in compute; baseline: depth_scale=none"
    assert names[:4] == [
        "variant",
        "multiplier",
        "lo",
        "hi",
    ]
    (row,) = table.rows
    assert [row[names.index(name)].key for name in ("multiplier", "hi", "p_drift", "beyond")] == [
        record[name] for name in ("multiplier", "hi", "p_drift", "beyond")
    ]
    assert all(column.is_number for column in table.columns if column.name not in ("variant", "verdict"))


def test_what_a_ladder_does_not_tell_is_said():
    unknown = dict.fromkeys(("p_adjusted", "p_drift", "beyond", "time_multiplier", "lo"))
    record = {"variant": "a", "verdict": "not shown", "multiplier": 1.1, "reason": "one budget"} | unknown
    lines = [ladder_line(question, record) for question in OF_A_LADDER]
    assert [line.verdict for line in lines] == ["not shown", "not known", "not extrapolated", "counted"]
    assert lines[0].answer == "a: about 1.1 times the compute; not shown: one budget."
    timed = record | {"time_multiplier": 1.05, "time_lo": 1.01, "time_hi": 1.1}
    assert ladder_line(OF_A_LADDER[3], timed).answer == "Worth 1.05 times the time (1.01 to 1.1)."


@pytest.mark.parametrize("device", ["cuda (H200)", "cpu (x86_64)"])
def test_the_speed_of_a_ladder_is_compared_at_each_budget_but_not_of_a_cpu(tmp_path, device):
    """LNS trains at 8/10, 9/10, 8/10 and 9/10 of the speed."""
    for size, depth in enumerate((4, 6, 8, 12)):
        for scale in ("none", "lns"):
            config = RunConfig(n_layers=depth, d_model=32 * (size + 1), depth_scale=scale, train_tokens=81920 * 2**size)
            speed = 1000.0 * (0.8 + 0.1 * (size % 2) if scale == "lns" else 1.0)
            curve = {"step": 10, "tokens": 81920, "tokens_per_second": speed}
            loss = {"val_loss": 3 - 0.3 * size - 0.05 * (scale == "lns"), "train_flops": 1e12 * 4**size}
            make_run(tmp_path, config, loss, curves=[curve], manifest={**MANIFEST, "device": device})
    with open_store(tmp_path) as store:
        speeds = ladder_of_store(store).log_speeds["depth_scale=lns"]
        cost = content(store, [tmp_path]).answers[3]
    if device.startswith("cpu"):
        assert not len(speeds) and cost.answer == f"Both are compared at equal FLOPs; {NO_TIMES}."
        return
    assert np.exp(speeds).tolist() == [0.8, 0.9, 0.8, 0.9]
    assert cost.answer.startswith("Worth 1.07 times the time (") and cost.verdict == "measured"


def test_the_page_of_shapes_answers_how_deep_for_its_width(tmp_path):
    for row in shapes(np.random.default_rng(2), (0.0, 0.0, 0.0)).itertuples():
        config = RunConfig(
            n_layers=row.n_layers, d_model=row.d_model, n_heads=4, train_tokens=row.tokens // 8192 * 8192
        )
        make_run(tmp_path, config, {"val_loss": row.loss, "train_flops": row.flops, "tokens_trained": row.tokens})
    with open_store(tmp_path) as store:
        of, found = content(store, [tmp_path]), shapes_answer(store)
    assert tuple(line.question for line in of.answers) == OF_SHAPES
    best, doublings = of.answers
    lines = shapes_lines(found)
    assert best.answer.lower() == f"{lines[1]}.".lower() and doublings.answer.count(";") == len(lines) - 4
    assert best.verdict.startswith("a move ") and of.first[1] == lines[0]
    assert [row[1].key for row in of.first[0].rows] == [2**one.estimate for one in found.best]
