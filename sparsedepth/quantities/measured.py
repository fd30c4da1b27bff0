"""All measures with their costs, and a record of each number that they make.

A new measure is a `Measure` and a `Quantity` for each of its numbers; `tests/test_quantities.py` checks that they are
complete. Costs are passes over (blocks, head), from `sparsedepth.quantities.passes`; the further tokens of `loss` and of
the fit of `usefulness` are priced in `sparsedepth.plan.duration`.
"""

from dataclasses import replace
from math import inf

from sparsedepth import plugins
from sparsedepth.quantities import passes
from sparsedepth.quantities.record import Measure, Quantity, Table

SPARSITY = "2603.15389"  # When Does Sparsity Mitigate the Curse of Depth in LLMs
CURSE = "2502.05795"  # The Curse of Depth in Large Language Models
INVERSE = "2602.05970"  # Inverse Depth Scaling From Most Layers Being Similar
EFFICIENT = "2505.13898"  # Do Language Models Use Their Depth Efficiently?
DEEPER = "2403.17887"  # The Unreasonable Ineffectiveness of the Deeper Layers
INFLUENCE = "2403.03853"  # ShortGPT
CONTROL = "control, ours"

COSINE = (-1.0, 1.0)
SIZE, SQUARED = "activation", "activation²"  # units of the stream's entries
INCREASE = (-1.0, inf)
"""Range of a relative loss increase: a loss cannot fall below 0."""
LAYERS: tuple[Table, ...] = ("layers",)
PAIRS: tuple[Table, ...] = ("pairs",)
TOKENS: tuple[Table, ...] = ("tokens",)
DIFFICULTY: tuple[Table, ...] = ("difficulty",)
RUNS_LAYERS: tuple[Table, ...] = ("runs", "layers")
RUNS_LAYERS_HEADS: tuple[Table, ...] = ("runs", "layers", "heads")
OVER_HEADS = "mean over layers and heads of {}"
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""Kinds of a block's matrices with a sparsity of their own."""


_OURS: tuple[Measure, ...] = (
    Measure("usefulness", passes.by_layer),  # first: it can refuse a text that is too short
    Measure("loss", lambda sizes: (0, 0)),
    Measure("weights", lambda sizes: (0, 0)),
    Measure("variance", passes.once),
    Measure("attention", lambda sizes: (2, 0)),
    Measure("geometry", passes.once),
    Measure("experts", lambda sizes: (1 if sizes.n_experts else 0, 0)),
    Measure("early_exit", lambda sizes: (2, 2 * sizes.n_layers + 2)),
    Measure("causal", passes.by_layer),
    Measure("permutation", passes.by_pair),
    Measure("neighbours", passes.by_layer, on_request=True),
    Measure("jacobian", passes.jacobian, on_request=True),
    Measure("removal", passes.by_range, on_request=True),
    Measure("trajectories", passes.once, on_request=True),
    Measure("participation", passes.once, on_request=True),
    Measure("joint", passes.jointly, on_request=True),
    Measure("activations", lambda sizes: (4, 0), on_request=True),
    Measure("gradients", lambda sizes: (3, 3), on_request=True),
    Measure("lens", lambda sizes: (1, sizes.n_layers + 1.0), on_request=True),
    Measure("released_code", passes.released_code, on_request=True),
)

# fmt: off
_RECORDS: tuple[Quantity, ...] = (
    # Loss
    Quantity("val_loss", "held-out cross-entropy at seq_len, over the positions that count: all of a text", "nat/token",
             measure="loss", better="low", has_interval=True, stage="loss", label="validation loss"),
    Quantity("val_loss_tokens", "held-out positions that count, behind val_loss", "token", measure="loss", type="BIGINT"),
    Quantity("val_accuracy", "share of the positions behind val_loss whose most likely token is the target", "share",
             measure="loss", better="high", has_interval=True, label="validation accuracy"),
    Quantity("solved_difficulty",
             "highest difficulty of a task with accuracy >= 0.9 at it and at every lower one; one below the lowest if "
             "that is not solved; NULL for text", "operations or hops", measure="loss", better="high", has_interval=True,
             bounds=(-1.0, inf), is_count=True),
    Quantity("step", "optimiser steps done when it was measured", "step", tables=DIFFICULTY, measure="loss", type="BIGINT"),
    Quantity("difficulty", "operations so far (state tracking), hops, or operations of the expression",
             "operations or hops", tables=DIFFICULTY, measure="loss", type="BIGINT"),
    Quantity("positions", "held-out positions of this difficulty that count", "token", tables=DIFFICULTY,
             measure="loss", type="BIGINT"),
    Quantity("loss", "their cross-entropy", "nat/token", tables=DIFFICULTY, measure="loss"),
    Quantity("accuracy", "share of them whose most likely token is the target", "share", tables=DIFFICULTY,
             measure="loss"),
    Quantity("val_loss_common", "held-out cross-entropy at eval_seq_len, the shared context", "nat/token",
             measure="loss", better="low", has_interval=True, label="validation loss at one context"),
    Quantity("val_bits_per_byte", "val_loss / ln 2 / bytes per token of all held-out text: comparable across tokenizers",
             "bit/byte", measure="loss", better="low"),
    # Variance of the stream and of what is added to it
    Quantity("residual_variance_last", "residual_variance of layer n_layers, before the final norm", SQUARED,
             measure="variance", source=SPARSITY, better="low", has_interval=True, stage="variance", scale="log",
             is_ratio=True, rows="residual_variance", label="residual variance, last layer"),
    Quantity("residual_variance_growth", "(v_L / v_1)^(1/(L-1)), a factor per layer; v_l = residual_variance of layer l",
             measure="variance", source=CURSE, has_interval=True, is_ratio=True, rows="residual_growth"),
    Quantity("residual_variance",
             "variance of x_l over its d_model entries (unbiased), mean over tokens, before the final norm; also along "
             "training, by step", SQUARED, tables=LAYERS, measure="variance", source=SPARSITY, scale="log"),
    Quantity("residual_growth", "residual_variance of the layer / that of the layer before",
             tables=LAYERS, measure="variance", source=CURSE, scale="log", label="growth of residual variance"),
    Quantity("attention_variance", "variance over its entries of what attention adds, mean over tokens", SQUARED,
             tables=RUNS_LAYERS, measure="variance", source=SPARSITY, has_interval=True, scale="log"),
    Quantity("ffn_variance", "variance over its entries of what the feed-forward part adds, mean over tokens", SQUARED,
             tables=RUNS_LAYERS, measure="variance", source=SPARSITY, has_interval=True, scale="log"),
    # Weights
    Quantity("weight_sparsity", "share of the blocks' matrix entries with |w| < @", "share",
             tables=RUNS_LAYERS, measure="weights", source=SPARSITY, in_runs="{}", threshold="weight_eps",
             stage="sparsity", label="weight sparsity\n(share of weights)"),
    Quantity("weight_sparsity_rel", "share of matrix entries with |w| < @ x rms of their matrix: blind to mere shrinkage",
             "share", tables=RUNS_LAYERS, measure="weights", source=CONTROL, in_runs="{}",
             threshold="weight_rel_eps"),
    *(Quantity(f"weight_sparsity{rel}_{kind}",
               f"weight_sparsity{rel} of the block's {kind} matrices alone, all experts together", "share",
               tables=LAYERS, measure="weights", source=source, threshold=threshold)
      for rel, source, threshold in (("", SPARSITY, "weight_eps"), ("_rel", CONTROL, "weight_rel_eps"))
      for kind in MATRICES),
    # Attention weights
    Quantity("attention_sparsity", "share of causal attention weights < @", "share",
             tables=RUNS_LAYERS_HEADS, measure="attention", source=SPARSITY, has_interval=True, in_runs=OVER_HEADS,
             threshold="attention_tau", stage="sparsity", label="attention sparsity\n(share of weights)"),
    Quantity("attention_sparsity_rel",
             "share of causal attention weights a_ij < @ / i (uniform is 1/i): blind to mere length", "share",
             tables=RUNS_LAYERS_HEADS, measure="attention", source=CONTROL, has_interval=True, in_runs=OVER_HEADS,
             threshold="attention_rel_tau", stage="sparsity",
             label="attention sparsity, relative to uniform\n(share of weights)"),
    Quantity("attention_entropy", "mean over rows of -sum_j a_ij ln a_ij", "nat",
             tables=RUNS_LAYERS_HEADS, measure="attention", source=CONTROL, has_interval=True, in_runs=OVER_HEADS),
    Quantity("attention_entropy_rel", "mean over rows i >= 2 of the row's entropy / ln i; 1 = uniform",
             tables=RUNS_LAYERS_HEADS, measure="attention", source=CONTROL, has_interval=True, in_runs=OVER_HEADS,
             bounds=(0, 1), label="attention entropy / uniform"),
    Quantity("attention_sink", "mean over rows i >= 2 of a_i1, the weight on the first token", "share",
             tables=RUNS_LAYERS_HEADS, measure="attention", source="2309.17453", has_interval=True, in_runs=OVER_HEADS,
             label="attention on the first token"),
    # What becomes of the loss, and of later updates, when a block changes
    Quantity("usefulness",
             "share of blocks whose replacement by an affine map raises the loss by more than usefulness_threshold; "
             "the map is fitted on other tokens than the loss is measured on", "share of layers",
             measure="usefulness", source=SPARSITY, better="high", is_relative=True, has_interval=True, stage="effectiveness",
             rows="affine_loss_increase"),
    Quantity("usefulness_loss_increase",
             "mean over blocks of (loss with the block replaced by its affine map - loss) / loss",
             measure="usefulness", source=f"{SPARSITY}, continuous", better="high", is_relative=True, has_interval=True, bounds=INCREASE,
             stage="effectiveness", rows="affine_loss_increase", carried_by="layer",
             label="relative loss increase with a\nblock replaced, mean over blocks"),
    *(Quantity(f"usefulness_{percent}pct", f"usefulness at a threshold of {percent}%", "share of layers",
               measure="usefulness", source=SPARSITY, better="high", is_relative=True, rows="affine_loss_increase") for percent in (2, 5, 20)),
    Quantity("effective_layers", "usefulness x n_layers", "layer", measure="usefulness", source=SPARSITY, better="high",
             is_relative=True, is_count=True, rows="affine_loss_increase"),
    Quantity("affine_loss_increase", "(loss with the block replaced by its held-out affine map - loss) / loss",
             tables=LAYERS, measure="usefulness", source=SPARSITY, is_relative=True, bounds=INCREASE, scale="symlog",
             layer_interval=True, label="relative loss increase with the\nblock replaced by an affine map"),
    Quantity("affine_loss_added", "loss with the block replaced by its held-out affine map - loss", "nat/token",
             tables=RUNS_LAYERS, measure="usefulness", source=f"{SPARSITY}, absolute", better="high", has_interval=True,
             layer_interval=True, carried_by="layer", bounds=(-inf, inf), scale="symlog",
             label="loss added with the layer\nreplaced by an affine map"),
    Quantity("affine_accuracy_lost", "accuracy - accuracy with the block replaced by its held-out affine map", "share",
             tables=RUNS_LAYERS, measure="usefulness", source="ours", better="high", has_interval=True,
             layer_interval=True, carried_by="layer", bounds=(-1.0, 1.0),
             label="accuracy lost with the layer\nreplaced by an affine map"),
    Quantity("needed_layers",
             "number of blocks whose affine_loss_added is above needed_threshold, and its 95% interval above 0", "layer",
             measure="usefulness", source="ours", better="high", has_interval=True, is_count=True, label="needed layers"),
    *(Quantity(f"needed_layers_{mnat}mnat", f"needed_layers at a threshold of {mnat / 1000:g} nat/token", "layer",
               measure="usefulness", source="ours", better="high", is_count=True) for mnat in (10, 50, 200)),
    Quantity("jointly_needed_layers",
             "blocks left after replacing the cheapest by affine maps, one after another, while all replacements together "
             "add at most needed_threshold", "layer", measure="joint", source="ours", better="high", has_interval=True,
             is_count=True),
    Quantity("causal_score",
             "mean over pairs s < l of E_tokens||u'_l - u_l|| / E_tokens||u_l||; u_l = x_l - x_(l-1), u' with block s "
             "skipped", measure="causal", source=f"{SPARSITY} after {EFFICIENT}", better="high", has_interval=True,
             stage="effectiveness", rows="causal_effect", carried_by="first"),
    Quantity("causal_effect", "mean over later blocks l of the causal effect of skipping this block",
             tables=LAYERS, measure="causal", source=SPARSITY, label="causal effect on later layers"),
    Quantity("causal_effect", "effect of skipping block `layer` on the update of the later block `other_layer`",
             tables=PAIRS, measure="causal", source=SPARSITY, scale="log"),
    Quantity("skip_loss_increase", "(loss with the block left out - loss) / loss",
             tables=RUNS_LAYERS, measure="causal", source=f"identity {CONTROL}", better="high", is_relative=True,
             carried_by="layer", bounds=INCREASE, scale="symlog",
             label="relative loss increase\nwith the layer left out"),
    Quantity("usefulness_identity",
             "share of blocks that cannot be left out: that raises the loss by more than usefulness_threshold",
             "share of layers", measure="causal", source=f"identity {CONTROL}", better="high", is_relative=True,
             rows="skip_loss_increase"),
    Quantity("score_tokens", "held-out tokens behind the causal, permutation and usefulness scores", "token",
             measure="causal", type="BIGINT"),
    Quantity("permutation_score", "mean over pairs of |loss with the two blocks swapped - loss| / loss",
             measure="permutation", source=SPARSITY, better="high", is_relative=True, has_interval=True, stage="effectiveness",
             rows="permutation_effect", carried_by="both"),
    Quantity("permutation_effect", "|loss with blocks `layer` and `other_layer` swapped - loss| / loss",
             tables=PAIRS, measure="permutation", source=SPARSITY, is_relative=True, scale="symlog",
             label="permutation: relative loss increase"),
    # Jacobians of the blocks
    *(Quantity(name, f"{formula} of the block{more}", tables=RUNS_LAYERS, measure="jacobian", source=source,
               better="high", has_interval=True, has_error=True, in_runs="mean over blocks of {}; by random probes; NULL where their noise makes a square negative",
               carried_by="layer", label=label)
      for name, formula, more, source, label in (
          ("jacobian_deviation", "sqrt(E_t ||J_tt - I||_F^2)", ", J_tt = d x_l[t] / d x_(l-1)[t]", SPARSITY,
           "Jacobian's deviation\nfrom identity"),
          ("jacobian_deviation_averaged", "||E_t J_tt - I||_F", ": what the tokens' Jacobians have in common", SPARSITY, ""),
          ("jacobian_deviation_released", "||E_s sum_t J_ts - I||_F / d_model", "", f"{SPARSITY}, released code",
           "Jacobian deviation, released code"))),
    # Experts
    Quantity("effective_experts", "exp(-sum_e f_e ln f_e), f_e = expert e's share of the choices", "expert",
             tables=RUNS_LAYERS, measure="experts", source="2101.03961 (load)", has_interval=True),
    Quantity("expert_load_variation", "sd_e(f_e) / mean_e(f_e); 0 = balanced",
             tables=RUNS_LAYERS, measure="experts", source="1701.06538", has_interval=True,
             label="variation of expert load"),
    Quantity("router_entropy", "mean over tokens of the entropy of the router's softmax over all experts", "nat",
             tables=RUNS_LAYERS, measure="experts", source="ours", has_interval=True),
    # Geometry of the stream
    Quantity("state_norm", "E ||x_l||, E over tokens; layer 0 is the embedding's output", SIZE,
             tables=LAYERS, measure="geometry", source=EFFICIENT, scale="log"),
    Quantity("state_cosine", "E cos(x_l, x_(l-1))", tables=LAYERS, measure="geometry", source=EFFICIENT, bounds=COSINE),
    Quantity("update_norm", "E ||u_l||, u_l = x_l - x_(l-1)", SIZE,
             tables=LAYERS, measure="geometry", source=EFFICIENT, scale="log"),
    Quantity("update_ratio", "E ||u_l|| / ||x_(l-1)||, u_l = x_l - x_(l-1), E over tokens",
             tables=RUNS_LAYERS, measure="geometry", source=EFFICIENT, has_interval=True, scale="log"),
    Quantity("update_cosine", "E cos(u_l, x_(l-1))",
             tables=RUNS_LAYERS, measure="geometry", source=EFFICIENT, has_interval=True, bounds=COSINE),
    *(Quantity(f"{part}_{what}", formula.format(added=added, before=before), SIZE if what == "norm" else "1",
               tables=LAYERS, measure="geometry", source=EFFICIENT,
               bounds=COSINE if what == "cosine" else None, scale="linear" if what == "cosine" else "log")
      for part, added, before, meaning in (
          ("attention", "a_l", "x_(l-1)", "a_l = what attention adds"),
          ("ffn", "f_l", "x_(l-1) + a_l", "f_l = what the feed-forward part adds"))
      for what, formula in (("norm", f"E ||{{added}}||, {meaning}"), ("ratio", "E ||{added}|| / ||{before}||"),
                            ("cosine", "E cos({added}, {before})"))),
    Quantity("block_influence", "1 - E cos(x_l, x_(l-1))", tables=RUNS_LAYERS, measure="geometry",
             source=INFLUENCE, better="high", has_interval=True, carried_by="layer", bounds=(0, 2)),
    Quantity("angular_distance", "E arccos cos(x_(l-1), x_l); / pi as published", "rad",
             tables=RUNS_LAYERS, measure="geometry", source=DEEPER, better="high", has_interval=True, carried_by="layer"),
    Quantity("angular_distance", "E arccos cos(x_a, x_b), a = `layer` < b = `other_layer`, from layer 0 on", "rad",
             tables=PAIRS, measure="geometry", source=DEEPER),
    Quantity("angular_distance_last_token", "mean over layers of angular_distance at the last token of each sequence, "
             "as published", "rad", measure="geometry", source=DEEPER, better="high", has_interval=True),
    Quantity("angular_distance_last_token", "angular_distance at the last token of each sequence, as published", "rad",
             tables=PAIRS, measure="geometry", source=DEEPER, label="angular distance, last token"),
    Quantity("angular_distance_middle", "mean of angular_distance without the first and the last layer", "rad",
             measure="geometry", source=INVERSE, has_interval=True),
    Quantity("update_angle", "E arccos cos(u_l, u_(l+1)), layers 1 to n_layers - 1", "rad",
             tables=RUNS_LAYERS, measure="geometry", source=INVERSE, has_interval=True),
    Quantity("angle_to_end", "E arccos cos(x_l, x_L), before the final norm, layers 0 to n_layers - 1", "rad",
             tables=RUNS_LAYERS, measure="geometry", source=INVERSE, has_interval=True),
    # Leaving early
    Quantity("lens_loss_increase", "mean over l < n_layers of (lens_loss of layer l - loss) / loss",
             measure="early_exit", source=EFFICIENT, better="high", is_relative=True, has_interval=True, bounds=INCREASE,
             rows="lens_loss"),
    Quantity("lens_loss", "loss of final norm and head on x_l, layers 0 to n_layers", "nat/token",
             tables=LAYERS, measure="early_exit", source=EFFICIENT),
    Quantity("early_exit_loss_increase", "mean over l < n_layers - 1 of (early_exit_loss - loss) / loss",
             measure="early_exit", source=INVERSE, better="high", is_relative=True, has_interval=True, bounds=INCREASE,
             rows="early_exit_loss"),
    Quantity("early_exit_loss", "loss of x_l sent through the last block, layers 0 to n_layers - 1", "nat/token",
             tables=LAYERS, measure="early_exit", source=INVERSE),
    # Without layers, and among neighbours
    Quantity("removal_score", "mean over blocks of (loss without the block - loss) / loss",
             measure="removal", source=CURSE, better="high", is_relative=True, has_interval=True, bounds=INCREASE, rows="removal_drop"),
    Quantity("removal_range_score", "the same over contiguous ranges of two blocks and more",
             measure="removal", source=DEEPER, better="high", is_relative=True, has_interval=True, bounds=INCREASE),
    Quantity("removal_drop", "(loss without blocks `layer` to `other_layer`, both included - loss) / loss",
             tables=PAIRS, measure="removal", source=DEEPER, bounds=INCREASE, scale="symlog",
             label="removal: relative loss increase"),
    Quantity("removal_accuracy_lost", "mean over blocks of accuracy - accuracy without the block", "share",
             measure="removal", source=CURSE, better="high", has_interval=True, bounds=(-1.0, 1.0), rows="removal_accuracy_lost",
             label="accuracy lost without a layer"),
    Quantity("removal_accuracy_lost", "accuracy - accuracy without blocks `layer` to `other_layer`, both included", "share",
             tables=PAIRS, measure="removal", source=DEEPER, bounds=(-1.0, 1.0), label="removal: accuracy lost"),
    Quantity("removal_cosine_correlation", "Spearman's rank correlation over blocks of removal_drop of the block alone with "
             "1 - E cos(x_l, x_(l-1)): how well the cosine predicts the cost of removal", measure="removal",
             source="ours; 2605.14075", bounds=COSINE),
    Quantity("permutation_neighbours", "mean of permutation_effect over neighbouring blocks",
             measure="neighbours", source=CONTROL, better="high", is_relative=True, has_interval=True),
    # What is settled before the last layer
    Quantity("lens_kl", "KL divergence of the prediction read off x_l (final norm and head) from the model's own, "
             "E sum_v p_l ln(p_l / p), layers 0 to n_layers", "nat", tables=RUNS_LAYERS, measure="lens", source=EFFICIENT,
             has_interval=True, in_runs="mean over layers, without the last, of the {}"),
    Quantity("lens_overlap", "share of the 5 most likely tokens that the prediction read off x_l has in common with the "
             "model's own, layers 0 to n_layers", "share", tables=RUNS_LAYERS, measure="lens", source=EFFICIENT,
             has_interval=True, in_runs="mean over layers, without the last, of the {}"),
    # Angle trajectories of tokens
    Quantity("early_stop_share", "share of tokens whose angles are shaped as early_stop_ideal", "share",
             measure="trajectories", source=f"shares {INVERSE}", has_interval=True),
    Quantity("even_share", "share of tokens whose angles are shaped as even_ideal", "share",
             measure="trajectories", source=f"shares {INVERSE}", has_interval=True),
    *(Quantity(f"trajectory_pc{i}_share", f"share of the variance of the tokens' angles that trajectory_pc{i} holds",
               "share", measure="trajectories", source=INVERSE) for i in (1, 2)),
    Quantity("trajectory_mean", "mean over tokens of theta(x_(l-1), x_l), the origin of the components", "rad",
             tables=LAYERS, measure="trajectories", source=INVERSE),
    Quantity("trajectory_pc1", "first principal component of the tokens' angles, a unit vector over layers",
             tables=LAYERS, measure="trajectories", source=INVERSE, bounds=COSINE),
    Quantity("trajectory_pc2", "second principal component of the tokens' angles, a unit vector over layers",
             tables=LAYERS, measure="trajectories", source=INVERSE, bounds=COSINE),
    Quantity("early_stop_ideal", "pi/2, the mean middle angle in the first 6/22 of the middle layers, 0, pi/2", "rad",
             tables=LAYERS, measure="trajectories", source=INVERSE),
    Quantity("even_ideal", "pi/2, the mean middle angle in every middle layer, pi/2", "rad",
             tables=LAYERS, measure="trajectories", source=INVERSE),
    *(Quantity(name, formula, unit, tables=TOKENS, measure="trajectories", type="BIGINT")
      for name, formula, unit in (
          ("step", "optimiser steps done when it was measured", "step"),
          ("sequence", "held-out sequence, from 0", ""),
          ("position", "position in the sequence, from 0", "token"),
          ("token_id", "the token; NULL for a patch of an image", ""),
          ("document_position", "tokens before it in its document; NULL where that is not known", "token"))),
    Quantity("nearest", "'early stop', 'even' or 'neither': the ideal whose shape its angles have", "",
             tables=TOKENS, measure="trajectories", type="VARCHAR"),
    *(Quantity(name, formula, "rad", tables=TOKENS, measure="trajectories", bounds=bounds)
      for name, formula, bounds in (
          ("to_early_stop", "angle of its middle angles, as a vector, with those of early_stop_ideal", None),
          ("to_even", "angle of its middle angles, as a vector, with those of even_ideal", None),
          ("pc1", "(its angles - trajectory_mean) projected on trajectory_pc1", (-inf, inf)),
          ("pc2", "(its angles - trajectory_mean) projected on trajectory_pc2", (-inf, inf)))),
    Quantity("participation_ratio",
             "(tr C)^2 / tr C^2, C = covariance over tokens of the entries of x_l: among how many directions the stream "
             "spreads its variance", tables=RUNS_LAYERS, measure="participation", bounds=(1.0, inf),
             source="Litwin-Kumar et al. 2017; 1906.00443"),
    Quantity("effective_rank", "exp of the entropy of the shares that the eigenvalues of C have of its trace, C = covariance "
             "over tokens of the entries of x_l", tables=RUNS_LAYERS, measure="participation", bounds=(1.0, inf),
             source="Roy & Vetterli 2007, of squares"),
    Quantity("update_rank", "effective_rank of the blocks' updates u_l", tables=RUNS_LAYERS, measure="participation",
             bounds=(1.0, inf), source="Roy & Vetterli 2007, of squares"),
    # Hidden units of the dense feed-forward parts
    Quantity("activation_zeros", "share of the hidden units h of the dense feed-forward part that are exactly 0", "share",
             tables=RUNS_LAYERS, measure="activations", source="2210.06313"),
    Quantity("activation_sparsity", "share of hidden units with |h| < 0.1 x rms of their layer, zeros included", "share",
             tables=RUNS_LAYERS, measure="activations", source=f"{SPARSITY}, section 3.2.1; relative {CONTROL}",
             stage="sparsity", label="activation sparsity\n(share of hidden units)"),
    Quantity("activation_units", "E (sum h^2)^2 / (F sum h^4) of a token's F hidden units: the share that carries its energy",
             "share", tables=RUNS_LAYERS, measure="activations", source="ours, as participation_ratio"),
    Quantity("gradient_gain", "||d loss / d x_0|| / ||d loss / d x_L||, over all tokens: the gradient end to end",
             measure="gradients", source=CURSE, has_interval=True, is_ratio=True, scale="log"),
    Quantity("stream_gradient", "||d loss / d x_l|| / ||d loss / d x_L||, over all tokens", tables=LAYERS,
             measure="gradients", source=CURSE, scale="log"),
    # What the released code of 2603.15389 computes under the names of the scores: `sparsedepth.measure.released_code`
    Quantity("causal_score_released", "causal_score with every update after the skipped block shifted by one layer",
             measure="released_code", source=SPARSITY),
    Quantity("permutation_score_released", "permutation_score with pairs weighted by 0.9^i and divided by their count",
             measure="released_code", source=SPARSITY),
    Quantity("usefulness_released", "usefulness with the map transposed, fitted and scored on the same tokens",
             "share of layers", measure="released_code", source=SPARSITY),
    Quantity("residual_variance_last_released", "variance of the state after the final norm", SQUARED,
             measure="released_code", source=SPARSITY),
)
# fmt: on


PLUGINS = plugins.load()
"""Loaded here, so that ours is ready when their modules import it."""


def _of_plugins() -> tuple[list[Measure], list[Quantity]]:
    """On request, since the default of `measures` is part of a run's hash. Raises ValueError for a name of ours."""
    measures, records = [], []
    for plugin in PLUGINS:
        measure: Measure | None = plugin.get("MEASURE")
        if measure is None:
            continue
        own = plugin.get("QUANTITIES", ())
        plugins.refuse_known("measure", plugin, [measure.name], [each.name for each in (*_OURS, *measures)])
        plugins.refuse_known("quantity", plugin, [q.name for q in own], [q.name for q in (*_RECORDS, *records)])
        measures.append(replace(measure, on_request=True))
        records += [replace(quantity, measure=measure.name) for quantity in own]
    return measures, records


_measures, _quantities = _of_plugins()
MEASURES: tuple[Measure, ...] = (*_OURS, *_measures)
MEASURED: tuple[Quantity, ...] = (
    *_RECORDS,
    *_quantities,
    *(column for score in (*_RECORDS, *_quantities) for column in score.depth_columns()),
)
