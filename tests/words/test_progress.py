"""The lines of a running sweep on a terminal, by hand."""

from sparsedepth.cli.progress import Progress
from sparsedepth.config.sweep import ad_hoc
from sparsedepth.sweep.status import RunState
from sparsedepth.words.progress import complete_text, next_text, progress_lines, share_text, time_text

DEFINITION = ad_hoc({"n_layers": [1, 2]}, 1, {})
STATES = [
    RunState(run_id="a", state="complete", config=None),
    RunState(run_id="b", state="complete", config=None),
    RunState(run_id="c", state="running", config=None),
    RunState(run_id="d", state="failed", reason="out of memory\x1b[2J", config=None),
]


def progress(**other) -> Progress:
    summaries = {"a": {"val_loss": 3.25}, "b": {"val_loss": 3.0}}
    facts = {"expected": 5, "elapsed": 60.0, "share": 0.5, "left": 60.0}
    return Progress(definition=DEFINITION, states=STATES, **{"summaries": summaries, **facts, **other})


def test_a_bar_what_runs_what_failed_and_the_best():
    bar, running, failed, best = progress_lines(progress())
    assert bar == f"{DEFINITION.name} {'━' * 15}{'╌' * 15}  50%  2/5 runs, 1 failed  1m00s elapsed, about 1m00s left"
    assert running == "  c: starting" and failed == "  failed 1x: out of memory\\x1b[2J"
    assert best == "  best so far: val_loss 3, b"


def test_the_time_is_told_as_far_as_it_is_known():
    assert time_text(progress(left=None)) == "1m00s elapsed, estimating"
    assert time_text(progress(share=1.0)) == "1m00s elapsed"
    assert share_text(progress()) == "[2/5] 50% done  (1m00s elapsed, about 1m00s left)"


def test_a_run_that_ends_says_its_objective_or_that_it_diverged():
    told = complete_text(progress(), STATES[0])
    assert told == "[2/5] complete: a, val_loss 3.25  (1m00s elapsed, about 1m00s left)"
    diverged = progress(summaries={"a": {"val_loss": None, "outcome": "diverged"}})
    assert ": a, diverged  (" in complete_text(diverged, STATES[0])
    assert ": a  (" in complete_text(progress(summaries={"a": {}}), STATES[0])


def test_what_follows_a_sweep_is_its_questions_with_their_commands():
    lines = next_text("'my results'", is_search=False).splitlines()
    assert lines[:2] == ["", "next:"] and len({line.index("#") for line in lines[2:]}) == 1
    assert [line.split("  #")[0].split(maxsplit=1)[1].strip() for line in lines[2:]] == [
        "recipe 'my results'",
        "query 'my results' --ask variance",
        "query 'my results' --ask depth",
    ]
    assert "best r --top 3 --again again.yaml" in next_text("r", is_search=True)
