"""Does damping variance without sparsity (LayerNorm Scaling) make deep layers useful and lower the loss?

The control of the chain: if LNS raises usefulness with sparsity unchanged, lower variance is enough.

    python analysis/lns.py RESULTS_DIR [...]
"""

from sparsedepth.effects.script import answer, run_script

CLAIM = (
    "LNS takes perplexity from 26.73 to 25.76 at 130M (12 layers) and 21.92 to 20.35 at 250M (24 layers), and the last "
    "layer's variance from up to 175 to at most 25 (2502.05795, tables 1 and 6; one run each)"
)

if __name__ == "__main__":
    sparsity = ("weight_sparsity_rel", "attention_sparsity_rel")
    outcomes = ("val_loss", "usefulness", "causal_score", "residual_variance_last", *sparsity)
    run_script(lambda paths: answer(paths, "depth_scale", outcomes, CLAIM))
