"""Does a longer training context make attention sparser than uniform, damp variance, and make deep layers useful?

The loss is compared at the context that all runs share, since a longer context lowers the loss by itself.

    python analysis/seq_len.py RESULTS_DIR [...]
"""

from sparsedepth.effects.script import answer, run_script

CLAIM = (
    "for T = 256, 512, 1024, 2048, 4096, 8192 usefulness is 0.69, 0.75, 0.75, 0.81, 0.81, 0.75 and perplexity, each at "
    "its own length, 18.51, 15.71, 14.77, 14.51, 14.52, 16.30 (2603.15389, table of T; one run each)"
)

if __name__ == "__main__":
    sparsity = ("attention_sparsity", "attention_sparsity_rel")
    outcomes = ("val_loss_common", "usefulness", "residual_variance_last", *sparsity)
    run_script(lambda paths: answer(paths, "seq_len", outcomes, CLAIM))
