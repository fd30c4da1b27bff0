"""Multiple-choice questions from a JSON-lines file, scored by the likelihood of each choice; needs no other package.

    {"question": ..., "choices": [..., ...], "answer": 1}        the right choice by its index from 0, or by its text

    acc        share of the questions whose right choice has the largest ln p(choice | question)
    acc_norm   the same with ln p / characters of the choice, a correction for length

Both are defined as in lm-evaluation-harness, with the same text: question, a space unless it ends in white space,
choice. Of equal choices the first is taken. Intervals are Wilson's at 95%, over questions (`store.small_sample`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsedepth import __version__
from sparsedepth.data.corpus import json_objects, plain
from sparsedepth.data.prompt_answer import Pair, answer_bytes, encode_pairs, text_field
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.exchange.evaluate import EvaluationScores, answer_bits, context_of, model_key, row
from sparsedepth.exchange.likelihood import Likelihood
from sparsedepth.files import digest
from sparsedepth.probe.load import LoadedModel
from sparsedepth.probe.text import tokenizer_of
from sparsedepth.store.evals import EvaluationKey
from sparsedepth.store.small_sample import share_interval

SUFFIXES = (".jsonl", ".json", ".jsonl.gz")
"""File names of questions; other task names are lm-evaluation-harness's."""

SHAPES = "question, choices and answer"
DEFAULT_LEN = 2048
"""Context of a model without a limit."""


@dataclass(frozen=True, kw_only=True)
class ChoiceQuestion:
    question: str
    choices: tuple[str, ...]
    answer: int
    """index of the right choice"""


def read_questions(file: Path, limit: int | None = None) -> list[ChoiceQuestion]:
    """The questions of a file. Raises ValueError, naming the line, for a missing field, an answer that is no choice,
    fewer than two choices, or duplicates."""
    if not file.is_file():
        raise ValueError(f"{str(file)!r} is no file; name a JSON-lines file with {SHAPES}")
    questions = [_question(row, place) for place, row in json_objects(file)]
    if not questions:
        raise ValueError(f"{file} holds no question; write one object with {SHAPES} per line")
    return questions[:limit]


def _question(row: Mapping[str, Any], place: str) -> ChoiceQuestion:
    question = text_field(row, "question", place, SHAPES)
    choices = row.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise ValueError(
            f"{place} has choices={str(choices)[:40]!r}; an object holds {SHAPES}, and choices is a list of texts"
        )
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"{place} has choices={str(choices)[:60]}; give at least two, no two alike")
    answer = row.get("answer")
    answer_index = choices.index(answer) if answer in choices else answer
    if not isinstance(answer_index, int) or isinstance(answer_index, bool) or not 0 <= answer_index < len(choices):
        raise ValueError(
            f"{place} has answer={answer!r}, which is no choice; give its text, or its index, 0 to {len(choices) - 1}"
        )
    return ChoiceQuestion(question=question, choices=tuple(map(plain, choices)), answer=answer_index)


@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """A file of questions as an evaluation task."""

    name: str
    questions: list[ChoiceQuestion]

    def key(self, model: LoadedModel) -> EvaluationKey:
        content = [[question.question, question.choices, question.answer] for question in self.questions]
        return model_key(
            model,
            task=self.name,
            task_version="1",
            task_hash=digest(content),
            n_fewshot=0,
            harness=f"sparsedepth {__version__}",
        )

    def score(self, model: LoadedModel, data: Path, layers: list[int] | None) -> EvaluationScores:
        tokenizer = tokenizer_of(model, data)
        likelihood = Likelihood(model.probed, tokenizer.eod, context_of(model) or DEFAULT_LEN, layers)
        log_p = choice_likelihoods(likelihood, tokenizer, self.questions)
        n = len(self.questions)
        return EvaluationScores(
            rows=scores(self.questions, log_p),
            hits={(metric, "none"): dict(enumerate(row)) for metric, row in hits(self.questions, log_p).items()},
            n=n,
            n_documents=n,
            n_truncated=likelihood.n_truncated,
        )


def choice_likelihoods(
    likelihood: Likelihood, tokenizer: Tokenizer, questions: list[ChoiceQuestion]
) -> list[np.ndarray]:
    """ln p of each choice, one array per question."""
    pairs = [Pair(question.question, choice) for question in questions for choice in question.choices]
    log_p = np.array([value for value, _ in likelihood(encode_pairs(tokenizer, pairs))])
    return np.split(log_p, np.cumsum([len(question.choices) for question in questions])[:-1])


def hits(questions: list[ChoiceQuestion], log_p: list[np.ndarray]) -> dict[str, list[bool]]:
    """By metric, whether each question is answered correctly, from ln p of every choice."""
    lengths = [np.array([len(choice) for choice in question.choices]) for question in questions]
    right = [question.answer for question in questions]
    return {
        "acc": [int(p.argmax()) == answer for p, answer in zip(log_p, right, strict=True)],
        "acc_norm": [int((p / n).argmax()) == answer for p, n, answer in zip(log_p, lengths, right, strict=True)],
    }


def scores(questions: list[ChoiceQuestion], log_p: list[np.ndarray]) -> list[dict[str, Any]]:
    """Rows of an evaluation from ln p of every choice."""
    right = [question.answer for question in questions]
    pairs = [Pair(question.question, question.choices[question.answer]) for question in questions]
    bits = [(-p[answer] / math.log(2), answer_bytes(pair)) for p, answer, pair in zip(log_p, right, pairs, strict=True)]
    accuracies = [_accuracy(metric, question_hits) for metric, question_hits in hits(questions, log_p).items()]
    return [*accuracies, *answer_bits(bits)]


def _accuracy(metric: str, hits: list[bool]) -> dict[str, Any]:
    n, p = len(hits), sum(hits) / len(hits)
    lo, hi = share_interval(p, n)
    stderr = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
    return row(metric, "none", p, stderr, True) | {"lo": lo, "hi": hi}
