"""Does LNS change the result of fine-tuning: the accuracy of the answers, and how much each layer is needed?

    python analysis/fine_tuning.py OUT [--seeds 3]

A small version of table 2 of 2502.05795 with made-up data. Models first train on text about made-up people: where they
live, what they eat and what they do, each in three wordings. Fine-tuning shows questions and answers about half of
them. The test asks about the others: the facts come from the text, the form of the answer from the pairs. There are
four choices; guessing gives 0.25.

    OUT/people.txt  pairs.jsonl  questions.jsonl  questions.yaml  tune.yaml     generated from MADE_SEED
    OUT/base        6 runs: Pre-LN and LNS, three seeds
    OUT/tuned       each of them tuned, and its start, both measured on the same held-out pairs and evaluated

A stopped command continues where it was. At the end it prints the output of `query OUT/tuned` and `effects OUT/tuned`.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

MADE_SEED, N_PEOPLE, PASSES, N_CHOICES = 0, 100, 60, 4
SYLLABLES = [consonant + vowel for consonant in "bdklmnrstv" for vowel in "aio"]
FACTS = {
    "home": (
        ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Paris", "Tunis"),
        ("{who} lives in {what}.", "{what} is the home of {who}.", "The house of {who} is in {what}."),
        ("Where does {who} live?", "Which town is the home of {who}?"),
    ),
    "food": (
        ("plums", "bread", "rice", "beans", "cheese", "figs", "soup", "nuts"),
        ("{who} eats {what}.", "{what} is the food of {who}.", "The plate of {who} is full of {what}."),
        ("What does {who} eat?", "Which food is that of {who}?"),
    ),
    "work": (
        ("baker", "miner", "pilot", "nurse", "judge", "tailor", "farmer", "singer"),
        ("{who} works as a {what}.", "The work of {who} is that of a {what}.", "As a {what} {who} earns a living."),
        ("What does {who} work as?", "Which work is that of {who}?"),
    ),
}
"""Values, statements and questions of each kind of fact."""
BASE = {
    "corpus": "people.txt", "n_layers": 12, "d_model": 48, "seq_len": 128, "batch_tokens": 1024,
    "train_tokens": 512_000, "lr": 3e-3, "measure_tokens": 2048, "fit_tokens": 2048, "val_tokens": 8192,
}  # fmt: skip
TUNE = {
    "corpus": "sft:pairs.jsonl", "seq_len": 128, "batch_tokens": 1024, "train_tokens": 102_400, "lr": 1e-3,
    "warmup_frac": 0.03, "min_lr_frac": 0, "val_fraction": 0.25, "measure_tokens": 1024, "fit_tokens": 1024,
    "val_tokens": 2048,
}  # fmt: skip
TASK = {
    "task": "questions", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}], "metadata": {"version": 1},
}  # fmt: skip
"""The questions as a task of lm-evaluation-harness, which needs `pip install '.[eval]'`."""
QUERIES = (
    "select depth_scale, model is null as tuned, count(*) as models, avg(val_loss) as val_loss, "
    "avg(causal_score) as causal_score, avg(usefulness) as usefulness, avg(needed_layers) as needed_layers, "
    "avg(residual_variance_last) as variance from runs group by all order by all",
    "select model, value, lo, hi from evals where metric = 'acc' order by all",
)


def make_files(out: Path) -> None:
    """The text, the pairs, the questions with their task, and what tuning is."""
    draws = random.Random(MADE_SEED)
    triples = [*itertools.product(SYLLABLES, repeat=3)]
    names = ["".join(parts).title() for parts in draws.sample(triples, N_PEOPLE)]
    facts = [(who, kind, draws.choice(FACTS[kind][0])) for who in names for kind in FACTS]
    passes = [draws.sample(facts, len(facts)) for _ in range(PASSES)]
    lines = [draws.choice(FACTS[kind][1]).format(who=who, what=what) for facts in passes for who, kind, what in facts]
    sentences = [line[0].upper() + line[1:] for line in lines]
    documents = ["\n".join(sentences[i : i + 20]) for i in range(0, len(sentences), 20)]
    (out / "people.txt").write_text("\n\n".join(documents) + "\n")
    shown = set(names[: N_PEOPLE // 2])
    pairs = [
        {"prompt": question.format(who=who), "answer": what}
        for who, kind, what in facts
        if who in shown
        for question in FACTS[kind][2]
    ]
    questions = []
    for who, kind, what in facts:
        if who not in shown:
            others = draws.sample([value for value in FACTS[kind][0] if value != what], N_CHOICES - 1)
            choices = draws.sample([what, *others], N_CHOICES)
            question = FACTS[kind][2][0].format(who=who)
            questions.append({"question": question, "choices": choices, "answer": choices.index(what)})
    for name, rows in (("pairs", pairs), ("questions", questions)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, values in (("tune", TUNE), ("questions", TASK)):
        (out / f"{name}.yaml").write_text(json.dumps(values, indent=1) + "\n")  # JSON is YAML


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make, or to go on in")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    make_files(given.out)
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}

    def sparsedepth(*words: str) -> None:
        print("$ sparsedepth", *words, flush=True)
        command = [sys.executable, "-m", "sparsedepth.cli.main", *words]
        subprocess.run(command, cwd=given.out, env=environment, check=True)

    task = ("--tasks", "questions", "--include-path", ".")
    settings = [word for name, value in BASE.items() for word in ("--set", f"{name}={value}")]
    sparsedepth("sweep", "--vary", "depth_scale=none,lns", "--seeds", str(given.seeds), *settings, "-o", "base")
    for run in sorted((given.out / "base" / "runs").iterdir()):
        start = f"base/runs/{run.name}"
        sparsedepth("train", "tune.yaml", "--from", start, "-o", "tuned")
        sparsedepth("evaluate", start, *task, "-o", "tuned")
    for run in sorted((given.out / "tuned" / "runs").iterdir()):
        sparsedepth("evaluate", f"tuned/runs/{run.name}", *task, "-o", "tuned")
    for query in QUERIES:
        sparsedepth("query", "tuned", query)
    sparsedepth("effects", "tuned")


if __name__ == "__main__":
    main()
