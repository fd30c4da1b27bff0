"""What cannot be watched is refused before the training starts, in one sentence with the fix."""

from functools import partial

import numpy as np
import pytest
import torch
from support.plain_loop import NAMES, Capped, Headless, Plain, TakesTargets, held_out, llama
from torch import nn

import sparsedepth as sd

IDS = held_out()
HEADLESS = {"layers": "trunk.blocks", "measures": ["usefulness"]}


class Sized(nn.Module):
    """Blocks that change the width."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32, 8), nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 32)])

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


class ReadsTokens(Plain):
    """Blocks that read the tokens through an attribute."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.trunk["blocks"]:
            x = block(x, src_key_padding_mask=ids == ids[0, 0])
        return self.words(self.last_norm(x))


def meta():
    with torch.device("meta"):
        return llama()


def integer():
    model = llama()
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(32, 16, dtype=torch.int8), requires_grad=False)
    return model


class FullyShardedDataParallel(nn.Module):
    """Of the name of PyTorch's."""

    def __init__(self):
        super().__init__()
        self.module = Plain()


def of_zero_3():
    model = llama()
    model.lm_head.weight.ds_id = 0
    return model


def quantised():
    model = llama()
    model.quantization_method = "bitsandbytes"
    return model


@pytest.mark.parametrize(
    ("model", "tokens", "given", "told"),
    [
        (lambda: nn.Linear(4, 4), IDS, {}, "Linear is none of the known types .*; it has no list of blocks"),
        (Plain, IDS, {}, r"none of the known types .*name its list .* such as layers='trunk.blocks' \(3 blocks\)"),
        (Plain, IDS, {"layers": "trunk.gone"}, "layers='trunk.gone' is no module of this Plain; it has embedding, "),
        (Plain, IDS, {"layers": "last_norm"}, "layers='last_norm' has no blocks in it; name the list, such as"),
        (Plain, IDS, NAMES | {"layers": "trunk.blocks.0"}, "run in the order .* of their list; give the list"),
        (Plain, IDS, NAMES | {"norm": "embedding"}, "are not the module's logits; name both by head= and norm="),
        (Plain, IDS, NAMES | {"norm": "trunk.blocks.0.norm1"}, "are not the module's logits; name both by head="),
        (Sized, IDS, {"layers": "blocks", "measures": "variance"}, r"block 1 of 'blocks' takes \[2, 16, 8\] and ret"),
        (ReadsTokens, IDS, NAMES | {"measures": "usefulness"}, "calls blocks by themselves, and this module's"),
        (Plain, torch.zeros(8, 17), NAMES, "the model cannot be run on these inputs|needs a loss"),
        (llama, IDS.float(), {}, r"tokens are float32 \[8, 17\]; give token ids as integers"),
        (llama, "a text", {}, r"tokens are a str that is no array of numbers; give token ids as integers"),
        (llama, IDS[0], {}, r"tokens are int64 \[17\]; give token ids as integers"),
        (llama, IDS + 20, {}, "tokens are from 20 to 51, and the model's ids from 0 to 31; tokenise the text"),
        (llama, IDS - 1, {}, "tokens are from -1 to 30"),
        (Plain, IDS + 20, NAMES, "tokens are from 20 to 51, and the model's ids from 0 to 31; tokenise the text"),
        (llama, IDS[:1], {}, "tokens have 1 sequence, and half are for fitting"),
        (llama, IDS[:2, :4], {}, "3 held-out tokens .*but d_model=16 needs more than 17; give watch more sequences"),
        (llama, IDS.repeat(1, 4)[:, :66], {}, r"and the model has 64 positions; give .* tokens\[:, :65\]"),
        (llama, IDS, {"every": 0}, "every=0 must be a whole number of steps, from 1"),
        (llama, IDS, {"every": 2.5}, "every=2.5 must be a whole number"),
        (llama, IDS, {"budget": 2}, "budget=2 must be a share of the steps' time between 0 and 1"),
        (llama, IDS, {"tokens_per_step": 0}, "tokens_per_step=0 must be a whole number, from 1"),
        (llama, IDS, {"measures": ["beauty"]}, "'beauty' is unknown; it must be one of all, usefulness"),
        (llama, IDS, {"settings": {"depth_scal": 1}}, "'depth_scal' is no field of a run; did you mean 'depth_scale'"),
        (llama, IDS, {"settings": {"depth_scale": "x"}}, "settings of 'run'.*depth_scale.*"),
        (llama, IDS, {"settings": {"n_layers": 9}}, "settings: n_layers=9, and the model has 3; leave it out"),
        (llama, IDS, {"seed": "one"}, "settings of 'run'.*seed"),
        (llama, IDS, {"name": "a/b"}, "name='a/b' must be letters, digits"),
        (llama, IDS, {"log": 3}, "log=3 must be a function of"),
        (meta, IDS, {}, "is on the device 'meta', without numbers; load or initialise the model first"),
        (integer, IDS, {}, "up_proj.weight is int8, no floating-point numbers: it cannot be measured; load"),
        (FullyShardedDataParallel, IDS, {}, r"cannot run the model \(FSDP1, DeepSpeed ZeRO-3\); use FSDP2"),
        (of_zero_3, IDS, {}, "every rank has a part of the weights"),
        (quantised, IDS, {}, "is quantised .float32.: it cannot be measured"),
        (lambda: [llama(), llama()], IDS, {}, "a stage of a pipeline is not the whole model"),
        (lambda: "model", IDS, {}, "the model is a str, and must be a torch.nn.Module"),
        (partial(Capped, late=True), IDS, HEADLESS, "the measure usefulness needs a loss; give"),
        (TakesTargets, IDS, NAMES, "missing 1 .*'targets'.; forward must take them alone, as with targets=None"),
        (Headless, IDS, HEADLESS, "the measure usefulness needs a loss; give loss="),
        (Plain, IDS, NAMES | {"measures": ["attention"]}, "reads parts of a block that are not known of this m"),
        (llama, (IDS, np.zeros(3)), {"layers": "model.layers"}, "8 inputs and 3 targets; give one target for each"),
    ],
)  # fmt: skip
def test_it_is_refused_with_the_fix_and_nothing_is_written(model, tokens, given, told, tmp_path):
    with pytest.raises(ValueError, match=told) as error:
        sd.watch(model(), tokens, **{"out": tmp_path / "out", **given})
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_an_out_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for place, told in (("model", "is a model or a run; name a results folder"), ("file", "is a file; name a results")):
        with pytest.raises(ValueError, match=told):
            sd.watch(llama(), held_out(), out=tmp_path / place)


def test_a_step_is_a_number_of_steps():
    watch = sd.watch(llama(), held_out(), out=None)
    for step in (-1, 2.0, True):
        with pytest.raises(ValueError, match="must be the number of optimizer steps done"):
            watch(step)


def test_a_step_of_several_batches_is_measured_once():
    """A loop that accumulates gradients may call with one step several times, where nothing is written, too."""
    steps = []
    watch = sd.watch(
        llama(), held_out(), out=None, every=2, measures="variance", log=lambda values, step: steps.append(step)
    )
    assert [watch(step) is None for step in (0, 0, 1, 1, 2, 2)] == [False, True, True, True, False, True]
    assert steps == [0, 2] and watch(2, now=True)
