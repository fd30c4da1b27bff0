"""`report --watch`: what is written while runs come in, what is never written, and how it ends."""

import os
import re
import signal
import threading
import time

import pytest
import yaml
from support.made_up_runs import make_run
from support.report_folder import HOSTILE, fill
from support.tiny_sweep import definition, start

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.tasks import Plan
from sparsedepth.plots.draw import FIGURES
from sparsedepth.report import page as report_page
from sparsedepth.report.page import WatchedReport, write_report
from sparsedepth.run.lease import hold
from sparsedepth.run.scratch import Scratch

RELOADS = "location.reload"


@pytest.fixture(autouse=True)
def one_figure(monkeypatch):
    """A small one stands for all: drawing is tested with the plots."""
    monkeypatch.setattr(report_page, "FIGURES", {"variance": FIGURES["variance"]})
    monkeypatch.setattr(report_page, "REST", 0.0)


@pytest.fixture
def sweep(tmp_path):
    """A results folder with a definition of four runs, none of them begun; and their configurations."""
    results = tmp_path / "results"
    results.mkdir()

    def planned(**fields):
        path = definition(tmp_path, **fields)
        (results / "sweep.yaml").write_text(path.read_text())
        return [*Plan(build(SweepDefinition, read_yaml(path), "test")).configs().values()]

    return results, planned


def page_of(results):
    return results.parent / "page.html"


def watched(results):
    page = WatchedReport([results], page_of(results), 2.0, None, "loss", None)
    rounds = page.rounds()
    return rounds, lambda: (next(rounds), page_of(results).read_text())[1]


def progress_of(text):
    """The words of the section on progress."""
    (section,) = re.findall(r'<section id="progress".*?</section>', text, re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", section).split())


def test_the_page_follows_a_sweep_from_an_empty_folder_to_the_report(sweep):
    results, planned = sweep
    rounds, write = watched(results)
    empty = write()
    assert "no runs yet" in progress_of(empty) and "No run is complete yet." in progress_of(empty)
    assert RELOADS in empty and 'data-seconds="2.0"' in empty and empty.endswith("</html>")
    configs = planned()
    assert "0% 0 complete, 0 running, 0 interrupted, 0 failed, 4 planned" in progress_of(write())
    work = Scratch(results, configs[0].run_id)
    work.folder.mkdir(parents=True)
    work.write_progress("training", 0.25, 3.14159, 754.0)
    with hold(work.lock):
        text = progress_of(write())
    of_run = f"running: n_layers={configs[0].n_layers} seed={configs[0].seed}"
    assert f"{of_run}: training, 25%, loss 3.142, about 12m34s left" in text and "6% 0 com" in text
    make_run(results, configs[0], {"val_loss": 2.5})
    text = write()
    assert "25% 1 complete" in progress_of(text) and "lowest single run: val_loss 2.5" in progress_of(text)
    assert '<section id="runs">' in text and text.count(configs[0].run_id) > 0
    for config in configs[1:]:
        make_run(results, config, {"val_loss": 3.0})
    assert list(rounds) == []
    last = page_of(results).read_text()
    write_report([results], results.parent / "report.html")
    assert last == (results.parent / "report.html").read_text() and RELOADS not in last


def test_a_page_with_only_tuning_runs(sweep):
    results, planned = sweep
    configs = planned(tune={"lr": [1e-3, 2e-3, 4e-3]}, tuning_seeds=[7, 8], seeds=[0])
    tuning = [config for config in configs if config.seed in (7, 8)]
    _, write = watched(results)
    assert len(tuning) == 12
    for config in tuning[:5]:
        make_run(results, config, {"val_loss": 3.0})
    text = write()
    assert all(config.run_id in text for config in tuning[:5]) and "5 complete" in progress_of(text)
    assert "5 runs of tuning, and none of the results yet." in text and "only measured" not in text
    assert '<section id="runs">' in text and '<section id="effects">' not in text


def test_half_written_and_damaged_runs_are_left_out_and_named(sweep):
    results, planned = sweep
    configs = planned()
    _, write = watched(results)
    half = make_run(results, configs[0], {"val_loss": 3.0})
    (half / "complete").unlink()
    (half / "summary.json").write_text('{"val_lo')
    assert half.name not in write()
    good = make_run(results, configs[1], {"val_loss": 2.5})
    bad = make_run(results, configs[2], {"val_loss": 1.2345})
    (bad / "summary.json").write_text((bad / "summary.json").read_text().replace("1.2345", "1.0345"))
    text = write()
    assert good.name in text and f"1 damaged run left out: {bad.name} (summary.json)" in text


def test_a_sweep_without_a_single_result_ends_with_its_causes(sweep):
    results, planned = sweep
    for config in planned():
        work = Scratch(results, config.run_id)
        work.folder.mkdir(parents=True)
        work.add_failure(HOSTILE)
        work.add_failure(HOSTILE)
    rounds, _ = watched(results)
    with pytest.raises(ValueError, match="no run is complete yet"):
        next(rounds)
    text = page_of(results).read_text()
    assert "failed 4 runs: &lt;script&gt;window" in progress_of(text).replace("#34;", "") and RELOADS not in text
    assert "<script>window" not in text


def test_a_reader_never_sees_a_part_of_the_page(sweep, monkeypatch):
    results, planned = sweep
    monkeypatch.setattr(report_page, "parts_of", lambda *_: None)
    configs = planned()
    rounds, write = watched(results)
    write()
    seen, is_over = [], threading.Event()

    def read():
        while not is_over.is_set():
            seen.append(page_of(results).read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for config in configs:
        make_run(results, config, {"val_loss": 3.0})
        next(rounds, None)
    is_over.set()
    reader.join()
    assert len(set(seen)) > 1
    assert all(text.startswith("<!doctype html>") and text.endswith("</html>") for text in seen)
    assert sorted(path.name for path in results.parent.glob("*page.html*")) == ["page.html"]


def test_rows_and_figures_are_made_for_new_runs_only_and_leave_time_to_the_sweep(sweep, monkeypatch):
    results, planned = sweep
    made = []
    monkeypatch.setattr(report_page, "parts_of", lambda *given: made.append(given) or None)
    configs = planned()
    _, write = watched(results)
    make_run(results, configs[0], {"val_loss": 3.0})
    write(), write()
    assert len(made) == 1
    make_run(results, configs[1], {"val_loss": 3.0})
    write()
    assert len(made) == 2
    monkeypatch.setattr(report_page, "REST", 1e9)
    make_run(results, configs[2], {"val_loss": 3.0})
    write()
    (results / "runs" / configs[0].run_id).rename(results / "elsewhere")
    write()
    assert len(made) == 3, "not due again"


def test_what_was_asked_is_checked_before_anything_is_written(sweep, tmp_path, command):
    results, _ = sweep
    fill(tmp_path / "other")
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ([results, "--objective", "val_los"], "did you mean 'val_loss'?"),
        ([results, "--objective", "n_layers"], "there is no measured quantity 'n_layers'"),
        ([results, "--card", tmp_path / "none.json"], "does not exist"),
        ([tmp_path / "none"], "is not an existing folder"),
        ([tmp_path / "file"], "is a file, which does not change"),
    ):
        assert message in command("report", *arguments, "-o", tmp_path / "page.html", "--watch", 1, code=2)[1]
    assert not (tmp_path / "page.html").exists()


def test_a_search_without_a_value_of_its_objective_is_watched_on(sweep):
    """A search whose first run has no objective, beside a folder that holds no configuration."""
    results, planned = sweep
    searched = {"sampler": "tpe", "n_trials": 9, "space": {"lr": {"low": 1e-3, "high": 1e-2, "log": True}}}
    planned(**searched, objectives=["usefulness"], seeds=[0])
    base = yaml.safe_load((results / "sweep.yaml").read_text())["base"]
    _, write = watched(results)
    make_run(results, RunConfig(**{**base, "lr": 0.003}), {"val_loss": 1.0})
    Scratch(results, "0123456789ab").folder.mkdir(parents=True)
    (results / "work" / "0123456789ab" / "config.yaml").write_text("{}")
    text = write()
    assert "1 complete" in progress_of(text) and "(at most 9 in total" in progress_of(text)
    assert RELOADS in text and '<section id="runs">' in text


def test_ctrl_c_ends_it_with_a_page_that_is_no_longer_loaded_again(sweep):
    results, planned = sweep
    planned()
    process = start("report", results, "-o", page_of(results), "--watch", 0.2)
    assert "rewritten every 0.2 s until no run is left" in process.stdout.readline()
    until = time.monotonic() + 60
    while not page_of(results).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert RELOADS in page_of(results).read_text()
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "")
    text = page_of(results).read_text()
    assert RELOADS not in text and "This page is no longer written." in progress_of(text)
    assert sorted(path.name for path in results.parent.glob("*page.html*")) == ["page.html"]
