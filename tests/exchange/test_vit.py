"""A ViT leaves as ViTForImageClassification: the same logits from transformers, or the reason why not."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.run_folders import loud_run

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.exchange.architecture import architecture
from sparsedepth.exchange.export import TOLERANCE, export
from sparsedepth.probe.load import load_model

TINY = {
    "architecture": "vit", "image_size": 4, "patch_size": 2, "n_channels": 3, "vocab_size": 2, "seq_len": 5,
    "batch_tokens": 20, "train_tokens": 20,
}  # fmt: skip


def run_of(folder, **fields):
    draws = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(6):
            image = draws.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / "pets" / name / f"{number}.png")
    return loud_run(folder, **TINY, corpus=f"images:{folder / 'pets'}", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"depth_scale": "lns", "residual_gate": "layerscale"},
        {"depth_scale": "after_branch", "activation": "relu2", "parametrisation": "completep", "base_width": 8},
    ],
    ids=["plain", "lns_and_layerscale", "after_branch_and_completep"],
)
def test_transformers_gives_an_image_the_logits_of_the_run(fields, tmp_path):
    """From the image file on: its processor and model, loaded as a stranger does, against the run's own model."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    run = run_of(tmp_path, **fields)
    exported = export(run, tmp_path / "out")
    names = {path.name for path in exported.folder.iterdir()}
    assert names == {"model.safetensors", "config.json", "preprocessor_config.json", "README.md"}
    assert exported.family == "vit" and 0 <= max(exported.parity.values()) <= TOLERANCE
    image = Image.open(tmp_path / "pets" / "dog" / "3.png")
    processor = AutoImageProcessor.from_pretrained(exported.folder, use_fast=False)
    model = AutoModelForImageClassification.from_pretrained(exported.folder)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    patches = [pixels[:, row : row + 2, column : column + 2].flatten() for row in (0, 2) for column in (0, 2)]
    own = load_model(run).probed.model
    with torch.no_grad():
        theirs = model(**processor(image, return_tensors="pt")).logits
        ours = own(torch.stack([torch.zeros(12), *patches])[None].byte())[:, 0]
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=1e-5)
    assert ours.abs().max() > 0.1
    assert json.loads((exported.folder / "config.json").read_text())["id2label"] == {"0": "cat", "1": "dog"}
    about = (exported.folder / "README.md").read_text()
    assert "image-classification" in about and all(note in about for note in exported.notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "sandwich"},
        {"norm_kind": "rms"},
        {"depth_scale": "after_residual"},
        {"n_experts": 2, "top_k": 2, "activation": "swiglu"},
        {"activation": "geglu"},
        {"n_kv_heads": 1},
        {"qk_norm": True},
        {"value_residual": True},
        {"gpas": True},
        {"attention_residuals": 2},
    ],
    ids=str,
)
def test_what_transformers_has_no_vit_for_is_refused_by_name(fields):
    config = build(ModelConfig, {**{n: v for n, v in TINY.items() if "tokens" not in n}, **fields}, "test")
    with pytest.raises(ValueError, match=f"cannot be exported to transformers.*{next(iter(fields))}"):
        architecture(config)
