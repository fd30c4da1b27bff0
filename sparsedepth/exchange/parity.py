"""Inputs on which the logits of two equal models are compared. Shapes: N sequences, T tokens."""

import torch
from torch import Tensor

from sparsedepth.config.model import ModelConfig

TOLERANCE = 1e-4
"""maximum difference of a logit, in fp32"""


def random_documents(config: ModelConfig, n: int) -> Tensor:
    """tokens_NT, each sequence a single document: without `eod`, after which a mask would begin another."""
    tokens_NT = torch.randint(config.vocab_size, (n, config.seq_len), generator=torch.Generator().manual_seed(0))
    if config.eod is not None:
        tokens_NT[tokens_NT == config.eod] = (config.eod + 1) % config.vocab_size
    return tokens_NT
