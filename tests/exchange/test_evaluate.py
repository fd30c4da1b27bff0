"""lm-evaluation-harness on a run, offline, on tasks of our own; every number against one from the logits."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.run_folders import loud_run, write_task

from sparsedepth.exchange import evaluate as module
from sparsedepth.exchange.evaluate import evaluate, layers_left, load_tasks, metric_losses
from sparsedepth.probe.load import load_model
from sparsedepth.store.small_sample import paired_share_interval, share_interval

pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": f"{n} times 3 is", "choices": [f"{3 * n}.", "many, many.", "x"], "answer": n % 3} for n in range(7)
]
TEXTS = [{"text": " ".join(f"{n} times {i} is {n * i}." for i in range(6 + 3 * n))} for n in range(3)]
SMALL = {"seq_len": 64, "depth_scale": "after_residual", "norm": "sandwich"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with three tasks, and a run that cannot be exported to transformers."""
    folder = tmp_path_factory.mktemp("evaluate")
    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    accuracies = [{"metric": "acc"}, {"metric": "acc_norm"}]
    write_task(folder, "count_choice", QUESTIONS, output_type="multiple_choice", **choice, metric_list=accuracies)
    rolling = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}]}
    write_task(folder, "count_text", TEXTS, output_type="loglikelihood_rolling", **rolling)
    answer = {"doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}"}
    answer["metric_list"] = [{"metric": "exact_match"}]
    options = {"until": ["."], "max_gen_toks": 5, "do_sample": False}
    write_task(folder, "count_answer", QUESTIONS, output_type="generate_until", generation_kwargs=options, **answer)
    return folder, load_model(loud_run(folder, **SMALL))


def evaluations(place, name, limit=None, without=()):
    folder, model = place
    (task,) = load_tasks([name], folder, limit)
    return [*evaluate(model, folder, task, task.keys(model, without))]


def evaluated(place, name, limit=None):
    (evaluation,) = evaluations(place, name, limit)
    return evaluation, {(result.metric, result.filter): result for result in evaluation.results}


def log_p(model, given: str, asked: str) -> float:
    """ln p of bytes after bytes, by one forward pass for each."""
    ids, total = [256] if not given else list(given.encode()), 0.0
    for byte in asked.encode():
        with torch.no_grad():
            total += model.probed.model(torch.tensor([ids[-64:]]))[0, -1].log_softmax(-1)[byte].item()
        ids.append(byte)
    return total


def test_accuracy_of_multiple_choice_is_that_of_our_own_log_probabilities(place):
    evaluation, results = evaluated(place, "count_choice")
    _, model = place
    p = np.array([[log_p(model, d["question"], " " + choice) for choice in d["choices"]] for d in QUESTIONS])
    right = np.array([d["answer"] for d in QUESTIONS])
    lengths = np.array([[len(choice) for choice in d["choices"]] for d in QUESTIONS])
    hits = p.argmax(1) == right
    accuracy = results["acc", "none"]
    assert accuracy.value == pytest.approx(hits.mean())
    assert accuracy.stderr == pytest.approx(hits.std(ddof=1) / math.sqrt(7)) and accuracy.higher_is_better
    assert (accuracy.lo, accuracy.hi) == share_interval(hits.mean(), 7)
    assert results["acc_norm", "none"].value == pytest.approx(((p / lengths).argmax(1) == right).mean())
    bits, n_bytes = -p[np.arange(7), right] / math.log(2), lengths[np.arange(7), right] + 1
    ratio = bits.sum() / n_bytes.sum()
    ours = results["answer_bits_per_byte", "none"]
    assert ours.value == pytest.approx(ratio, rel=1e-4) and ours.higher_is_better is False
    residual = bits - ratio * n_bytes
    assert ours.stderr == pytest.approx(math.sqrt(7 / 6 * (residual**2).sum()) / n_bytes.sum(), rel=1e-3)
    assert (evaluation.n, evaluation.n_documents, evaluation.n_truncated) == (7, 7, 0)
    assert evaluation.task_version == "1.5" and evaluation.harness.startswith("lm-eval 0.")
    assert evaluation.run_id == model.config.run_id


def test_a_metric_that_the_harness_cannot_compute_costs_itself_alone(place):
    """Two right answers: a best one among them counts; lm-eval compares the list with one number for mutual
    information."""
    folder, model = place
    both = [{**question, "answer": [0, 2]} for question in QUESTIONS]
    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    for name, metrics in (("two_right", ["acc", "acc_mutual_info"]), ("none_scored", ["acc_mutual_info"])):
        listed = [{"metric": metric} for metric in metrics]
        write_task(folder, name, both, output_type="multiple_choice", **choice, metric_list=listed)
    with pytest.warns(UserWarning, match=r"task 'two_right': lm-eval .* cannot score acc_mutual_info .*ambiguous"):
        evaluation, scores = evaluated(place, "two_right")
    assert scores.keys() == {("acc", "none")} and evaluation.n == len(QUESTIONS)
    best = [max(each["choices"], key=lambda text, of=each: log_p(model, of["question"], f" {text}")) for each in both]
    right = [text in (each["choices"][0], each["choices"][2]) for text, each in zip(best, both, strict=True)]
    assert scores["acc", "none"].value == sum(right) / len(right)
    with pytest.raises(ValueError, match=r"task 'none_scored': lm-eval .* its metrics are acc_mutual_info: leave out"):
        evaluated(place, "none_scored")


def test_perplexity_reads_a_long_text_in_windows_that_do_not_overlap(place):
    evaluation, results = evaluated(place, "count_text")
    _, model = place
    total = 0.0
    for document in TEXTS:
        ids = [256, *document["text"].encode()]
        assert len(ids) > 65
        for start in range(0, len(ids) - 1, 64):  # the last window reaches back, to be as long as the others
            end = min(start + 64, len(ids) - 1)
            first = max(0, end - 64)
            with torch.no_grad():
                logits = model.probed.model(torch.tensor([ids[first:end]]))[0].log_softmax(-1)
            total -= sum(logits[t - first, ids[t + 1]].item() for t in range(start, end))
    n_bytes = sum(len(document["text"]) for document in TEXTS)
    assert results["bits_per_byte", "none"].value == pytest.approx(total / math.log(2) / n_bytes, rel=1e-4)
    assert evaluation.n == 3


def test_answers_are_greedy_and_end_where_they_should(place):
    _, results = evaluated(place, "count_answer", limit=3)
    _, model = place
    hits = []
    for document in QUESTIONS[:3]:
        ids = list(document["question"].encode())
        n = len(ids)
        while len(ids) < n + 5:
            with torch.no_grad():
                ids.append(int(model.probed.model(torch.tensor([ids]))[0, -1].argmax()))
        hits.append(
            bytes(i for i in ids[n:] if i < 256).decode(errors="replace").split(".")[0] == document["choices"][0]
        )
    assert results["exact_match", "none"].value == pytest.approx(np.mean(hits))


@pytest.mark.parametrize(("name", "metric"), [("count_choice", "acc"), ("count_answer", "exact_match")])
def test_without_layers_the_others_alone_answer(place, name, metric):
    """The same as of a model that never had the layer; the drop pairs the documents."""
    folder, model = place
    whole, left = evaluations(place, name, without=["1"])
    cut = load_model(model.folder)
    del cut.probed.model.blocks[0]
    of_cut, _ = evaluated((folder, cut), name)
    values = [{row.metric: row for row in evaluation.results} for evaluation in (whole, left, of_cut)]
    assert values[1][metric].value == values[2][metric].value
    drop = values[1][f"{metric}_lost"]
    assert drop.value == pytest.approx(values[0][metric].value - values[1][metric].value)
    assert -1 <= drop.lo < drop.value < drop.hi <= 1 and f"{metric}_lost" not in values[0]
    assert (whole.without, left.without) == (None, "1")
    (task,) = load_tasks([name], folder)
    keys = task.keys(model, ["1"])
    again = [*evaluate(model, folder, task, keys, keys[:1])]
    assert [(row.metric, row.value) for row in again[0].results] == [(row.metric, row.value) for row in left.results]


@pytest.mark.parametrize("without", ["0", "3", "2-1", "1-", "a", "-2", ""])
def test_no_range_of_layers(without):
    with pytest.raises(ValueError, match="is no range of the 2 layers; write 5, or 5-8, from 1"):
        layers_left(without, 2)
    assert layers_left("2-3", 5) == [1, 4, 5] and layers_left("1", 2) == [2]


def test_drops_by_hand():
    """Of five documents two are lost and one is gained."""
    left = {("acc", "none"): dict(enumerate([False, False, True, True, False]))}
    (row,) = metric_losses({("acc", "none"): dict(enumerate([True, True, False, True, False]))}, left)
    assert (row["metric"], row["value"]) == ("acc_lost", pytest.approx(0.2))
    assert (row["lo"], row["hi"]) == pytest.approx(paired_share_interval(2, 1, 5))


def test_a_metric_that_is_a_share_of_the_whole_model_has_no_drop():
    """F1 is 0.4 for the whole model, so it has no hits there, and 0 once layers are left out, which looks like hits."""
    whole = {("acc", "none"): {0: True, 1: True}}
    left = {("f1", "none"): {0: False}, ("acc", "none"): {1: False, 2: False}}
    (row,) = metric_losses(whole, left)
    assert (row["metric"], row["value"]) == ("acc_lost", 1.0), "only document 1 was answered by both"


def test_until_cuts_the_answer(place, monkeypatch):
    from sparsedepth.exchange.harness import DecoderLM

    _, model = place
    text = DecoderLM(model.probed.model, _Alphabet(), 64)
    whole = text._answer("abc", {"max_gen_toks": 6})
    assert len(whole) == 6
    assert text._answer("abc", {"max_gen_toks": 6, "until": whole[2:4]}) == whole[: whole.index(whole[2:4])]
    with pytest.raises(ValueError, match="do_sample"):
        text._answer("abc", {"do_sample": True})
    assert text.n_truncated == 0
    question = "".join(map(chr, range(100)))
    assert text._answer(question, {"max_gen_toks": 1}) == text._answer(question[-64:], {"max_gen_toks": 1})
    assert text.n_truncated == 1
    # An answer may be longer than the context: the question is not cut for it before it is.
    assert text._answer(question[:9], {})[:6] == text._answer(question[:9], {"max_gen_toks": 6})
    assert text.n_truncated == 2
    with pytest.raises(ValueError, match="70 tokens at once"):
        text._loglikelihood_tokens([(("", ""), [1], [1] * 70)])


class _Alphabet:
    """One character for each id."""

    eod = 999

    def encode(self, texts):
        return [[ord(character) % 256 for character in text] for text in texts]

    def decode(self, ids):
        return "".join(chr(0x4E00 + i) for i in ids)


def test_the_key_knows_the_documents_and_the_limit(place, tmp_path):
    folder, model = place
    keys = [load_tasks(["count_choice"], folder, limit)[0].keys(model)[0].eval_id for limit in (None, 7, 99, 3)]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_every_evaluation_sees_the_same_examples(place, tmp_path):
    """Also a later one of the same task object: of a range of layers, or of a second model."""
    _, model = place
    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    shots = {"num_fewshot": 2, "fewshot_split": "test", "metric_list": [{"metric": "acc"}]}
    write_task(tmp_path, "shots", QUESTIONS, output_type="multiple_choice", **choice, **shots)
    (task,) = load_tasks(["shots"], tmp_path)
    first, second = (next(evaluate(model, tmp_path, task, task.keys(model))).results for _ in range(2))
    assert first == second


def test_the_key_knows_a_folders_settings_and_no_address_of_a_function(place, tmp_path):
    (task,) = load_tasks(["count_choice"], place[0])
    model = SimpleNamespace(config=None, folder=tmp_path, weights_hash="w", facts=SimpleNamespace(max_len=64))

    def key(theta: float, address: str) -> str:
        (tmp_path / "config.json").write_text(f'{{"rope_theta": {theta}}}')
        loaded = SimpleNamespace(
            eval_docs=task.loaded.eval_docs, VERSION=1, get_config=task.loaded.get_config,
            dump_config=lambda: {"process_docs": f"<function f at {address}>"},
        )  # fmt: skip
        return dataclasses.replace(task, loaded=loaded).keys(model)[0].eval_id

    assert key(1e4, "0x7f00") == key(1e4, "0x7fab") != key(50.0, "0x7f00")


def test_what_is_refused(place, tmp_path, monkeypatch):
    folder, _ = place
    with pytest.raises(ValueError, match="is no folder"):
        load_tasks(["count_choice"], tmp_path / "missing")
    write_task(tmp_path, "broken", [], output_type="multiple_choice", doc_to_text="x", test_split="none")
    with pytest.raises(ValueError, match="broken cannot be loaded"):
        load_tasks(["broken"], tmp_path)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install '\.\[eval\]'"):
        load_tasks(["count_choice"], folder)


@pytest.mark.slow  # the harness reads thousands of task files before it knows that a name is not among them
def test_a_name_that_is_not_known(place):
    folder, _ = place
    for name in ("count_choise", str(folder / "count_choice.yaml")):
        with pytest.raises(ValueError, match="is not known to lm-eval"):
            load_tasks([name], folder)
