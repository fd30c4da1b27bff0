"""Models with the interface of lm-evaluation-harness: log-likelihoods of continuations and texts, and greedy answers.

A run is evaluated through `DecoderLM`, whatever its architecture, so that all runs of a sweep are evaluated alike, also
those that cannot be exported:

    ln p(continuation | context) = sum over its tokens of log softmax(logits at the previous token)[token]

A Hugging Face folder uses the harness's own adapter, which handles what its family expects at the start of a text. Both
in fp32. As in training, nothing is prepended to a text, except the end-of-document token to an empty context. Inputs
longer than the model's context are truncated at the start, and counted.

Shapes: B sequences, T tokens of one sequence, D width of the stream, V vocabulary."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from sparsedepth.config.section import Fields
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import probing
from sparsedepth.probe.load import LoadedModel
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.probe.text import tokenizer_of

HF_BATCH = 16
BATCH_TOKENS = 8192
"""Maximum tokens of one forward pass of a run, unless a single sequence is longer."""
MAX_ANSWER_TOKENS = 256
"""Maximum answer length, if the task sets none: the harness's default."""

Request = tuple[tuple[str, str], list[int], list[int]]
"""The two texts; context ids, and continuation ids."""


def harness_model(model: LoadedModel, data: Path, layers: Sequence[int] | None = None) -> LM:
    """The loaded model with the interface of lm-evaluation-harness; `data` is the folder of a run's learned tokenizer.
    `layers` restricts a run's model to these layers; for a Hugging Face model use its `without_layers`."""
    if isinstance(model.probed, ProbedDecoder):
        assert model.config is not None
        return DecoderLM(model.probed.model, tokenizer_of(model, data), model.config.seq_len, layers)
    if find_spec("accelerate") is None:
        raise ValueError("lm-evaluation-harness needs accelerate for a Hugging Face folder; pip install accelerate")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    pretrained: Any = model.probed.model
    return HFLM(
        pretrained=pretrained,
        tokenizer=AutoTokenizer.from_pretrained(model.folder, local_files_only=True, trust_remote_code=False),
        max_length=model.facts.max_len,
        batch_size=HF_BATCH,
        trust_remote_code=False,
    )


class DecoderLM(TemplateLM):
    def __init__(self, model: Decoder, tokenizer: Tokenizer, max_len: int, layers: Sequence[int] | None = None):
        super().__init__()
        self._probed = ProbedDecoder(model)
        self._text = tokenizer
        self.max_length = max_len
        self._layers = range(1, self._probed.n_layers + 1) if layers is None else layers
        self.n_truncated = 0

    @property
    def eot_token_id(self) -> int:
        return self._text.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = self._text.encode([string])[0]
        if (largest := max(ids, default=0)) >= (size := self._probed.vocab_size):
            raise ValueError(
                f"the task has the id {largest}, {self._text.decode([largest])!r}, "
                f"and the model has ids below {size}; choose another task"
            )
        return ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of each text, in disjoint windows of `max_length`, each conditioned on the previous token."""
        owners, windows = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                owners.append(index)
                windows.append((("", ""), *make_disjoint_window(pair)))
        totals = [0.0] * len(requests)
        for index, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += log_p
        return totals

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """ln p of the continuations, and whether each is the greedy one. Longest first, right-padded: causal."""
        scores = [(0.0, True)] * len(requests)
        inputs = [self._input(context, continuation) for _, context, continuation in requests]
        with probing(self._probed):
            for batch in _batches([len(ids) for ids in inputs]):
                longest = max(len(inputs[i]) for i in batch)
                padded = [inputs[i] + [self.eot_token_id] * (longest - len(inputs[i])) for i in batch]
                for i, x_TD in zip(batch, self._last_state(padded), strict=True):
                    continuation = requests[i][2]
                    end = len(inputs[i])
                    scores[i] = self._score(x_TD[end - len(continuation) : end], continuation)
        return scores

    def _last_state(self, ids_BT: list[list[int]]) -> Tensor:
        x_BTD = self._probed.embed(torch.tensor(ids_BT, device=self._probed.device))
        for layer in self._layers:
            x_BTD = self._probed.block(layer, x_BTD)
        return x_BTD

    def _input(self, context: list[int], continuation: list[int]) -> list[int]:
        """The model's input: all but the last token, truncated at the start."""
        if (n := len(continuation)) > self.max_length:
            raise ValueError(
                f"a task asks for the likelihood of {n} tokens at once, and the model reads {self.max_length}; "
                "choose another task, or a run with a longer seq_len"
            )
        ids = [*context, *continuation][:-1]
        self.n_truncated += len(ids) > self.max_length
        return ids[-self.max_length :]

    def _score(self, x_TD: Tensor, continuation: list[int]) -> tuple[float, bool]:
        log_p_TV = self._probed.logits(x_TD[None])[0].float().log_softmax(-1)
        target_T = torch.tensor(continuation, device=x_TD.device)
        log_p = log_p_TV.gather(1, target_T[:, None]).double().sum().item()
        return log_p, bool((log_p_TV.argmax(-1) == target_T).all())

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, each up to the first of its `until` strings. Raises ValueError for a task that samples."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, question: str, options: Fields) -> str:
        """The greedy continuation of a question, up to the first text that ends it."""
        if options.get("do_sample"):
            raise ValueError("the task samples its answers (do_sample); runs are evaluated by their greedy answers")
        max_tokens = int(options.get("max_gen_toks", MAX_ANSWER_TOKENS))
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        ids = self.tok_encode(question) or [self.prefix_token_id]
        answer = ""
        start = len(ids)
        is_truncated = False
        while len(ids) - start < max_tokens:
            # Truncated only when needed: most answers are much shorter than their limit.
            is_truncated |= len(ids) > self.max_length
            x_1TD = self._last_state([ids[-self.max_length :]])
            token = int(self._probed.logits(x_1TD[:, -1:]).argmax())
            if token == self.eot_token_id:
                break
            ids.append(token)
            answer = self._text.decode(ids[start:])
            if ends := [answer.index(text) for text in until if text and text in answer]:
                answer = answer[: min(ends)]
                break
        self.n_truncated += is_truncated
        return answer


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
