"""`sparsedepth export` and `sparsedepth evaluate`, as a user runs them."""

import json

import pytest
import transformers
from support.run_folders import loud_run, write_task

from sparsedepth.plots.models import removal
from sparsedepth.store.connection import open_store

TEXT = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
METRICS = {"metric_list": [{"metric": "bits_per_byte"}]}


def test_export_says_what_it_made_and_refuses_in_one_line(tmp_path, command):
    run = loud_run(tmp_path, depth_scale="lns")
    out, err = command("export", run, "-o", tmp_path / "out")
    assert "a llama model" in out and "LayerNorm Scaling" in out and err == ""
    assert "logits differ by" in out and f", in transformers {transformers.__version__}\n" in out
    _, err = command("export", run, "-o", tmp_path / "out", code=2)
    assert "not an empty folder" in err and err.count("\n") == 1
    _, err = command("export", loud_run(tmp_path, norm="deepnorm"), "-o", tmp_path / "other", code=2)
    assert "norm='deepnorm'" in err and err.count("\n") == 1 and not (tmp_path / "other").exists()


def test_evaluate_keeps_scores_and_redoes_only_what_is_missing(tmp_path, command):
    pytest.importorskip("lm_eval")
    run = loud_run(tmp_path)
    for name, text in (("first", "1 times 2 is 2."), ("second", "2 times 2 is 4.")):
        write_task(tmp_path, name, [{"text": text}, {"text": text * 2}], **TEXT, **METRICS)
    asked = ("evaluate", run, "--include-path", tmp_path, "--tasks")
    out, _ = command(*asked, "first")
    assert "first (version 1.5): 2 documents  written:" in out and "bits_per_byte" in out
    out, _ = command(*asked, "first,second")
    assert "first (version 1.5): 2 documents  stored" in out and "second (version 1.5): 2 documents  written:" in out
    out, _ = command(*asked, "first", "--limit", 1)
    assert "first (version 1.5): 1 documents  written:" in out
    sql = "select run_id, task, n from evals order by all"
    answer, _ = command("query", run.parent.parent, sql, "--format", "json")
    rows = [tuple(row.values()) for row in json.loads(answer)]
    assert rows == [(run.name, "first", 1), (run.name, "first", 2), (run.name, "second", 2)]


def test_without_layers_a_table_shows_what_is_lost(tmp_path, command):
    pytest.importorskip("lm_eval")
    run = loud_run(tmp_path)
    rows = [{"question": f"{n} times 3 is", "choices": [f"{3 * n}.", "x"], "answer": n % 2} for n in range(6)]
    fields = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    write_task(tmp_path, "threes", rows, output_type="multiple_choice", **fields, metric_list=[{"metric": "acc"}])
    asked = ("evaluate", run, "--include-path", tmp_path, "--tasks", "threes", "--tasks", "threes", "--without", "2")
    out, _ = command(*asked)
    assert "threes (version 1.5) without layers 2: 6 documents  written:" in out
    *_, header, _, row = out.splitlines()
    assert header.split() == ["task", "metric", "without", "full", "reduced", "lost", "lo", "hi"]
    assert row.split()[:3] == ["threes", "acc", "2"]
    again, _ = command(*asked)
    assert again.splitlines()[-1] == row and again.count("stored") == 2  # of what is kept
    out, _ = command(*asked[:-1], "all")
    first, second = sorted(out.splitlines()[-2:], key=lambda line: line.split()[2])
    assert (first.split()[2], second, out.count("written:")) == ("1", row, 1)
    with open_store(run.parent.parent) as store:
        drawn = removal(store).data
    of_task = drawn[drawn["panel"] == "threes, acc_lost"]
    assert of_task["x"].tolist() == [1, 2] and {*drawn["setting"]} == {f"baseline, {run.name}"}
    assert of_task["mean"].tolist() == pytest.approx([float(line.split()[-3]) for line in (first, second)])
    assert (of_task["lo"] <= of_task["mean"]).all() and (of_task["mean"] <= of_task["hi"]).all()
    out, _ = command(*asked[:-2], "--against", loud_run(tmp_path, depth_scale="lns"))
    assert "minus the first, paired by question" in out
    assert out.splitlines()[-1].split()[:3] == ["threes", "acc", "none"] and out.splitlines()[-1].endswith(" 6")


def test_a_hugging_face_folder_scores_as_its_run(tmp_path, command):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    run, folder = loud_run(tmp_path), tmp_path / "out"
    command("export", run, "-o", folder)
    write_task(tmp_path, "text", [{"text": " ".join(f"{n} times 2 is {2 * n}." for n in range(9))}], **TEXT, **METRICS)
    asked = ("--include-path", tmp_path, "--tasks", "text", "-o", run.parent.parent)
    command("evaluate", run, *asked, "--without", 1)
    command("evaluate", folder, *asked, "--without", 1)
    both, _ = command("query", run.parent.parent, "select value from evals where without = '1'", "--format", "json")
    first, second = (row["value"] for row in json.loads(both))
    assert first == pytest.approx(second, rel=1e-5)
    sql = "select run_id, model, value from evals where without is null"
    answer, _ = command("query", run.parent.parent, sql, "--format", "json")
    ours, theirs = sorted(json.loads(answer), key=lambda row: row["run_id"] is None)
    assert (ours["run_id"], theirs["run_id"], theirs["model"]) == (run.name, None, str(folder))
    assert ours["value"] == pytest.approx(theirs["value"], rel=1e-5)
