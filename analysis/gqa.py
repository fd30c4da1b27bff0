"""Does sharing key/value heads (GQA) lower residual variance and make deep layers more useful?

python analysis/gqa.py RESULTS_DIR [...]
"""

from sparsedepth.effects.script import answer, run_script

CLAIM = (
    "with 'group size' 1 (multi-head), 4, 16 perplexity is 14.52, 14.50, 14.47 and usefulness 0.81, 0.87, 0.87: one of "
    "16 layers (2603.15389, table of G; one run each). Its Theorem 5 does not depend on the number of groups"
)

if __name__ == "__main__":
    outcomes = ("val_loss", "usefulness", "attention_sparsity_rel", "residual_variance_last")
    run_script(lambda paths: answer(paths, "n_kv_heads", outcomes, CLAIM))
