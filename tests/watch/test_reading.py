"""Watched trainings as every command reads them: made-up points, of two settings with three seeds and three steps."""

import pandas as pd
import pytest
from support.plain_loop import held_out
from support.report_folder import fill as fill_sweep

import sparsedepth as sd
from sparsedepth.config.run import RunConfig
from sparsedepth.measure.measurements import Measurements
from sparsedepth.model.decoder import Decoder
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.watch.points import Points, Training

FIELDS = {"n_layers": 4, "d_model": 16, "vocab_size": 32}


def fill(folder, tokens_per_step=64, last=(30, 30, 30), name="{setting}-{seed}"):
    """The causal score of LNS is higher by .2 at step 10, .1 at 20 and .3 at 30; the baseline's is .5 at each."""
    for setting, gains in (("baseline", (0, 0, 0)), ("lns", (0.2, 0.1, 0.3))):
        for seed, end in enumerate(last):
            fields = {**FIELDS, **({"depth_scale": "lns"} if setting == "lns" else {}), "seed": seed}
            training = Training(
                name=name.format(setting=setting, seed=seed), fields=fields, tokens_per_step=tokens_per_step,
                n_params=1000, data_hash="0" * 12,
            )  # fmt: skip
            points = Points(folder, training)
            for step, gain in zip((10, 20, 30), gains, strict=True):
                if step > end:
                    continue
                found = Measurements(step=step)
                score = 0.5 + gain + 0.001 * seed + 0.002 * (seed == 1) * (setting == "lns")
                found.summary.update(causal_score=score, causal_score_lo=score, causal_score_hi=score)
                found.summary.update(residual_variance_last=float(step), val_loss=3 - gain + 0.01 * seed)
                found.add_layers("residual_variance", [1.0, 2.0, 3.0, 4.0, float(step)], 128, first=0)
                found.add_layers("causal_effect", [score, score, score, None], 128)
                points.write(step, {"measure_tokens": 128, "fit_tokens": 128}, found, 0.1, "cpu")
    return folder


@pytest.mark.parametrize("tokens_per_step", [64, None])
def test_effects_compare_the_last_point_that_trainings_have_in_common(tmp_path, command, tokens_per_step):
    """At step 30 the scores differ by .3, .302 and .3, by their seeds."""
    fill(tmp_path, tokens_per_step)
    command("effects", tmp_path, "--by", "causal_score", "--format", "csv", "-o", tmp_path / "effects.csv")
    rows = pd.read_csv(tmp_path / "effects.csv")
    (row,) = rows[rows["setting"] == "depth_scale=lns"].to_dict("records")
    assert row["estimate"] == pytest.approx(0.3 + 0.002 / 3) and row["verdict"] == "higher"
    text = command("effects", tmp_path)[0]
    assert "depth_scale=lns" in text and "train_tokens" not in text


def test_a_decoder_of_ours_is_read_with_the_fields_that_its_config_states(tmp_path):
    """Lists and mappings among them, as columns of runs have them."""
    config = RunConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=32, seq_len=16)
    settings = {"lr": 0.01, "lr_of": {"embed": 0.5}}
    watch = sd.watch(Decoder(config, 0), held_out(), out=tmp_path, seed=3, settings=settings, measures=["loss"])
    watch(1000)
    with sd.open_store(tmp_path) as store:
        (row,) = store.sql("select d_ff, norm, lr, lr_of, allow, seed, steps, val_loss > 0 from runs").rows
    assert row == (32, "pre", 0.01, '[["embed", 0.5]]', "[]", 3, 1000, True)


def test_the_common_point_is_the_largest_that_most_have(tmp_path):
    fill(tmp_path, last=(20, 20, 30))
    with sd.open_store(tmp_path) as store:
        rows = store.sql("select cluster, steps, tuning from runs order by cluster, steps").rows
    compared = [(cluster, steps) for cluster, steps, tuning in rows if tuning is None]
    assert compared == [(f"{setting}-{seed}", 20) for setting in ("baseline", "lns") for seed in range(3)]
    assert len(rows) == 14 and {tuning for *_, tuning in rows} == {None, "earlier"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("watched") / "results")


def test_query_best_and_figures_read_them(folder, command, tmp_path):
    out = command("query", folder, "select step, max(value) from layers where layer = 4 group by 1 order by 1")[0]
    assert [line.split() for line in out.splitlines()[2:5]] == [["10", "10"], ["20", "20"], ["30", "30"]]
    best = sd.best(folder, by="causal_score")
    assert list(best["setting"]) == ["depth_scale=lns", "baseline"] and list(best["seeds"]) == [3, 3]
    history = sd.plot(folder, figure="history").drawings["history"].data
    lns = history[(history["panel"] == "causal_score") & (history["setting"] == "depth_scale=lns")]
    assert lns["x"].tolist() == [640, 1280, 1920]
    assert lns["mean"].tolist() == pytest.approx([score + 0.001 + 0.002 / 3 for score in (0.7, 0.6, 0.8)])
    by_layer = sd.plot(folder, figure="by_layer").drawings["by_layer"].data
    variance = by_layer[by_layer["panel"] == "residual_variance"]
    assert variance["mean"].tolist() == pytest.approx([2, 3, 4, 30]) and set(variance["n_seeds"]) == {3}
    command("pack", folder, "-o", tmp_path / "packed")
    with sd.open_store(tmp_path / "packed") as store:
        assert store.sql("select count(*), count(tuning) from runs").rows == ((18, 12),)


def test_there_is_no_history_without_a_watched_training(tmp_path):
    fill_sweep(tmp_path)
    with pytest.raises(NothingToDraw, match="there are no points of a training"):
        sd.plot(tmp_path, figure="history")


@pytest.mark.slow
def test_report_recipe_and_questions_read_them(folder, command, tmp_path):
    command("plot", folder, "-o", tmp_path / "figures", "--figure", "all")
    command("report", folder, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "depth_scale=lns" in page and "history" in page
    assert "depth_scale=lns" in command("recipe", folder)[0]
    for ask in ("variance", "depth"):
        assert command("query", folder, "--ask", ask)[0]
