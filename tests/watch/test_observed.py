"""Modules whose blocks read more than one stream: what their own passes show is measured, and nothing else is."""

import pytest
import torch
import torch.nn.functional as F
from support.plain_loop import Mixing, Plain, held_out

import sparsedepth as sd
from sparsedepth.probe.observed import OBSERVED, ObservedModule
from sparsedepth.watch.adapt import Names, adapt

IDS = held_out(8)


def test_a_block_that_reads_x_0_is_measured_by_the_modules_own_pass(tmp_path, capsys):
    torch.manual_seed(3)
    model, layers = Mixing(), "trunk.blocks"
    watch = sd.watch(model, IDS, every=1, out=tmp_path, layers=layers, measures="all")
    assert "(calls blocks by themselves, and this module's read more" in capsys.readouterr().err
    assert {*watch.adapted.measures} == OBSERVED
    found = watch(1)
    outputs = []
    for block in model.trunk["blocks"]:
        block.register_forward_hook(lambda module, given, out: outputs.append(out))
    with torch.inference_mode():
        logits_BTV = model.eval()(IDS[:, :-1])
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), IDS[:, 1:].flatten())
    assert found.summary["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    variances = [float(x_BTD.var(-1).mean()) for x_BTD in outputs]
    of_layers = {row["layer"]: row["value"] for row in found.layers if row["metric"] == "residual_variance"}
    assert [of_layers[layer] for layer in (1, 2, 3)] == pytest.approx(variances, rel=1e-5)
    with sd.open_store(tmp_path) as store:
        assert store.sql("select steps, val_loss, n_layers, usefulness from runs").rows == (
            (1, found.summary["val_loss"], 3, None),
        )


def test_of_a_stream_both_ways_give_the_same_numbers():
    torch.manual_seed(3)
    model = Plain()
    measures = [*OBSERVED]
    by_block = sd.watch(model, IDS, every=1, out=None, layers="trunk.blocks", measures=measures)
    own = sd.watch(model, IDS, every=1, out=None, layers="trunk.blocks", measures=measures)
    scored = own.adapted.tokens.scored.inputs
    observed = ObservedModule(model, model.trunk["blocks"], torch.from_numpy(scored[:2]), "trunk.blocks", 32)
    object.__setattr__(own.adapted, "probed", observed)
    expected, found = by_block(1).summary, own(1).summary
    assert expected.keys() == found.keys() and len(found) > 30
    for name, value in found.items():
        if "accuracy" in name:  # the module's own pass gives losses by sequence
            assert value is None
            continue
        assert value == (pytest.approx(expected[name], rel=1e-4, abs=1e-5) if type(value) is float else expected[name])


def test_no_block_of_it_is_called_by_itself():
    probed = adapt(Mixing(), IDS, Names(layers="trunk.blocks"), ["variance"]).probed
    x_BTD = probed.embed(IDS[:, :-1])
    assert probed.block(1, x_BTD) is not None
    with pytest.raises(ValueError, match=r"block 1 of 'trunk.blocks' reads more than the stream"):
        probed.block(1, x_BTD + 1)
