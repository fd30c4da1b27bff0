"""The scores' definitions, as tables for the glossary: (name, unit, meaning, source), and which direction is better.

Symbols: x_l is the residual stream after block l, u_l = x_l - x_(l-1), a_ij an attention weight, E a mean over tokens.
"""

from typing import Literal

Better = Literal["", "low", "high"]
Score = tuple[str, str, str, str, Better]
"""name, unit, meaning, source, better"""
Fact = tuple[str, str, str, str]
"""name, unit, meaning, source"""

A = "2603.15389"  # When Does Sparsity Mitigate the Curse of Depth in LLMs
B = "2502.05795"  # The Curse of Depth in Large Language Models
C = "2602.05970"  # Inverse Depth Scaling From Most Layers Being Similar
D = "2505.13898"  # Do Language Models Use Their Depth Efficiently?
BI = "2403.03853"  # ShortGPT
G = "2403.17887"  # The Unreasonable Ineffectiveness of the Deeper Layers

JACOBIAN = (
    ("jacobian_deviation", "sqrt(E_t ||J_tt - I||_F^2) of the block, J_tt = d x_l[t] / d x_(l-1)[t]", A),
    ("jacobian_deviation_averaged", "||E_t J_tt - I||_F of the block: what the tokens' Jacobians have in common", A),
    ("jacobian_deviation_released", "||E_s sum_t J_ts - I||_F / d_model of the block", f"{A}, released code"),
)
ATTENTION = (
    ("attention_entropy", "nat", "mean over rows of -sum_j a_ij ln a_ij", "control, ours"),
    ("attention_entropy_rel", "1", "mean over rows i >= 2 of the row's entropy / ln i; 1 = uniform", "control, ours"),
    ("attention_sink", "share", "mean over rows i >= 2 of a_i1, the weight on the first token", "2309.17453"),
)
EXPERTS = (
    (
        "effective_experts",
        "expert",
        "exp(-sum_e f_e ln f_e), f_e = expert e's share of the choices",
        "2101.03961 (load)",
    ),
    ("expert_load_variation", "1", "sd_e(f_e) / mean_e(f_e); 0 = balanced", "1701.06538"),
    ("router_entropy", "nat", "mean over tokens of the entropy of the router's softmax over all experts", "ours"),
)
"""By layer; the attention's by head, too. `runs` holds their means over layers."""

DEPTH_SCORES = (
    ("attention_variance", "1", "mean over layers of the variance of what attention adds", A, ""),
    ("ffn_variance", "1", "mean over layers of the variance of what the feed-forward part adds", A, ""),
    ("update_ratio", "1", "mean over layers of E ||u_l|| / ||x_(l-1)||, u_l = x_l - x_(l-1), E over tokens", D, ""),
    ("update_cosine", "1", "mean over layers of E cos(u_l, x_(l-1))", D, ""),
    ("block_influence", "1", "mean over layers of 1 - E cos(x_l, x_(l-1))", BI, "high"),
    ("angular_distance", "rad", "mean over layers of E arccos cos(x_(l-1), x_l); / pi as published", G, "high"),
    ("angular_distance_last_token", "rad", "the same at the last token of each sequence, as published", G, "high"),
    ("angular_distance_middle", "rad", "angular_distance without the first and the last layer", C, ""),
    ("update_angle", "rad", "mean over l < n_layers of E arccos cos(u_l, u_(l+1))", C, ""),
    ("angle_to_end", "rad", "mean over l < n_layers of E arccos cos(x_l, x_L), before the final norm", C, ""),
    ("lens_loss_increase", "1", "mean over l < n_layers of (lens_loss of layer l - loss) / loss", D, "high"),
    ("early_exit_loss_increase", "1", "mean over l < n_layers - 1 of (early_exit_loss - loss) / loss", C, "high"),
    ("removal_score", "1", "mean over blocks of (loss without the block - loss) / loss", B, "high"),
    ("removal_range_score", "1", "the same over contiguous ranges of two blocks and more", G, "high"),
    ("permutation_neighbours", "1", "mean of permutation_effect over neighbouring blocks", "control, ours", "high"),
    ("causal_maximum", "1", "mean over pairs, and over sequences of their own causal_maximum", D, "high"),
    (
        "causal_maximum_current",
        "1",
        "mean over pairs, and over sequences of their own causal_maximum_current",
        D,
        "high",
    ),
)
DEPTH_LAYERS = (
    ("residual_growth", "1", "residual_variance of the layer / that of the layer before", B),
    ("attention_variance", "1", "variance over its entries of what attention adds, mean over tokens", A),
    ("ffn_variance", "1", "variance over its entries of what the feed-forward part adds, mean over tokens", A),
    ("state_norm", "1", "E ||x_l||, E over tokens; layer 0 is the embedding's output", D),
    ("state_cosine", "1", "E cos(x_l, x_(l-1))", D),
    ("update_norm", "1", "E ||u_l||, u_l = x_l - x_(l-1)", D),
    ("update_ratio", "1", "E ||u_l|| / ||x_(l-1)||", D),
    ("update_cosine", "1", "E cos(u_l, x_(l-1))", D),
    ("attention_norm", "1", "E ||a_l||, a_l = what attention adds", D),
    ("attention_ratio", "1", "E ||a_l|| / ||x_(l-1)||", D),
    ("attention_cosine", "1", "E cos(a_l, x_(l-1))", D),
    ("ffn_norm", "1", "E ||f_l||, f_l = what the feed-forward part adds", D),
    ("ffn_ratio", "1", "E ||f_l|| / ||x_(l-1) + a_l||", D),
    ("ffn_cosine", "1", "E cos(f_l, x_(l-1) + a_l)", D),
    ("block_influence", "1", "1 - E cos(x_l, x_(l-1))", BI),
    ("angular_distance", "rad", "E arccos cos(x_(l-1), x_l)", G),
    ("update_angle", "rad", "E arccos cos(u_l, u_(l+1)), layers 1 to n_layers - 1", C),
    ("angle_to_end", "rad", "E arccos cos(x_l, x_L), before the final norm, layers 0 to n_layers - 1", C),
    ("lens_loss", "nat/token", "loss of final norm and head on x_l, layers 0 to n_layers", D),
    ("early_exit_loss", "nat/token", "loss of x_l sent through the last block, layers 0 to n_layers - 1", C),
)
DEPTH_PAIRS = (
    ("angular_distance", "rad", "E arccos cos(x_a, x_b), a = `layer` < b = `other_layer`, from layer 0 on", G),
    ("angular_distance_last_token", "rad", "the same at the last token of each sequence, as published", G),
    ("removal_drop", "1", "(loss without blocks `layer` to `other_layer`, both included - loss) / loss", G),
    ("causal_maximum", "1", "largest relative change of a later update at a token after those that skipped `layer`", D),
    ("causal_maximum_current", "1", "the same with `layer` skipped at every token but the first, over all tokens", D),
)
"""Geometry of the stream, early exit, removal: scores with their direction, rows by layer, rows by pair of layers."""

TRAJECTORY_SCORES: tuple[Score, ...] = (
    ("early_stop_share", "share", "share of tokens whose angles are shaped as early_stop_ideal", f"shares {C}", ""),
    ("even_share", "share", "share of tokens whose angles are shaped as even_ideal", f"shares {C}", ""),
    ("trajectory_pc1_share", "share", "share of the variance of the tokens' angles that trajectory_pc1 holds", C, ""),
    ("trajectory_pc2_share", "share", "share of the variance of the tokens' angles that trajectory_pc2 holds", C, ""),
)
TRAJECTORY_LAYERS: tuple[Fact, ...] = (
    ("trajectory_mean", "rad", "mean over tokens of theta(x_(l-1), x_l), the origin of the components", C),
    ("trajectory_pc1", "1", "first principal component of the tokens' angles, a unit vector over layers", C),
    ("trajectory_pc2", "1", "second principal component of the tokens' angles, a unit vector over layers", C),
    ("early_stop_ideal", "rad", "pi/2, the mean middle angle in the first 6/22 of the middle layers, 0, pi/2", C),
    ("even_ideal", "rad", "pi/2, the mean middle angle in every middle layer, pi/2", C),
)
TRAJECTORY_TOKENS = (
    ("step", "step", "optimiser steps done when it was measured", "BIGINT"),
    ("sequence", "", "held-out sequence, from 0", "BIGINT"),
    ("position", "token", "position in the sequence, from 0", "BIGINT"),
    ("token_id", "", "the token", "BIGINT"),
    ("document_position", "token", "tokens before it in its document; NULL where that is not known", "BIGINT"),
    ("nearest", "", "'early stop', 'even' or 'neither': the ideal whose shape its angles have", "VARCHAR"),
    ("to_early_stop", "rad", "angle of its middle angles, as a vector, with those of early_stop_ideal", "DOUBLE"),
    ("to_even", "rad", "angle of its middle angles, as a vector, with those of even_ideal", "DOUBLE"),
    ("pc1", "rad", "(its angles - trajectory_mean) projected on trajectory_pc1", "DOUBLE"),
    ("pc2", "rad", "(its angles - trajectory_mean) projected on trajectory_pc2", "DOUBLE"),
)
"""Angle trajectories: shares of tokens, rows by layer, and columns of a sample of tokens (name, unit, meaning, type)."""

USEFULNESS: tuple[Score, ...] = (
    *(
        (f"usefulness_{percent}pct", "share of layers", f"usefulness at a threshold of {percent}%", A, "high")
        for percent in (2, 5, 20)
    ),
    (
        "usefulness_identity",
        "share of layers",
        "share of blocks that cannot be left out: that raises the loss by more than usefulness_threshold",
        "identity control, ours",
        "high",
    ),
)
"""Counts beside `usefulness`, derived from the stored increases of each block; `affine_loss_increase` gives any other."""

RELEASED: tuple[Score, ...] = (
    (
        "causal_score_released",
        "1",
        "causal_score with every update after the skipped block shifted by one layer",
        A,
        "",
    ),
    (
        "permutation_score_released",
        "1",
        "permutation_score with pairs weighted by 0.9^i and divided by their count",
        A,
        "",
    ),
    (
        "usefulness_released",
        "share of layers",
        "usefulness with the map transposed, fitted and scored on the same tokens",
        A,
        "",
    ),
    ("residual_variance_last_released", "1", "variance of the state after the final norm", A, ""),
)
"""What the released code of 2603.15389 computes under the names of the scores; see `sparsedepth.measure.released_code`."""
