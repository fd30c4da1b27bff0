"""The forecast of a loss against the tables of its text: our own results lie in it, and it says when they cannot."""

from pathlib import Path

import pytest

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.plan.forecast import RATIOS, SPREAD, STEPS, forecast, tokens_needed
from sparsedepth.store.connection import open_store
from sparsedepth.words.price import forecast_lines

RESULTS = Path(__file__).parents[2] / "results"
RUNS = """select n_layers, d_model, n_heads, seq_len, batch_tokens, train_tokens, vocab_size,
median(unigram_loss) as unigram, median(bigram_loss) as bigram, median(val_loss) as loss from runs
where depth_scale = 'none' and n_experts = 0 and tuning is distinct from 'rejected' group by all"""


def of_steps(steps, vocab_size=264):
    return build(RunConfig, {"batch_tokens": 1024, "train_tokens": 1024 * steps, "vocab_size": vocab_size}, "t")


@pytest.mark.parametrize("name", ["budgets", "text_flops", "text_deep"])
def test_our_own_runs_lie_in_their_forecast(name):
    with open_store(RESULTS / name) as store:
        rows = store.frame(RUNS).to_dict("records")
    inside = []
    for row in rows:
        unigram, bigram, loss = (row.pop(key) for key in ("unigram", "bigram", "loss"))
        found = forecast(build(RunConfig, row, "t"), unigram, bigram, 1)
        inside.append(found.low <= loss <= found.high)
    assert len(inside) > 2 and sum(inside) >= 0.8 * len(inside)


def test_a_forecast_by_hand():
    """At 200 steps 0.92 times the table of pairs, at four times the vocabulary after twice the steps."""
    by_hand = (2.5 * (0.92 - SPREAD), 2.5 * (0.92 + SPREAD))
    for config in (of_steps(200), of_steps(400, 4 * 264)):
        found = forecast(config, 3.3, 2.5, 1)
        assert (found.low, found.high) == pytest.approx(by_hand)
    assert tokens_needed(of_steps(1)) == 1024 * 240  # a fifth of the way from 0.92 at 200 to 0.72 at 400
    assert len(STEPS) == len(RATIOS) and [*RATIOS] == sorted(RATIOS, reverse=True)


@pytest.mark.parametrize(("steps", "told"), [(30, "will not answer: 12"), (150, "may not"), (400, "can answer")])
def test_what_a_plan_says_of_a_forecast(steps, told):
    lines = forecast_lines([forecast(of_steps(steps), 3.3, 2.5, 4)])
    assert told in lines[-1] and ("train longer: about 245,760 tokens" in lines[-1]) == (steps < 400)
    assert forecast_lines([]) == []


@pytest.mark.parametrize(("passes", "told"), [(4, []), (8, ["8 times: new text"]), (17, ["17 times", "by heart"])])
def test_a_text_that_is_read_many_times_is_told(passes, told):
    lines = forecast_lines([forecast(of_steps(400), 3.3, 2.5, passes)])
    assert [word for word in ("8 times: new text", "17 times", "by heart") if word in " ".join(lines)] == told
    assert ("can answer" in lines[-1]) == (passes < 17)
