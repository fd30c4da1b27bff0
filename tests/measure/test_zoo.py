"""Every architecture learns, or fails as its paper reports; and is measured from end to end."""

import functools
import math

import numpy as np
import pytest
import torch
from reference import ZOO
from support.counting import counting

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.measure.suite import SUITE, measure_run
from sparsedepth.model.block import Block
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities import PROFILED
from sparsedepth.train.loop import TrainingResult, train
from sparsedepth.train.runtime import resolve

OF_FORKS = ("early_exit", "permutation", "removal", "joint", "released_code")
"""Measures that run the blocks only as causal and usefulness do."""
MODEL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8}
TRAINING = {"batch_tokens": 32, "train_tokens": 32 * 40, "lr": 4e-2, "log_every": 20, "observe_every": 1000}
MEASURING = {"val_tokens": 64, "measure_tokens": 56, "fit_tokens": 64, "jacobian_probes": 2, "precision": "fp32"}
BASE = {**MODEL, **TRAINING, **MEASURING, "measures": [name for name in SUITE if name not in OF_FORKS]}
CHANCE = math.log(12)


def held_out(seq_len: int, n_tokens: int, skip_tokens: int) -> Sequences:
    start = skip_tokens // seq_len + np.arange(n_tokens // seq_len)[:, None]
    return next_tokens((start * 5 + np.arange(seq_len + 1)) % 12)


def trained(**fields) -> tuple[RunConfig, Decoder, TrainingResult]:
    config = build(RunConfig, {**BASE, **fields}, "test")
    model = Decoder(config, config.seed)
    return config, model, train(model, config, resolve(config, RuntimeConfig(device="cpu", threads=1)), counting)


@functools.cache
def of_the_zoo(name: str) -> tuple[RunConfig, Decoder, TrainingResult]:
    return trained(**ZOO[name])


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_of_the_zoo_learns_the_task(name):
    _, _, result = of_the_zoo(name)
    assert result.outcome == "ok" and result.steps == 40
    assert result.curves[0]["train_loss"] == pytest.approx(CHANCE, rel=0.05)
    assert result.curves[-1]["train_loss"] < 0.1 * CHANCE


@pytest.mark.parametrize("name", ZOO)
def test_it_is_measured_from_end_to_end(name):
    config, model, _ = of_the_zoo(name)
    found = measure_run(ProbedDecoder(model.eval()), config, held_out, 1.0, step=40)
    missing = {name for name, value in found.summary.items() if value is None}
    missing -= {column.name for score in PROFILED for column in score.depth_columns()}  # of two layers, or of zeros
    assert {name.removesuffix("_lo").removesuffix("_hi") for name in missing} == (
        {"angular_distance_middle"} if config.n_layers == 2 else set()
    )
    assert all(math.isfinite(value) for value in found.summary.values() if value is not None)
    assert ("router_entropy" in found.summary) == (config.n_experts > 0)
    assert len({row["metric"] for row in found.layers if row["layer"] == 1}) > 30
    for row in (*found.layers, *found.heads, *found.pairs):
        assert row["value"] is None or math.isfinite(row["value"])


@pytest.mark.parametrize("name", ZOO)
def test_the_blocks_parts_are_what_the_block_does(name):
    """Weights trained, so that no gate is 0: the branches sum to the block, unless a norm or scale is on the stream."""
    config, model, _ = of_the_zoo(name)
    probed, tokens = ProbedDecoder(model.eval()), torch.from_numpy(held_out(8, 32, 0).inputs)
    on_the_stream = config.depth_scale == "after_residual" or config.norm in ("post", "deepnorm", "keel")
    on_the_stream |= config.residual_scalars or config.gpas or config.n_streams > 1 or config.stream_skips
    with probing(probed):
        x_BTD = probed.embed(tokens)
        for layer in range(1, config.n_layers + 1):
            after_BTD, branches = probed.block(layer, x_BTD), probed.branches(layer, x_BTD)
            assert (branches is None) == (on_the_stream or (config.norm == "mix" and layer == 1))
            if branches is not None:
                torch.testing.assert_close(x_BTD + sum(branches), after_BTD, atol=1e-5, rtol=1e-5)
            block = model.blocks[layer - 1]
            assert isinstance(block, Block)
            copies = torch.cat((x_BTD, x_BTD, x_BTD))
            torch.testing.assert_close(probed.block(layer, copies), torch.cat([after_BTD] * 3), atol=1e-5, rtol=1e-5)
            x_BTD = after_BTD
        torch.testing.assert_close(probed.logits(x_BTD), model(tokens), atol=1e-5, rtol=1e-5)


def test_scaling_after_the_residual_fails_at_depth_as_reported():
    """2502.05795, Table 8: perplexity 1358. Eight layers shrink the stream by 8!, and the loss stays at chance."""
    deep = {"n_layers": 8, "train_tokens": 32 * 50, "lr": 1e-2}
    losses = [trained(depth_scale=scale, **deep)[2].curves[-1]["train_loss"] for scale in ("lns", "after_residual")]
    assert losses[0] < 0.5 * CHANCE
    assert losses[1] == pytest.approx(CHANCE, rel=0.02)


def test_post_norm_diverges_at_a_learning_rate_that_pre_norm_bears():
    """2502.05795, Table 1: Post-LN fails where Pre-LN trains. The failure is the run's recorded outcome."""
    deep = {"n_layers": 12, "train_tokens": 32 * 30, "warmup_frac": 0.3, "lr": 0.1, "log_every": 1}
    _, _, post = trained(norm="post", **deep)
    assert post.outcome == "diverged" and post.diverged_step and "times the first step's" in (post.diverged_cause or "")
    assert trained(**deep)[2].outcome == "ok"
