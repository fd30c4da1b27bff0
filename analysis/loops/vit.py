"""Residual variance by layer of a small ViT, with and without LNS, while a plain loop trains it on made images.

An image is noise with a brighter quadrant; its class is the quadrant (2603.15389 and 2502.05795 show LNS for ViT, too).

    python analysis/loops/vit.py [--steps 200] [--layers 12] [--out results/vit]
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

import sparsedepth as sd


def images(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels_NCHW, labels_N = torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 4
    for pixels_CHW, label in zip(pixels_NCHW, labels_N, strict=True):
        row, column = 16 * (label // 2), 16 * (label % 2)
        pixels_CHW[:, row : row + 16, column : column + 16] += 0.5
    return pixels_NCHW, labels_N


def loss(output, labels_B: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, labels_B, reduction="none")


def train(depth_scale: str, steps: int, n_layers: int, out: str) -> list[float]:
    """The variance of x_1 .. x_L at the last step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    config = ViTConfig.from_dict({**sizes, "num_hidden_layers": n_layers, "num_labels": 4})
    model = ViTForImageClassification(config)
    if depth_scale == "lns":
        sd.scale_norms(model, "lns")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = sd.watch(model, images(64, seed=1), every=steps // 4, out=out, name=depth_scale, seed=0, loss=loss,
                     settings={"depth_scale": depth_scale}, measures=["variance", "usefulness", "causal"])  # fmt: skip
    with watch:
        for step in range(1, steps + 1):
            pixels_NCHW, labels_N = images(32, seed=step + 1)
            optimizer.zero_grad()
            loss(model(pixels_NCHW), labels_N).mean().backward()
            optimizer.step()
            watch(step)
    rows = watch.last.layers if watch.last else []
    return [row["value"] for row in rows if row["metric"] == "residual_variance" and row["layer"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", default="results/vit")
    given = parser.parse_args()
    for scale in ("none", "lns"):
        variances = train(scale, given.steps, given.layers, given.out)
        print(f"{scale:5}", " ".join(f"{value:.3g}" for value in variances))
