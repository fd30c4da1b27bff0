"""Multiple-choice questions of a file: every number against one from the logits, of a run and of its export."""

import json

import numpy as np
import pytest
import torch
from support.run_folders import loud_run

from sparsedepth.cli.exchange import evaluate
from sparsedepth.data.prompt_answer import Pair, encode_pairs
from sparsedepth.data.tokenizer import ByteTokenizer
from sparsedepth.exchange.choices import ChoiceQuestion, choice_likelihoods, read_questions, scores
from sparsedepth.exchange.evaluate import layers_left
from sparsedepth.exchange.export import export
from sparsedepth.exchange.likelihood import Likelihood
from sparsedepth.probe.load import load_model
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.probe.text import tokenizer_of
from sparsedepth.store.connection import open_store
from sparsedepth.store.small_sample import share_interval

ROWS = [
    {"question": f"{n} times 3 is", "choices": [f"{3 * n}.", "many, many.", "x"], "answer": n % 3} for n in range(7)
]
ROWS[4]["question"] += "\n"
ROWS[5]["answer"] = ROWS[5]["choices"][2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    (folder / "threes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = loud_run(folder, seq_len=64)
    export(run, folder / "exported")
    return folder, run


def asked(model, folder, out, limit=None, without=None, more=()):
    """The command, on the file of the folder."""
    files = [str(folder / "threes.jsonl"), *map(str, more)]
    evaluate(str(model), files, include_path=None, limit=limit, out=out, device="cpu", without=without)


def stored(results):
    with open_store(results) as store:
        rows = store.sql("select metric, value, lo, hi, stderr, n, run_id, task, harness from evals").rows
    return {row[0]: row[1:] for row in rows}


def test_tasks_may_be_named_several_times(place, tmp_path, capsys):
    folder, run = place
    other = tmp_path / "threes.hard.jsonl"
    other.write_text((folder / "threes.jsonl").read_text())
    asked(run, folder, tmp_path, limit=1, more=[other])
    assert {line.partition(" ")[0] for line in capsys.readouterr().out.splitlines() if "version" in line} == {
        "threes",
        "threes.hard",
    }


def test_scores_are_those_of_the_logits(place, tmp_path, capsys):
    folder, run = place
    results = run.parent.parent
    asked(run, folder, None)
    assert "acc" in (out := capsys.readouterr().out) and "threes (version 1): 7 documents  written:" in out
    model = load_model(run).probed.model
    log_p = []
    for row in ROWS:
        of_choices = []
        for choice in row["choices"]:
            given = row["question"].rstrip().encode()
            text = given + (b"\n" if row["question"].endswith("\n") else b" ") + choice.encode()
            with torch.no_grad():
                log_p_TV = model(torch.tensor([[*text[:-1]]]))[0].log_softmax(-1)
            of_choices.append(sum(log_p_TV[t - 1, text[t]].item() for t in range(len(given), len(text))))
        log_p.append(of_choices)
    p = np.array(log_p)
    right = np.array([0, 1, 2, 0, 1, 2, 0])
    found = stored(results)
    hits = int((p.argmax(1) == right).sum())
    assert found["acc"][:3] == pytest.approx((hits / 7, *share_interval(hits / 7, 7)))
    lengths = np.array([[len(choice) for choice in row["choices"]] for row in ROWS])
    assert found["acc_norm"][0] == pytest.approx(((p / lengths).argmax(1) == right).mean())
    n_bytes = lengths[np.arange(7), right] + 1
    bits = -p[np.arange(7), right].sum() / np.log(2) / n_bytes.sum()
    assert found["answer_bits_per_byte"][0] == pytest.approx(bits, rel=1e-4)
    assert found["acc"][4:7] == (7, run.name, "threes") and found["acc"][7].startswith("sparsedepth ")
    asked(run, folder, None)
    assert "stored" in capsys.readouterr().out
    asked(folder / "exported", folder, tmp_path / "other")
    other = stored(tmp_path / "other")
    assert {name: row[0] for name, row in other.items()} == pytest.approx(
        {n: row[0] for n, row in found.items()}, rel=1e-4
    )
    assert other["acc"][5] is None


def test_without_layers_the_others_alone_answer(place, tmp_path, capsys):
    folder, run = place
    asked(run, folder, tmp_path / "results", without="2")
    shown = capsys.readouterr().out
    assert "threes (version 1) without layers 2: 7 documents" in shown
    assert [line.split()[:3] for line in shown.splitlines()[-2:]] == [["threes", m, "2"] for m in ("acc", "acc_norm")]
    asked(run, folder, tmp_path / "results", without="2")
    assert capsys.readouterr().out.splitlines()[-2:] == shown.splitlines()[-2:]  # of what is kept
    loaded = load_model(run)
    cut = loaded.probed.model
    del cut.blocks[1]
    tokenizer = tokenizer_of(loaded, tmp_path)
    log_p = choice_likelihoods(
        Likelihood(ProbedDecoder(cut), tokenizer.eod, 64), tokenizer, read_questions(folder / "threes.jsonl")
    )
    expected = {row["metric"]: row["value"] for row in scores(read_questions(folder / "threes.jsonl"), log_p)}
    with open_store(tmp_path / "results") as store:
        rows = store.sql("select metric, value from evals where without = '2'").rows
        whole = dict(store.sql("select metric, value from evals where without is null").rows)
    drops = {f"{name}_lost": whole[name] - expected[name] for name in ("acc", "acc_norm")}
    assert dict(rows) == pytest.approx(expected | drops)
    assert whole["answer_bits_per_byte"] != expected["answer_bits_per_byte"]


@pytest.mark.parametrize("without", ["0", "3", "2-1", "1-", "a", "-2", ""])
def test_no_range_of_layers(without):
    with pytest.raises(ValueError, match="is no layer or range of the 2 layers; write 5, or 5-8, from 1"):
        layers_left(without, 2)
    assert layers_left("2-3", 5) == [1, 4, 5] and layers_left("1", 2) == [2]


def test_accuracies_by_hand():
    question = ChoiceQuestion(question="?", choices=("abcd", "a"), answer=0)
    # -2 < -1.5, yet -2/4 > -1.5/1: wrong plainly, right by length; the second question is right in both
    rows = {row["metric"]: row for row in scores([question] * 2, [np.array([-2.0, -1.5]), np.array([-1.0, -3.0])])}
    assert (rows["acc"]["value"], rows["acc_norm"]["value"]) == (0.5, 1.0)
    assert rows["answer_bits_per_byte"]["value"] == pytest.approx(3 / np.log(2) / 10)


@pytest.mark.parametrize(("end", "n_bytes"), [("", 5), (" ", 5), ("\n\n", 6), ("\n\u2003", 8)])
def test_the_white_space_that_the_answers_tokens_hold_is_among_its_bytes(end, n_bytes):
    """Four bytes and what stands before them: a space, or the end of the question."""
    question = ChoiceQuestion(question=f"?{end}", choices=("abcd", "a"), answer=0)
    (bits,) = (row for row in scores([question], [np.array([-2.0, -1.5])]) if row["metric"] == "answer_bits_per_byte")
    assert bits["value"] == pytest.approx(2 / np.log(2) / n_bytes)
    (given, asked) = encode_pairs(ByteTokenizer(), [Pair(question.question, "abcd")])[0]
    assert len(given) == 1 and len(asked) == n_bytes


def test_the_interval_is_wilsons():
    """8 of 10: 0.4902 to 0.9433, a standard example; at the ends it stays inside 0 to 1."""
    assert share_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert share_interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert share_interval(0.0, 12)[0] == 0.0 and share_interval(1.0, 12)[1] == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"choices": ["a", "b"], "answer": 0},
            "line 2, has no field 'question'; an object holds question, choices and",
        ),
        ({"question": "q", "answer": 0}, "line 2, has choices='None'"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "give at least two, no two alike"),
        ({"question": "q", "choices": ["a", "a"], "answer": 0}, "give at least two, no two alike"),
        ({"question": "q", "choices": ["a", ""], "answer": 0}, "choices is a list of texts"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "has answer=2, which is no choice; .* 0 to 1"),
        ({"question": "q", "choices": ["a", "b"], "answer": "c"}, "has answer='c', which is no choice"),
        ({"question": "q", "choices": ["a", "b"]}, "has answer=None, which is no choice"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "has answer=True, which is no choice"),
        ([1], "line 2, is not a JSON object"),
    ],
)
def test_what_is_refused(tmp_path, row, message):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        read_questions(path)


def test_a_file_without_questions(tmp_path):
    with pytest.raises(ValueError, match="is no file; name a JSON-lines file with question, choices and answer"):
        read_questions(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no question"):
        read_questions(tmp_path / "empty.jsonl")
