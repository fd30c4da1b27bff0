"""Does stronger weight decay make weights sparser, residual variance lower and deep layers more useful?

At a fixed learning rate weight_decay also sets the AdamW time scale 1 / (lr * weight_decay), which is printed with the
verdicts: an effect may come from the time scale instead of sparsity. weight_sparsity_rel does not change if weights
just shrink.

    python analysis/weight_decay.py RESULTS_DIR [...]
"""

from collections.abc import Iterator

import pandas as pd

from sparsedepth.effects.script import answer, run_script

CLAIM = (
    "for lambda = 0, 0.01, 0.1, 1, 3 usefulness is 0.75, 0.75, 0.81, 0.69, 0.63 and perplexity 15.63, 15.20, 14.83, "
    "15.55, 773.42 (2603.15389, table of lambda; one run each)"
)


def time_scales(runs: pd.DataFrame) -> Iterator[str]:
    settings = (
        runs[["weight_decay", "lr", "train_tokens", "batch_tokens"]].drop_duplicates().sort_values("weight_decay")
    )
    for decay, lr, tokens, batch in settings[settings["weight_decay"] > 0].itertuples(index=False):
        steps, share = 1 / (lr * decay), batch / tokens / (lr * decay)
        yield f"weight_decay={decay:g}, lr={lr:g}: AdamW time scale {steps:,.0f} steps, {share:.3g} x the training"


if __name__ == "__main__":
    sparsity = ("weight_sparsity", "weight_sparsity_rel")
    outcomes = ("val_loss", "usefulness", "residual_variance_last", *sparsity)
    run_script(lambda paths: answer(paths, "weight_decay", outcomes, CLAIM, time_scales))
