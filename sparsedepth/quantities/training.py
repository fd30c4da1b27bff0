"""Quantities recorded in training: how a run ended, its cost, its curves."""

from sparsedepth.quantities.record import Quantity

# fmt: off
RUN: tuple[Quantity, ...] = (
    Quantity("outcome", "ok, or diverged (see diverged_step and diverged_cause)", "", type="VARCHAR"),
    Quantity("diverged_step", "step at which the run was found to have diverged", "step", type="BIGINT"),
    Quantity("diverged_cause", "why it counts as diverged", "", type="VARCHAR"),
    Quantity("params_total", "all parameters, embeddings and every expert included", "parameters",
             better="low", type="BIGINT"),
    Quantity("params_active", "parameters that touch one token: top_k of n_experts", "parameters",
             better="low", type="BIGINT"),
    Quantity("flops_per_token", "forward pass: 2 per multiply-add of every matrix product, full T x T attention", "FLOP"),
    Quantity("train_flops", "3 x flops_per_token x tokens_trained (backward = 2 x forward)", "FLOP",
             better="low", label="training cost"),
    Quantity("steps", "optimiser steps taken", "step", type="BIGINT"),
    Quantity("tokens_trained", "tokens trained on", "token", type="BIGINT"),
    Quantity("tokens_per_param", "tokens_trained / params_total; about 20 is compute-optimal (2203.15556)", "token",
             scale="log", is_ratio=True),
    Quantity("train_loss", "mean training cross-entropy over the last 10% of the logged steps", "nat/token", better="low"),
    Quantity("unigram_loss", "held-out loss of add-one counts of the very tokens trained on; NULL for a task", "nat/token"),
    Quantity("bigram_loss", "held-out loss of their counts by the token before, interpolated with the unigram; a model above "
             "it knows less than pairs of tokens tell; NULL for a task", "nat/token"),
    Quantity("chance_loss", "held-out loss of a task's answers guessed from position and difficulty alone, of images from how often each class comes; NULL for text",
             "nat/token"),
)

CURVES: tuple[Quantity, ...] = (
    Quantity("step", "optimiser steps done", "step", tables=("curves",), type="BIGINT"),
    Quantity("tokens", "tokens trained on so far", "token", tables=("curves",), type="BIGINT"),
    Quantity("train_loss", "cross-entropy of the step's batch, without the router losses", "nat/token", tables=("curves",)),
    Quantity("balance_loss", "load-balance loss, mean over layers; 1 = balanced; NULL without experts", tables=("curves",)),
    Quantity("lr", "learning rate of the step", tables=("curves",)),
    Quantity("grad_norm", "global gradient norm before clipping", tables=("curves",)),
    Quantity("gradient_norm", "norm of the training loss's gradient by the block's parameters, before clipping, along "
             "training; where gradients are measured", tables=("layers",), scale="log"),
    Quantity("tokens_per_second", "training speed since the last row", "token/s", tables=("curves",)),
)
# fmt: on
