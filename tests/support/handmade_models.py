"""Models made by hand, whose measures can be worked out on paper."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparsedepth.config.run import MeasureOnlyConfig
from sparsedepth.measure.bootstrap import BootstrapEstimate
from sparsedepth.measure.measurements import Measurements, Scored
from sparsedepth.model.context import Context
from sparsedepth.probe import fork


class HandMadeModel:
    """Blocks given as functions x_BTD -> x_BTD on the rows of an embedding table; logits = x head."""

    def __init__(
        self,
        blocks: Sequence[Callable[[Tensor], Tensor]],
        embedding_VD: Tensor,
        head_DV: Tensor | None = None,
        queries_keys: Callable[[int, Tensor], tuple[Tensor, Tensor]] | None = None,
        matrices: Sequence[Mapping[str, Tensor]] = (),
        branches: Callable[[int, Tensor], tuple[Tensor, Tensor] | None] | None = None,
    ):
        self.model: nn.Module = nn.Sequential(nn.Dropout(0.5))
        self.device = torch.device("cpu")
        self.blocks = blocks
        self.n_layers = len(blocks)
        self.embedding_VD = embedding_VD
        self.head_DV = embedding_VD.T if head_DV is None else head_DV
        self.stream_width, self.vocab_size = self.head_DV.shape
        self.queries_keys_of = queries_keys
        self.matrices_of = matrices
        self.routing_of: Sequence[Callable[[Tensor], tuple[Tensor, Tensor] | None]] = ()
        self.branches_of = branches

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return self.embedding_VD[tokens_BT]

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        return self.blocks[layer - 1](x_BTD)

    def logits(self, x_BTD: Tensor) -> Tensor:
        return x_BTD @ self.head_DV

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> tuple[Tensor, Tensor, Context]:
        assert self.queries_keys_of
        return *self.queries_keys_of(layer, x_BTD), Context()

    def matrices(self, layer: int) -> Mapping[str, Tensor]:
        return self.matrices_of[layer - 1]

    def branches(self, layer: int, x_BTD: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.branches_of(layer, x_BTD) if self.branches_of else None

    def routing(self, layer: int, x_BTD: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.routing_of[layer - 1](x_BTD) if self.routing_of else None

    @contextmanager
    def exact(self) -> Generator[None, None, None]:
        yield


@contextmanager
def tokens_per_pass(n_tokens: int) -> Generator[None, None, None]:
    """Context in which measures split their sequences and forks into passes of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork, "MAX_TOKENS", n_tokens)
        yield


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def residual_mlp(width: int, seed: int, std: float = 0.5) -> Callable[[Tensor], Tensor]:
    """x + tanh(x W): a block that is neither linear nor an identity."""
    weight = normal(width, width, seed=seed, std=std)
    return lambda x: x + torch.tanh(x @ weight)


def identity(x: Tensor) -> Tensor:
    return x


def known(value: float | None) -> float:
    """A value that must not be missing."""
    assert value is not None
    return value


def ends(estimate: BootstrapEstimate) -> tuple[float | None, float | None, float | None]:
    """The value with its interval."""
    return estimate.value, estimate.lo, estimate.hi


def brackets(estimate: BootstrapEstimate) -> bool:
    """The interval holds the value, and has a width."""
    return known(estimate.lo) <= known(estimate.value) <= known(estimate.hi) and estimate.lo != estimate.hi


def scored_text(tokens_NS: Tensor) -> Scored:
    """All positions are scored; the target is the next token."""
    return Scored(tokens_NS[:, :-1], tokens_NS[:, 1:])


def found_by(
    add_rows: Callable[..., None],
    probed: Any,
    scored: Any,
    fit: Any = None,
    eod: int | None = None,
    bytes_per_token: float | None = None,
    draws: np.random.Generator | None = None,
    **settings: Any,
) -> Measurements:
    """The rows that a measure adds about these sequences, `Scored` or inputs alone."""
    inputs, config = getattr(scored, "inputs", scored), MeasureOnlyConfig.model_construct(**settings)
    sequences = {"scored": scored, "inputs": inputs, "n_tokens": 9, "fit": fit, "eod": eod}
    sequences["bytes_per_token"] = bytes_per_token
    rows = Measurements(step=0)
    add_rows(SimpleNamespace(probed=probed, config=config, rng=lambda: draws or rng(), **sequences), rows)
    return rows


def by_layer(rows: Measurements, metric: str) -> list[float | None]:
    return [row["value"] for row in rows.layers if row["metric"] == metric]


def by_pair(rows: Measurements, metric: str) -> dict[tuple[int, int], float | None]:
    return {(row["layer"], row["other_layer"]): row["value"] for row in rows.pairs if row["metric"] == metric}


def profiles(add_rows: Callable[..., None], *given: Any, scores: dict[str, str] | None = None, **settings: Any) -> Any:
    """By metric, what a measure gives by layer, from the first on, and as a score, which may have another name."""
    rows = found_by(add_rows, *given, **settings)
    metrics = dict.fromkeys(row["metric"] for row in rows.layers)
    names = {metric: (scores or {}).get(metric, metric) for metric in metrics}
    return {
        metric: SimpleNamespace(
            by_layer=by_layer(rows, metric),
            first=min(row["layer"] for row in rows.layers if row["metric"] == metric),
            score=score(rows, name) if f"{name}_lo" in rows.summary else None,
        )
        for metric, name in names.items()
    }


def score(rows: Measurements, name: str) -> BootstrapEstimate:
    return BootstrapEstimate(*(rows.summary[f"{name}{end}"] for end in ("", "_lo", "_hi")))
