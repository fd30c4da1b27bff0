"""Planted ladders of shapes: runs of equal FLOPs at three budgets, one of each shape."""

import numpy as np
import pandas as pd

BUDGETS = (2e17, 8e17, 3.2e18)
SD = 0.004


def shapes(rng, optima, sd=SD, clusters=0.0):
    """Runs of equal FLOPs at three budgets; a loss rises by .02 (log2 of the aspect - optimum)^2."""
    rows = []
    for budget, optimum in zip(BUDGETS, optima, strict=True):
        for n_layers in (6, 8, 12, 16, 24, 32):
            for d_model in (256, 384, 512, 768, 1024):
                params = 12 * n_layers * d_model**2 + 32000 * d_model
                tokens = round(budget / (6 * params))
                if not 8 < tokens / params < 60:
                    continue
                aspect = np.log2(64 * n_layers / d_model)
                loss = 1.75 + 480 * params**-0.34 + 2100 * tokens**-0.37 + 0.02 * (aspect - optimum) ** 2
                rows.append(
                    (n_layers, d_model, tokens, 6 * params * tokens, loss + rng.normal(0, sd), f"{n_layers} {d_model}")
                )
    found = pd.DataFrame(rows, columns=["n_layers", "d_model", "tokens", "flops", "loss", "cluster"])
    of_shape = {name: rng.normal(0, clusters) for name in dict.fromkeys(found["cluster"])}
    return found.assign(loss=found["loss"] + found["cluster"].map(of_shape))
