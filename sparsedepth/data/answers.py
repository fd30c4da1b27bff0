"""The sequences of supervised fine-tuning (`corpus: sft:PATH`): pairs packed into rows, with the loss on answers alone.

    document   prompt, answer, eod;     counts: the targets that are the answer's or its eod

A row of T inputs holds whole documents, one behind the other, as many as fit in an order of its own for every epoch,
and eod up to its end. `mask_documents` keeps each document to itself (`model.decoder`), so that a packed row is what
its documents are alone. Row n of training is a pure function of (pairs, seed, seq_len, n): no state is carried.

Shapes: N documents, R rows of an epoch, T tokens of a row, S = T + 1 with the last target.
"""

import threading
from bisect import bisect_right

import numpy as np

from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.batches import shuffled
from sparsedepth.data.sequences import Sequences
from sparsedepth.data.shards import Corpus, DocumentSource


class Documents:
    """The documents of one side, in a file that has them as prompt, eod, answer, eod."""

    def __init__(self, ids: np.ndarray, eod: int):
        ends = np.flatnonzero(ids == eod)
        assert len(ends) % 2 == 0, "every pair ends in a prompt's and an answer's eod"
        self._ids, self._eod = ids, eod
        self._split_N, self._end_N = ends[::2], ends[1::2]
        self._begin_N = np.concatenate(([0], self._end_N[:-1] + 1))
        self.length_N = self._end_N - self._begin_N
        """of the document, its eod included"""

    def prompt(self, document: int) -> np.ndarray:
        return self._ids[self._begin_N[document] : self._split_N[document]]

    def rows(self, chosen: list[np.ndarray], seq_len: int) -> Sequences:
        """One row for each array of documents."""
        tokens_RS = np.full((len(chosen), seq_len + 1), self._eod, dtype=np.int64)
        counts_RS = np.zeros(tokens_RS.shape, dtype=bool)
        for tokens_S, counts_S, documents in zip(tokens_RS, counts_RS, chosen, strict=True):
            place = 0
            for document in documents:
                begin, split, end = self._begin_N[document], self._split_N[document], self._end_N[document]
                answer = place + split - begin
                tokens_S[place:answer] = self._ids[begin:split]
                place += end - begin
                tokens_S[answer:place] = self._ids[split + 1 : end + 1]
                counts_S[answer:place] = True
        targets_RT = np.where(counts_RS, tokens_RS, IGNORED)[:, 1:]
        return Sequences(inputs=tokens_RS[:, :-1], targets=targets_RT)


def pack(length_N: np.ndarray, seq_len: int) -> np.ndarray:
    """first_R and N: which documents, in their order, begin the rows, each of which takes as many as fit its T + 1."""
    end_N = np.cumsum(length_N)
    first, starts = 0, []
    while first < len(length_N):
        starts.append(first)
        before = end_N[first] - length_N[first]
        first = int(np.searchsorted(end_N, before + seq_len + 1, side="right"))
    return np.array([*starts, len(length_N)])


class AnswerSource(DocumentSource):
    """Pairs in place of a text. Raises ValueError where a document does not fit a row."""

    bytes_per_token: None = None  # where an answer's bytes begin, a token may begin in the prompt

    def __init__(self, corpus: Corpus, config: RunConfig):
        self.corpus = corpus
        self._train, self._val = (Documents(ids, self.eod) for ids in (corpus.train, corpus.val))
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._first_row: list[int] = [0]
        self._packed: tuple[int, np.ndarray, np.ndarray] | None = None
        for seq_len in {config.seq_len, config.eval_seq_len or config.seq_len}:
            self._check_lengths(seq_len)

    def _check_lengths(self, seq_len: int) -> None:
        long = [(int(side.length_N.max()), side) for side in (self._train, self._val)]
        most, side = max(long, key=lambda entry: entry[0])
        if most <= seq_len + 1:
            return
        n_long = sum(int((each.length_N > seq_len + 1).sum()) for _, each in long)
        prompt = self.corpus.tokenizer().decode(side.prompt(int(side.length_N.argmax()))[:200].tolist())
        raise ValueError(
            f"{n_long:,} of {sum(len(each.length_N) for _, each in long):,} documents of corpus="
            f"{self.corpus.manifest.corpus!r} are longer than seq_len={seq_len}: the longest has {most - 1:,} tokens "
            f"({' '.join(prompt.split())[:60]!r}...); set seq_len to {most - 1} or more, or leave them out"
        )

    def batch(self, config: RunConfig, step: int) -> Sequences:
        """Rows of step `step` (from 0), batch_tokens // seq_len of them."""
        per_step = config.batch_tokens // config.seq_len
        rows = range(step * per_step, (step + 1) * per_step)
        with self._lock:  # batches are asked for in a thread of their own
            chosen = [self._documents(row, config.seed, config.seq_len) for row in rows]
        return self._train.rows(chosen, config.seq_len)

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        """n_tokens // seq_len rows of held-out pairs behind those that the first `skip_tokens` tokens reach into, fewer
        at their end. Raises ValueError if there is not one."""
        self._check_lengths(seq_len)
        starts = pack(self._val.length_N, seq_len)
        first = -(-skip_tokens // seq_len)
        rows = range(first, min(first + n_tokens // seq_len, len(starts) - 1))
        if not rows:
            raise ValueError(
                f"no row of seq_len={seq_len:,} is left: {n_tokens:,} held-out tokens are asked for after the first "
                f"{skip_tokens:,}, and the {len(self._val.length_N):,} held-out pairs of corpus="
                f"{self.corpus.manifest.corpus!r} fill {len(starts) - 1:,} rows; lower measure_tokens, raise "
                f"val_fraction, or use more pairs"
            )
        return self._val.rows([np.arange(starts[row], starts[row + 1]) for row in rows], seq_len)

    def _documents(self, row: int, seed: int, seq_len: int) -> np.ndarray:
        """The training documents of a row, counted over all epochs."""
        if self._key != (seed, seq_len):
            self._key, self._first_row, self._packed = (seed, seq_len), [0], None
        while row >= self._first_row[-1]:
            self._first_row.append(self._first_row[-1] + len(self._epoch(len(self._first_row) - 1)[1]) - 1)
        epoch = bisect_right(self._first_row, row) - 1
        order_N, starts = self._epoch(epoch)
        place = row - self._first_row[epoch]
        return order_N[starts[place] : starts[place + 1]]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents and where its rows begin; the last one asked for is kept."""
        if self._packed is None or self._packed[0] != epoch:
            assert self._key is not None
            seed, seq_len = self._key
            n = len(self._train.length_N)
            order_N = shuffled(np.arange(n), n, seed, epoch)
            self._packed = epoch, order_N, pack(self._train.length_N[order_N], seq_len)
        return self._packed[1:]
