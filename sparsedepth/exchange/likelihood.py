"""Log-likelihoods of continuations, for multiple-choice questions and tasks of lm-evaluation-harness.

    ln p(continuation | context) = sum over its tokens of log softmax(logits at the previous token)[token]

Inputs longer than the model's context are truncated at the start, and counted. In fp32 while the model is `exact`.

Shapes: B sequences, T tokens of one sequence, D width of the stream, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedModel

BATCH_TOKENS = 8192
"""Maximum tokens of one forward pass, unless a single sequence is longer."""

Request = tuple[list[int], list[int]]
"""The context's ids, at least one, and the continuation's."""


class Likelihood:
    """Log-likelihoods by a model with a context of `max_len` tokens; `eod` pads batches. `layers` restricts the model
    to these layers."""

    def __init__(self, probed: ProbedModel, eod: int, max_len: int, layers: Sequence[int] | None = None):
        self._probed, self._eod, self.max_len = probed, eod, max_len
        self._layers = range(1, probed.n_layers + 1) if layers is None else layers
        self.n_truncated = 0
        """number of truncated requests"""

    @torch.no_grad()
    def __call__(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """ln p of the continuations, and whether each is the greedy one. Longest first, right-padded: causal."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        inputs = [self._input(context, continuation) for context, continuation in requests]
        with probing(self._probed):
            for batch in _batches([len(ids) for ids in inputs]):
                longest = max(len(inputs[i]) for i in batch)
                padded = [inputs[i] + [self._eod] * (longest - len(inputs[i])) for i in batch]
                x_BTD = self.last_state(padded)
                for i, x_TD in zip(batch, x_BTD, strict=True):
                    continuation, end = requests[i][1], len(inputs[i])
                    scores[i] = self._score(x_TD[end - len(continuation) : end], continuation)
        return scores

    def last_state(self, ids_BT: list[list[int]]) -> Tensor:
        """x_BTD after the last layer."""
        x_BTD = self._probed.embed(torch.tensor(ids_BT, device=self._probed.device))
        for layer in self._layers:
            x_BTD = self._probed.block(layer, x_BTD)
        return x_BTD

    def _input(self, context: list[int], continuation: list[int]) -> list[int]:
        """The model's input: all but the last token, truncated at the start."""
        if len(continuation) > self.max_len:
            raise ValueError(
                f"a task asks for the likelihood of {len(continuation)} tokens at once, and the model reads "
                f"{self.max_len}; choose another task, or a run with a longer seq_len"
            )
        ids = [*context, *continuation][:-1]
        self.n_truncated += len(ids) > self.max_len
        return ids[-self.max_len :]

    def _score(self, x_TD: Tensor, continuation: list[int]) -> tuple[float, bool]:
        log_p_TV = self._probed.logits(x_TD[None])[0].float().log_softmax(-1)
        target_T = torch.tensor(continuation, device=x_TD.device)
        return (
            log_p_TV.gather(1, target_T[:, None]).double().sum().item(),
            bool((log_p_TV.argmax(-1) == target_T).all()),
        )


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Indices, longest first, in batches of at most BATCH_TOKENS tokens including padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
