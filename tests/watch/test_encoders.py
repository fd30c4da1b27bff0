"""Encoders of transformers: BERT, ViT and DINOv2, small, by loops written on transformers alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model, ViTConfig, ViTForImageClassification

import sparsedepth as sd

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 40, (6, 12), generator=torch.Generator().manual_seed(2))
MEASURES = ["variance", "geometry", "weights", "attention", "participation", "causal"]
pytestmark = pytest.mark.filterwarnings("ignore:.*tokens fit maps")


def bert():
    return BertModel(BertConfig(vocab_size=40, **SIZES)), IDS


def vit():
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=3, **SIZES)), IMAGES


def dinov2():
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    return Dinov2Model(Dinov2Config(image_size=16, patch_size=4, mlp_ratio=2, **sizes)), IMAGES


def states(model, inputs):
    """x_0 .. x_L before the final norm, by hooks."""
    parts = model.named_modules()
    layers = [part for name, part in parts if type(part).__name__.endswith("Layer") and name[-1].isdigit()]
    seen = []

    def note(module, args, out):
        seen.append(out[0] if isinstance(out, tuple) else out)

    hooks = [layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))]
    hooks += [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        out = model.eval()(inputs)
    for hook in hooks:
        hook.remove()
    return seen, out


@pytest.mark.parametrize("make", [bert, vit, dinov2])
def test_variance_attention_and_weights_agree_with_a_plain_loop(make):
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    found = sd.watch(model, inputs, out=None, measures=MEASURES)(0)
    seen, _ = states(model, inputs)
    expected = [float(x_BTD.var(-1).mean()) for x_BTD in seen]
    assert len(expected) == 4
    by_layer = {row["layer"]: row["value"] for row in found.layers if row["metric"] == "residual_variance"}
    assert [by_layer[layer] for layer in range(4)] == pytest.approx(expected, rel=1e-5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(inputs, output_attentions=True).attentions  # BHTT of each layer
    shares = [float((weight < 0.1 / weight.shape[-1]).double().mean()) for weight in weights]
    entropy = [float(torch.special.entr(weight.double()).sum(-1).mean()) for weight in weights]
    rows = {(row["metric"], row["layer"]): row["value"] for row in found.layers}
    assert [rows["attention_sparsity_rel@0.1", layer] for layer in (1, 2, 3)] == pytest.approx(shares)
    assert [rows["attention_entropy", layer] for layer in (1, 2, 3)] == pytest.approx(entropy, rel=1e-5)
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "layer" in name]
    near = sum(int((weight.abs() < 1e-3).sum()) for weight in matrices if weight.shape[0] in (16, 32))
    of_blocks = sum(weight.numel() for weight in matrices if weight.shape[0] in (16, 32))
    assert found.summary["weight_sparsity"] == pytest.approx(near / of_blocks)
    assert ("weight_sparsity_query@0.001", 1) in rows and ("weight_sparsity_down@0.001", 3) in rows
    assert found.summary["causal_score"] > 0 and found.summary["skip_loss_increase"] is None


def test_with_a_loss_usefulness_and_permutation_are_those_of_the_whole_model():
    torch.manual_seed(0)
    model, images = vit()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    loss = lambda out, labels: F.cross_entropy(out.logits, labels, reduction="none")  # noqa: E731
    measures = ["usefulness", "permutation", "causal", "loss"]
    found = sd.watch(model, (images, LABELS), out=None, measures=measures, loss=loss)(0)
    model.eval()
    scored, labels = images[:12], LABELS[:12]  # the last half is for fitting
    layers = model.vit.layers
    with torch.no_grad():
        base = float(F.cross_entropy(model(scored).logits, labels))
        assert found.summary["val_loss"] == pytest.approx(base, rel=1e-6) and found.summary["val_accuracy"] is None
        order = [layers[1], layers[0], layers[2]]
        model.vit.layers = torch.nn.ModuleList(order)
        swapped = float(F.cross_entropy(model(scored).logits, labels))
        model.vit.layers = torch.nn.ModuleList([layers[1], layers[2]])
        skipped = float(F.cross_entropy(model(scored).logits, labels))
    rows = [row for row in found.pairs if row["metric"] == "permutation_effect"]
    effect = {(row["layer"], row["other_layer"]): row["value"] for row in rows}
    increase = {row["layer"]: row["value"] for row in found.layers if row["metric"] == "skip_loss_increase"}
    assert effect[1, 2] == pytest.approx(abs(swapped - base) / base, rel=1e-3)
    assert increase[1] == pytest.approx((skipped - base) / base, rel=1e-3)
    assert found.summary["needed_layers"] is not None and found.summary["usefulness"] is not None


def test_losses_of_a_model_in_bf16_are_computed_in_fp32():
    model, images = vit()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    loss = lambda out, labels: F.cross_entropy(out.logits, labels, reduction="none")  # noqa: E731
    low, wide = model.bfloat16(), copy.deepcopy(model).float()
    given = {"out": None, "measures": ["loss", "causal"], "loss": loss}
    found = sd.watch(low, (images.bfloat16(), LABELS), **given)(0).summary
    whole = sd.watch(wide, (images.bfloat16().float(), LABELS), **given)(0).summary
    for name in ("val_loss", "skip_loss_increase", "causal_score"):
        assert found[name] == pytest.approx(whole[name], rel=0.01)
    assert {weight.dtype for weight in low.parameters()} == {torch.bfloat16}


def test_other_inputs_or_targets_are_of_another_training(tmp_path):
    """Their rows have the same numbers."""
    model, images = vit()

    def watched(inputs, labels):
        return sd.watch(model, (inputs, labels), out=tmp_path, measures=["variance"])

    watched(images, LABELS), watched(images.clone(), LABELS.clone())
    for other in ((images + 1, LABELS), (images, LABELS.flip(0))):
        with pytest.raises(ValueError, match=r"is another training \(tokens=.*, now .*give another name or out"):
            watched(*other)


def test_a_trace_of_the_last_position_is_of_models_with_next_tokens():
    model, images = vit()
    loss = lambda out, labels: F.cross_entropy(out.logits, labels, reduction="none")  # noqa: E731
    for measure in ("trace", "trace_map"):
        with pytest.raises(ValueError, match=f"the measure {measure} needs the logits of next tokens"):
            sd.watch(model, (images, LABELS), out=None, measures=[measure], loss=loss)


def test_without_a_loss_what_needs_one_is_refused():
    model, images = vit()
    for measure in ("usefulness", "permutation", "loss", "spans"):
        with pytest.raises(ValueError, match=f"the measure {measure} needs a loss; give loss="):
            sd.watch(model, images, out=None, measures=[measure])
    with pytest.raises(ValueError, match="tokens are from 0 to 99, and the model's ids from 0 to 39"):
        sd.watch(bert()[0], torch.arange(100)[None], out=None, measures=["variance"])
