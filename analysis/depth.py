"""Do more layers lower the loss, and which share of them stays useful? Against the shallowest model, all else equal.

python analysis/depth.py RESULTS_DIR [...]
"""

from sparsedepth.effects.script import answer, run_script

CLAIM = (
    "from 12 to 16, 24, 32 layers usefulness falls 1.00, 0.81, 0.63, 0.56, the causal score .355, .336, .289, .259, "
    "and the last layer's variance grows 410, 595, 826, 1240 (2603.15389, figures of scores and of final variance; "
    "one run each)"
)

if __name__ == "__main__":
    outcomes = ("val_loss", "usefulness", "effective_layers", "causal_score", "residual_variance_last")
    run_script(lambda paths: answer(paths, "n_layers", outcomes, CLAIM))
