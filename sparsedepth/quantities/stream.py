"""What is seen of the residual stream and of what is added to it: variance, geometry, attention, experts, trajectories."""

from math import inf

from sparsedepth.quantities.record import Quantity, Table
from sparsedepth.quantities.scores import CONTROL, CURSE, DEEPER, EFFICIENT, INVERSE, SPARSITY

INFLUENCE = "2403.03853"  # ShortGPT
COSINE = (-1.0, 1.0)
RUNS_LAYERS: tuple[Table, ...] = ("runs", "layers")
RUNS_LAYERS_HEADS: tuple[Table, ...] = ("runs", "layers", "heads")
LAYERS: tuple[Table, ...] = ("layers",)
PAIRS: tuple[Table, ...] = ("pairs",)
TOKENS: tuple[Table, ...] = ("tokens",)
OVER_HEADS = "mean over layers and heads of {}"

# fmt: off
VARIANCE: tuple[Quantity, ...] = (
    Quantity("residual_variance_last", "residual_variance of layer n_layers, before the final norm",
             measure="variance", source=SPARSITY, better="low", has_interval=True, stage="variance", scale="log",
             is_ratio=True, rows="residual_variance", label="residual variance, last layer"),
    Quantity("residual_variance_growth", "(v_L / v_1)^(1/(L-1)), v_l = residual_variance of layer l", "1/layer",
             measure="variance", source=CURSE, has_interval=True, is_ratio=True, rows="residual_growth"),
    Quantity("residual_variance",
             "variance of x_l over its d_model entries (unbiased), mean over tokens, before the final norm; also along "
             "training, by step", tables=LAYERS, measure="variance", source=SPARSITY, scale="log"),
    Quantity("residual_growth", "residual_variance of the layer / that of the layer before",
             tables=LAYERS, measure="variance", source=CURSE, scale="log", label="growth of residual variance"),
    Quantity("attention_variance", "variance over its entries of what attention adds, mean over tokens",
             tables=RUNS_LAYERS, measure="variance", source=SPARSITY, has_interval=True, scale="log"),
    Quantity("ffn_variance", "variance over its entries of what the feed-forward part adds, mean over tokens",
             tables=RUNS_LAYERS, measure="variance", source=SPARSITY, has_interval=True, scale="log"),
)

ATTENTION: tuple[Quantity, ...] = (
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
)

EXPERTS: tuple[Quantity, ...] = (
    Quantity("effective_experts", "exp(-sum_e f_e ln f_e), f_e = expert e's share of the choices", "expert",
             tables=RUNS_LAYERS, measure="experts", source="2101.03961 (load)", has_interval=True),
    Quantity("expert_load_variation", "sd_e(f_e) / mean_e(f_e); 0 = balanced",
             tables=RUNS_LAYERS, measure="experts", source="1701.06538", has_interval=True,
             label="variation of expert load"),
    Quantity("router_entropy", "mean over tokens of the entropy of the router's softmax over all experts", "nat",
             tables=RUNS_LAYERS, measure="experts", source="ours", has_interval=True),
)

GEOMETRY: tuple[Quantity, ...] = (
    Quantity("state_norm", "E ||x_l||, E over tokens; layer 0 is the embedding's output",
             tables=LAYERS, measure="geometry", source=EFFICIENT, scale="log"),
    Quantity("state_cosine", "E cos(x_l, x_(l-1))", tables=LAYERS, measure="geometry", source=EFFICIENT, bounds=COSINE),
    Quantity("update_norm", "E ||u_l||, u_l = x_l - x_(l-1)", tables=LAYERS, measure="geometry", source=EFFICIENT, scale="log"),
    Quantity("update_ratio", "E ||u_l|| / ||x_(l-1)||, u_l = x_l - x_(l-1), E over tokens",
             tables=RUNS_LAYERS, measure="geometry", source=EFFICIENT, has_interval=True, scale="log"),
    Quantity("update_cosine", "E cos(u_l, x_(l-1))",
             tables=RUNS_LAYERS, measure="geometry", source=EFFICIENT, has_interval=True, bounds=COSINE),
    *(Quantity(f"{part}_{what}", formula.format(added=added, before=before),
               tables=LAYERS, measure="geometry", source=EFFICIENT,
               bounds=COSINE if what == "cosine" else None, scale="linear" if what == "cosine" else "log")
      for part, added, before, meaning in (
          ("attention", "a_l", "x_(l-1)", "a_l = what attention adds"),
          ("ffn", "f_l", "x_(l-1) + a_l", "f_l = what the feed-forward part adds"))
      for what, formula in (("norm", f"E ||{{added}}||, {meaning}"), ("ratio", "E ||{added}|| / ||{before}||"),
                            ("cosine", "E cos({added}, {before})"))),
    Quantity("block_influence", "1 - E cos(x_l, x_(l-1))", tables=RUNS_LAYERS, measure="geometry",
             source=INFLUENCE, better="high", has_interval=True, bounds=(0, 2)),
    Quantity("angular_distance", "E arccos cos(x_(l-1), x_l); / pi as published", "rad",
             tables=RUNS_LAYERS, measure="geometry", source=DEEPER, better="high", has_interval=True),
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
)

TRAJECTORIES: tuple[Quantity, ...] = (
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
          ("token_id", "the token", ""),
          ("document_position", "tokens before it in its document; NULL where that is not known", "token"))),
    Quantity("nearest", "'early stop', 'even' or 'neither': the ideal whose shape its angles have", "",
             tables=TOKENS, measure="trajectories", type="VARCHAR"),
    *(Quantity(name, formula, "rad", tables=TOKENS, measure="trajectories", bounds=bounds)
      for name, formula, bounds in (
          ("to_early_stop", "angle of its middle angles, as a vector, with those of early_stop_ideal", None),
          ("to_even", "angle of its middle angles, as a vector, with those of even_ideal", None),
          ("pc1", "(its angles - trajectory_mean) projected on trajectory_pc1", (-inf, inf)),
          ("pc2", "(its angles - trajectory_mean) projected on trajectory_pc2", (-inf, inf)))),
)
# fmt: on
