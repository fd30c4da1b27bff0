"""Loss and weights, and how much the layers do: what becomes of later updates or of the loss when layers change."""

from sparsedepth.quantities.record import Quantity

SPARSITY = "2603.15389"  # When Does Sparsity Mitigate the Curse of Depth in LLMs
CURSE = "2502.05795"  # The Curse of Depth in Large Language Models
INVERSE = "2602.05970"  # Inverse Depth Scaling From Most Layers Being Similar
EFFICIENT = "2505.13898"  # Do Language Models Use Their Depth Efficiently?
DEEPER = "2403.17887"  # The Unreasonable Ineffectiveness of the Deeper Layers
CONTROL = "control, ours"

INCREASE = (-1.0, float("inf"))
"""Of a loss, relative to it: it cannot fall below 0."""
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""Kinds of a block's matrices whose sparsity is kept apart."""

# fmt: off
LOSS: tuple[Quantity, ...] = (
    Quantity("val_loss", "held-out cross-entropy at seq_len, all positions", "nat/token",
             measure="loss", better="low", has_interval=True, stage="loss", label="validation loss"),
    Quantity("val_loss_tokens", "held-out tokens behind val_loss", "token", measure="loss", type="BIGINT"),
    Quantity("val_loss_common", "held-out cross-entropy at eval_seq_len, the shared context", "nat/token",
             measure="loss", better="low", has_interval=True, label="validation loss at one context"),
    Quantity("val_bits_per_byte", "val_loss / ln 2 / bytes per token of all held-out text: comparable across tokenizers",
             "bit/byte", measure="loss", better="low"),
)

WEIGHTS: tuple[Quantity, ...] = (
    Quantity("weight_sparsity", "share of the blocks' matrix entries with |w| < @", "share",
             tables=("runs", "layers"), measure="weights", source=SPARSITY, in_runs="{}", threshold="weight_eps",
             stage="sparsity", label="weight sparsity\n(share of weights)"),
    Quantity("weight_sparsity_rel", "share of matrix entries with |w| < @ x rms of their matrix: blind to mere shrinkage",
             "share", tables=("runs", "layers"), measure="weights", source=CONTROL, in_runs="{}",
             threshold="weight_rel_eps"),
    *(Quantity(f"weight_sparsity{rel}_{kind}",
               f"weight_sparsity{rel} of the block's {kind} matrices alone, all experts together", "share",
               tables=("layers",), measure="weights", source=source, threshold=threshold)
      for rel, source, threshold in (("", SPARSITY, "weight_eps"), ("_rel", CONTROL, "weight_rel_eps"))
      for kind in MATRICES),
)

EFFECTIVENESS: tuple[Quantity, ...] = (
    Quantity("usefulness",
             "share of blocks whose replacement by an affine map raises the loss by more than usefulness_threshold; "
             "the map is fitted on other tokens than the loss is measured on", "share of layers",
             measure="usefulness", source=SPARSITY, better="high", has_interval=True, stage="effectiveness",
             rows="affine_loss_increase"),
    Quantity("usefulness_loss_increase",
             "mean over blocks of (loss with the block replaced by its affine map - loss) / loss",
             measure="usefulness", source=f"{SPARSITY}, continuous", better="high", has_interval=True, bounds=INCREASE,
             stage="effectiveness", rows="affine_loss_increase",
             label="usefulness: loss increase with\na layer replaced, mean"),
    *(Quantity(f"usefulness_{percent}pct", f"usefulness at a threshold of {percent}%", "share of layers",
               measure="usefulness", source=SPARSITY, better="high") for percent in (2, 5, 20)),
    Quantity("effective_layers", "usefulness x n_layers", "layer", measure="usefulness", source=SPARSITY, better="high"),
    Quantity("affine_loss_increase", "(loss with the block replaced by its held-out affine map - loss) / loss",
             tables=("layers",), measure="usefulness", source=SPARSITY, bounds=INCREASE, scale="symlog",
             label="loss increase with the layer\nreplaced by an affine map"),
    Quantity("causal_score",
             "mean over pairs s < l of E_tokens||u'_l - u_l|| / E_tokens||u_l||; u_l = x_l - x_(l-1), u' with block s "
             "skipped", measure="causal", source=f"{SPARSITY} after {EFFICIENT}", better="high", has_interval=True,
             stage="effectiveness", rows="causal_effect"),
    Quantity("causal_effect", "mean over later blocks l of the causal effect of skipping this block",
             tables=("layers",), measure="causal", source=SPARSITY, label="causal effect on later layers"),
    Quantity("causal_effect", "effect of skipping block `layer` on the update of the later block `other_layer`",
             tables=("pairs",), measure="causal", source=SPARSITY, scale="log"),
    Quantity("skip_loss_increase", "(loss with the block left out - loss) / loss",
             tables=("layers",), measure="causal", source=f"identity {CONTROL}", bounds=INCREASE, scale="symlog",
             label="loss increase with\nthe layer left out"),
    Quantity("usefulness_identity",
             "share of blocks that cannot be left out: that raises the loss by more than usefulness_threshold",
             "share of layers", measure="causal", source=f"identity {CONTROL}", better="high",
             rows="skip_loss_increase"),
    Quantity("score_tokens", "held-out tokens behind the causal, permutation and usefulness scores", "token",
             measure="causal", type="BIGINT"),
    Quantity("permutation_score", "mean over pairs of |loss with the two blocks swapped - loss| / loss",
             measure="permutation", source=SPARSITY, better="high", has_interval=True, stage="effectiveness",
             rows="permutation_effect"),
    Quantity("permutation_effect", "|loss with blocks `layer` and `other_layer` swapped - loss| / loss",
             tables=("pairs",), measure="permutation", source=SPARSITY, scale="symlog",
             label="permutation: loss increase"),
)

RELEASED_CODE: tuple[Quantity, ...] = (
    Quantity("causal_score_released", "causal_score with every update after the skipped block shifted by one layer",
             measure="released_code", source=SPARSITY),
    Quantity("permutation_score_released", "permutation_score with pairs weighted by 0.9^i and divided by their count",
             measure="released_code", source=SPARSITY),
    Quantity("usefulness_released", "usefulness with the map transposed, fitted and scored on the same tokens",
             "share of layers", measure="released_code", source=SPARSITY),
    Quantity("residual_variance_last_released", "variance of the state after the final norm",
             measure="released_code", source=SPARSITY),
)
"""What the released code of 2603.15389 computes under the names of the scores: `sparsedepth.measure.released_code`."""

EARLY_EXIT: tuple[Quantity, ...] = (
    Quantity("lens_loss_increase", "mean over l < n_layers of (lens_loss of layer l - loss) / loss",
             measure="early_exit", source=EFFICIENT, better="high", has_interval=True, bounds=INCREASE,
             rows="lens_loss"),
    Quantity("lens_loss", "loss of final norm and head on x_l, layers 0 to n_layers", "nat/token",
             tables=("layers",), measure="early_exit", source=EFFICIENT),
    Quantity("early_exit_loss_increase", "mean over l < n_layers - 1 of (early_exit_loss - loss) / loss",
             measure="early_exit", source=INVERSE, better="high", has_interval=True, bounds=INCREASE,
             rows="early_exit_loss"),
    Quantity("early_exit_loss", "loss of x_l sent through the last block, layers 0 to n_layers - 1", "nat/token",
             tables=("layers",), measure="early_exit", source=INVERSE),
)

REMOVAL: tuple[Quantity, ...] = (
    Quantity("removal_score", "mean over blocks of (loss without the block - loss) / loss",
             measure="removal", source=CURSE, better="high", has_interval=True, bounds=INCREASE, rows="removal_drop"),
    Quantity("removal_range_score", "the same over contiguous ranges of two blocks and more",
             measure="removal", source=DEEPER, better="high", has_interval=True, bounds=INCREASE),
    Quantity("removal_drop", "(loss without blocks `layer` to `other_layer`, both included - loss) / loss",
             tables=("pairs",), measure="removal", source=DEEPER, bounds=INCREASE, scale="symlog",
             label="removal: loss increase"),
    Quantity("permutation_neighbours", "mean of permutation_effect over neighbouring blocks",
             measure="neighbours", source=CONTROL, better="high", has_interval=True),
    *(quantity
      for name, where, formula in (
          ("causal_maximum", "later tokens",
           "largest relative change of a later update at a token after those that skipped `layer`"),
          ("causal_maximum_current", "all tokens",
           "the same with `layer` skipped at every token but the first, over all tokens"))
      for quantity in (
          Quantity(name, f"mean over pairs, and over sequences of their own {name}",
                   measure="causal_maximum", source=EFFICIENT, better="high", has_interval=True),
          Quantity(name, formula, tables=("pairs",), measure="causal_maximum", source=EFFICIENT, scale="log",
                   label=f"largest causal effect, {where}"))),
)

JACOBIAN: tuple[Quantity, ...] = tuple(
    Quantity(name, f"{formula} of the block{more}", tables=("runs", "layers"), measure="jacobian", source=source,
             better="high", has_interval=True, has_error=True, in_runs="mean over blocks of {}; by random probes",
             label=label)
    for name, formula, more, source, label in (
        ("jacobian_deviation", "sqrt(E_t ||J_tt - I||_F^2)", ", J_tt = d x_l[t] / d x_(l-1)[t]", SPARSITY,
         "Jacobian's deviation\nfrom identity"),
        ("jacobian_deviation_averaged", "||E_t J_tt - I||_F", ": what the tokens' Jacobians have in common", SPARSITY, ""),
        ("jacobian_deviation_released", "||E_s sum_t J_ts - I||_F / d_model", "", f"{SPARSITY}, released code",
         "Jacobian deviation, released code"))
)
# fmt: on
