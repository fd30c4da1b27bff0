"""Prompts with answers for supervised fine-tuning (`corpus: sft:PATH`), from JSON: a file, or a folder of them.

    {"prompt": ..., "answer": ...}                               unchanged
    {"instruction": ..., "input": ..., "output": ...}            Alpaca's template with the first two; the answer is
                                                                 `output` (Commonsense170K of 2304.01933)

A pair is one document, which ends in eod: the prompt, white space (a space if there is none), and the answer, to which
that belongs, since tokenizers join a space with the next word. Scored are the answer and its eod. A row of T inputs
holds whole documents, as many as fit, in an order shuffled for every epoch, padded with eod.

Deviates: the template's lines in the code of 2304.01933 have 16 spaces and a '# noqa: E501' in them by mistake.

Shapes: N documents, R rows of an epoch, T tokens of a row, S = T + 1 with the last target."""

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparsedepth.config.run import DataConfig, RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.corpus import file_kind, json_objects, local_files
from sparsedepth.data.pipeline import Corpus, CorpusSource, nothing_left, prepare
from sparsedepth.data.sequences import Sequences, Source, shuffled
from sparsedepth.data.text import TextKind
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.plain_text import utf8

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{}\n\n{}### Response:\n"
)


class Pair(NamedTuple):
    prompt: str
    answer: str


def pair_texts(config: DataConfig) -> Iterator[str]:
    """Each pair of the corpus as the JSON text [prompt, answer], as `split` needs. Raises ValueError for what is no
    object, a missing field, and an empty prompt or answer."""
    for file in local_files(config.corpus):
        if file_kind(file) != "lines":
            raise ValueError(f"{file} holds no pairs of prompt and answer; write them as JSON lines into a .jsonl file")
        for place, row in json_objects(file):
            yield json.dumps(_pair(row, place), ensure_ascii=False)


def _pair(row: Row, place: str) -> Pair:
    def text(name: str, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{place} holds {type(value).__name__} in {name!r}, not text")
        return utf8(value)

    def required(name: str) -> str:
        if name not in row:
            raise ValueError(
                f"{place} has no field {name!r}; an object holds prompt and answer, or instruction, input and output"
            )
        if not (value := text(name, row[name])).strip():
            raise ValueError(f"{place} has an empty {name!r}; fill it in, or leave the pair out")
        return value

    if "prompt" in row or "instruction" not in row:
        return Pair(required("prompt"), required("answer"))
    note = given = ""
    if context := text("input", row.get("input") or ""):
        note, given = ", paired with an input that provides further context", f"### Input:\n{context}\n\n"
    return Pair(_ALPACA.format(note, required("instruction"), given), required("output"))


def pair_text(pair: Pair) -> str:
    return pair.prompt + ("" if pair.prompt[-1].isspace() else " ") + pair.answer


class PairTokenizer:
    """A tokenizer for `pair_texts`, which encodes them as prompt, eod, answer; an answer has at least one id."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.size = tokenizer.size
        self.eod = tokenizer.eod

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Raises ValueError if the ids of a text contain the eod, which would cut it."""
        pairs = [Pair(*json.loads(text)) for text in texts]
        written = [pair_text(pair) for pair in pairs]
        encoded = self._tokenizer.encode(written)
        prompts = self._tokenizer.encode([pair.prompt.rstrip() for pair in pairs])
        for whole, ids, prompt in zip(written, encoded, prompts, strict=True):
            if self.eod in ids or not prompt:
                what = f"its end of a document, token {self.eod}," if prompt else "no token of the prompt"
                raise ValueError(
                    f"the tokenizer encodes {what} in the text of the pair {' '.join(whole.split())[:60]!r}...; "
                    "leave the pair out, or name another tokenizer"
                )
            ids.insert(min(len(prompt), len(ids) - 1), self.eod)
        return encoded


class Documents:
    """The documents of one side, stored as prompt, eod, answer, eod."""

    def __init__(self, ids: np.ndarray, eod: int):
        ends = np.flatnonzero(ids == eod)
        assert len(ends) % 2 == 0, "every pair ends in a prompt's and an answer's eod"
        self._ids = ids
        self._eod = eod
        self._split_N = ends[::2]
        self._end_N = ends[1::2]
        self._begin_N = np.concatenate(([0], self._end_N[:-1] + 1))
        self.length_N = self._end_N - self._begin_N
        """of the document, with its eod"""

    def prompt(self, document: int) -> np.ndarray:
        return self._ids[self._begin_N[document] : self._split_N[document]]

    def rows(self, chosen: list[np.ndarray], seq_len: int) -> Sequences:
        """One row per array of documents."""
        tokens_RS = np.full((len(chosen), seq_len + 1), self._eod, dtype=np.int64)
        scored_RS = np.zeros(tokens_RS.shape, dtype=bool)
        for tokens_S, scored_S, documents in zip(tokens_RS, scored_RS, chosen, strict=True):
            position = 0
            for document in documents:
                answer = self._ids[self._split_N[document] + 1 : self._end_N[document] + 1]
                for part, is_scored in ((self.prompt(document), False), (answer, True)):
                    place = slice(position, position + len(part))
                    tokens_S[place], scored_S[place] = part, is_scored
                    position += len(part)
        return Sequences(inputs=tokens_RS[:, :-1], targets=np.where(scored_RS, tokens_RS, IGNORED)[:, 1:])


def pack(length_N: np.ndarray, seq_len: int) -> np.ndarray:
    """first_R and N: the documents that begin the rows, in order; each row takes as many as fit its T + 1 tokens."""
    end_N = np.cumsum(length_N)
    first = 0
    starts = []
    while first < len(length_N):
        starts.append(first)
        row_begin = end_N[first] - length_N[first]
        first = int(np.searchsorted(end_N, row_begin + seq_len + 1, side="right"))
    return np.array([*starts, len(length_N)])


class AnswerSource(CorpusSource):
    """A source of pairs. Raises ValueError if a document does not fit a row."""

    def __init__(self, corpus: Corpus, config: RunConfig):
        self.corpus = corpus
        self._train, self._val = (Documents(ids, corpus.manifest.eod) for ids in (corpus.train, corpus.val))
        self._epoch = lru_cache(maxsize=2)(self._pack_epoch)  # batches are read in order
        self._n_rows = cache(lambda *epoch: len(self._epoch(*epoch)))
        for seq_len in {config.seq_len, config.eval_seq_len or config.seq_len}:
            self._check_lengths(seq_len)

    def _check_lengths(self, seq_len: int) -> None:
        sides = (self._train, self._val)
        longest = max(sides, key=lambda side: side.length_N.max())
        most = int(longest.length_N.max())
        lengths = np.concatenate([side.length_N for side in sides])
        if most > seq_len + 1:
            prompt = self.corpus.tokenizer().decode(longest.prompt(int(longest.length_N.argmax()))[:200].tolist())
            raise ValueError(
                f"{(lengths > seq_len + 1).sum():,} of {len(lengths):,} documents of "
                f"corpus={self.corpus.manifest.corpus!r} are longer than seq_len={seq_len}: "
                f"the longest has {most - 1:,} tokens ({' '.join(prompt.split())[:60]!r}...); "
                f"set seq_len to {most - 1} or more, or leave them out"
            )

    def batch(self, config: RunConfig, step: int) -> Sequences:
        per_step = config.sequences_per_step
        rows = range(step * per_step, (step + 1) * per_step)
        return self._train.rows([self._documents(row, config.seed, config.seq_len) for row in rows], config.seq_len)

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        self._check_lengths(seq_len)
        starts = pack(self._val.length_N, seq_len)
        first = -(-skip_tokens // seq_len)
        rows = range(first, min(first + n_tokens // seq_len, len(starts) - 1))
        if not rows:
            held_out = f"the {len(self._val.length_N):,} held-out pairs fill {len(starts) - 1:,} rows"
            raise nothing_left(f"row of seq_len={seq_len:,}", n_tokens, skip_tokens, held_out)
        return self._val.rows([np.arange(starts[row], starts[row + 1]) for row in rows], seq_len)

    def _documents(self, row: int, seed: int, seq_len: int) -> np.ndarray:
        """The training documents of a row, numbered over all epochs."""
        epoch = 0
        while row >= (n_rows := self._n_rows(seed, seq_len, epoch)):
            row -= n_rows
            epoch += 1
        return self._epoch(seed, seq_len, epoch)[row]

    def _pack_epoch(self, seed: int, seq_len: int, epoch: int) -> list[np.ndarray]:
        """The documents of each row of an epoch."""
        n = len(self._train.length_N)
        order_N = shuffled(np.arange(n), n, seed, epoch)
        return np.split(order_N, pack(self._train.length_N[order_N], seq_len)[1:-1])


class PairsKind(TextKind):
    """How pairs become files of ids."""

    format = 2
    decides_side = staticmethod(lambda text: json.loads(text)[0])
    check = staticmethod(local_files)
    texts = staticmethod(pair_texts)
    encoder = staticmethod(PairTokenizer)

    def learned_from(self, text: str) -> str:
        return pair_text(Pair(*json.loads(text)))

    def open(self, config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> Source:
        return AnswerSource(prepare(config, root, tokenizer), config)


KIND = PairsKind()
