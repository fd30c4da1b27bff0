"""The loss of a text run against the tables of its text, forecast before it is trained.

    loss = ratio(steps / sqrt(V / 264)) * bigram

At a tuned lr the ratio falls with the steps, hardly with depth and width, and more slowly with V, the vocabulary.
Measured on bytes of text by results/budgets, text_flops and text_deep (2 to 24 layers, widths 32 and 64), and with a
vocabulary of 2,048 at 4 layers."""

import math
from typing import NamedTuple

import numpy as np

from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig

STEPS = (30, 100, 200, 400, 800, 1600, 3200)
RATIOS = (1.33, 1.08, 0.92, 0.72, 0.64, 0.53, 0.48)
SPREAD = 0.12
"""Half the width of a forecast of the ratio: the largest error on those runs."""


FRESH_PASSES = 4
"""Over a text: as good as new text (2305.16264, section 6)."""
MOST_PASSES = 16
"""Beyond, a model learns its text by heart: 2 layers of width 64 on 54,000 bytes do at 32 passes, not yet at 16."""


class Forecast(NamedTuple):
    n_layers: int
    tokens_per_param: float
    low: float
    high: float
    unigram_loss: float
    bigram_loss: float
    tokens_needed: int
    """To be below the bigram table with the whole forecast."""
    passes: float
    """Of the longest run over its training text."""

    @property
    def is_repeated(self) -> bool:
        return self.passes > FRESH_PASSES

    @property
    def is_learned_by_heart(self) -> bool:
        return self.passes > MOST_PASSES


def forecast(config: RunConfig, unigram_loss: float, bigram_loss: float, passes: float) -> Forecast:
    ratio = float(np.interp(math.log(config.n_steps / _slowness(config)), np.log(STEPS), RATIOS))
    low, high = (bigram_loss * (ratio + side) for side in (-SPREAD, SPREAD))
    per_param = config.train_tokens / cost(config).params_total
    return Forecast(config.n_layers, per_param, low, high, unigram_loss, bigram_loss, tokens_needed(config), passes)


def tokens_needed(config: RunConfig) -> int:
    steps = np.interp(SPREAD - 1, np.negative(RATIOS), STEPS)
    return round(steps * _slowness(config)) * config.batch_tokens


def _slowness(config: RunConfig) -> float:
    return math.sqrt(config.vocab_size / 264)
