"""The decoder: RoPE, grouped-query attention and feed-forward blocks, with every placement of norms and scales.

Block l = 1..L adds two branches F, attention then feed-forward, to the residual stream x. `norm` places the norms N:

    pre       x + F(N x)                                                                 (2002.04745)
    post      N(x + F x)                                                                 (1706.03762)
    mix       the first `mix_frac` of the blocks post, the rest pre                      (2412.13795)
    sandwich  x + N'(F(N x))                                                             (2105.13290)
    peri      sandwich, and x_0 = N(embedding)                                           (2502.02732)
    deepnorm  N(alpha x + F x),  alpha = (2L)^(1/4), initial weights by (8L)^(-1/4)      (2203.00555, decoder only)
    keel      N(2L x + F(N' x)),  2L = the number of branches                            (2601.19895)

`depth_scale` multiplies by s_l = 1/sqrt(l) at one place (2502.05795, section 3 and Table 8), with the same l for both
branches; the norms of the embedding, of queries and keys, and before the head are never scaled:

    lns              the output of every norm of the block          before_norm     the input of every norm of the block
    after_branch     the output of both branches                    after_residual  each sum of stream and branch
    after_attention  the output of attention                        after_ffn       the output of the feed-forward part

`residual_gate` puts learned weights on the sum: x + g F with a vector g, initially gate_init (layerscale, 2103.17239),
or a number g, initially 0 (skipinit, 2002.10444); or N(w x + F x) with a vector w (admin, 2004.08249). The order of all
operations on a branch: F, N', gate, s (after a branch), sum, s (after the residual), N.

Dropout (1706.03762, section 5.4), in training only: on attention weights, on the hidden units of the feed-forward part,
and on the output of F. Deviates: not on the embedding.

`parametrisation` completep finally multiplies the branch output by base_depth / n_layers (2505.01618); completep and
mup divide the input of the head by d_model / base_width. Their optimizer rules are in `train.optimizer`. Deviates:
attention keeps 1/sqrt(K); the 1/K of mup differs by a constant as long as the head width is the same at all widths.

Documented elsewhere: `gpas` in `Block._gpas`, `loops` in `Block.tied_copy`, `residual_scalars` and `value_residual` in
`model.self_attention`, `n_streams` in `model.streams`, `attention_residuals` in `model.sources`.

With `architecture` vit (2010.11929) the blocks form an image encoder: attention is bidirectional, patches and learned
positions (`linear.PatchEmbedding`) replace tokens and RoPE, and the head reads the classes from position 0. With all
other options off this is ViT without matrix biases.

With all options off this is Llama; with experts Mixtral (gates renormalised) or OLMoE (raw gates, q/k norm over all
heads); with q/k norm Qwen3; with a window Mistral. Tests compare with the reference implementations. Deviates: post and
deepnorm keep the final norm before the head, as the code of 2502.05795 does; it only adds a gain there. That code also
has alpha = 8^(1/2) at any depth and multiplies initial weights by (8L)^(+1/4); we follow the paper.

Shapes: B sequences, T tokens, D d_model (of x: all streams together), K head width, V vocabulary. tokens_BT are ids, or
for images bytes [B, T, values per patch].
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import fused, init
from sparsedepth.model.feedforward import FeedForward, RouterLoss
from sparsedepth.model.head import Head
from sparsedepth.model.linear import Embedding, Linear, PatchEmbedding
from sparsedepth.model.moe import Experts
from sparsedepth.model.norms import RMSNorm, make_norm
from sparsedepth.model.self_attention import Attention, Rotary, StreamStart, tables
from sparsedepth.model.sources import Sources
from sparsedepth.model.stacked import times
from sparsedepth.model.streams import Streams

Part = Literal["attention", "ffn"]
PARTS: tuple[Part, ...] = ("attention", "ffn")


class Block(nn.Module):
    """One layer: attention, then the feed-forward part, each added to the residual stream."""

    depth_factor: Tensor

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        has_experts = config.n_experts > 0 and layer > config.n_dense_layers
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.ffn_norm = make_norm(config)
        self.ffn = Experts(config) if has_experts else FeedForward(config)
        # Parts that the config does not use are None. `init` sets the values of all parameters.
        has_out_norms, has_sum_norms = config.norm in ("sandwich", "peri"), config.norm == "keel"
        self.attention_out_norm = make_norm(config) if has_out_norms else None
        self.ffn_out_norm = make_norm(config) if has_out_norms else None
        self.attention_sum_norm = make_norm(config) if has_sum_norms else None
        self.ffn_sum_norm = make_norm(config) if has_sum_norms else None
        gate_width = {"none": 0, "skipinit": 1}.get(config.residual_gate, config.d_model)
        self.attention_gate = nn.Parameter(torch.empty(gate_width)) if gate_width else None
        self.ffn_gate = nn.Parameter(torch.empty(gate_width)) if gate_width else None
        self.stream_scalar = nn.Parameter(torch.empty(1)) if config.residual_scalars else None
        self.first_scalar = nn.Parameter(torch.empty(1)) if config.residual_scalars else None
        self.gpas_scalar = nn.Parameter(torch.empty(1)) if config.gpas else None
        self.attention_streams = Streams(config) if config.n_streams > 1 else None
        self.ffn_streams = Streams(config) if config.n_streams > 1 else None
        self.attention_sources = Sources(config, 2 * layer - 2) if config.attention_residuals else None
        self.ffn_sources = Sources(config, 2 * layer - 1) if config.attention_residuals else None
        self.is_post = layer <= config.n_post_layers and config.norm != "keel"
        self.residual_gate, self.depth_scale = config.residual_gate, config.depth_scale
        self.dropout, self.branch_factor = config.residual_dropout, 1 / config.depth_multiplier
        n_branches = 2 * config.n_layers
        self.stream_factor = {"deepnorm": n_branches**0.25, "keel": float(n_branches)}.get(config.norm)
        self.is_plain_sum = (
            not self.is_post
            and config.norm in ("pre", "mix")
            and config.norm_kind == "rms"
            and config.residual_gate == "none"
            and config.n_streams == self.branch_factor == 1
            and not (config.gpas or config.attention_residuals or config.residual_dropout)
        )
        """whether both branches are x + F(N(x)) with an RMSNorm, apart from `depth_scale`, which a stack can change"""
        # A buffer, not a float, so that compiled blocks share one graph. Not saved: the config determines it.
        self.register_buffer("depth_factor", torch.tensor(1 / math.sqrt(layer)), persistent=False)

    def tied_copy(self, config: ModelConfig, layer: int) -> "Block":
        """A later layer with this block's weights (`loops`).

        With `loops` = r the L layers are r passes through L / r blocks: layer l has the weights of block
        (l - 1) mod (L / r) + 1, initialised as at its first layer; s_l, mix and alpha depend on l. Each pass is a layer
        for `depth_scale` and for all measures: skipping, swapping or replacing affects one layer, not all passes of its
        block. With `value_residual`, all layers with block 1's weights use only their own values.
        """
        with torch.device("meta"):
            block = Block(config, layer)
        for name, part in (*self.named_children(), *self.named_parameters(recurse=False)):
            setattr(block, name, part)
        # The copy was built on the meta device, where the buffer has no value.
        block.depth_factor = torch.full_like(self.depth_factor, 1 / math.sqrt(layer))
        return block

    @property
    def is_sum(self) -> bool:
        """Whether the block computes x + attention update + feed-forward update."""
        own = (self.stream_scalar, self.gpas_scalar, self.attention_streams)
        changes_stream = any(part is not None for part in own)
        return not (changes_stream or self.depth_scale == "after_residual" or self._sum_norm("ffn"))

    def mix_with_start(self, x_BTD: Tensor, start: StreamStart | None) -> Tensor:
        """The block's input: a x + b x_0 with `residual_scalars`, else x."""
        if self.stream_scalar is None:
            return x_BTD
        assert start is not None and self.first_scalar is not None
        return times(x_BTD, self.stream_scalar) + times(start.x_BTD, self.first_scalar)

    def attention_input(self, x_BTD: Tensor) -> Tensor:
        """Input of the query, key and value projections: s N(x), or x with a post-norm."""
        x_BTD = self._branch_input("attention", x_BTD)
        return x_BTD if self.is_post else self._normed(self.attention_norm, x_BTD)

    def ffn_input(self, u_BTD: Tensor) -> Tensor:
        """Input of the feed-forward part and its router, from the stream u after attention: s N(u), or u."""
        u_BTD = self._branch_input("ffn", u_BTD)
        return u_BTD if self.is_post else self._normed(self.ffn_norm, u_BTD)

    def attention_update(
        self, x_BTD: Tensor, rotary: Rotary, document_BT: Tensor | None = None, start: StreamStart | None = None
    ) -> Tensor:
        """a_BTD, what attention adds to the stream."""
        branch_BTD = self.attention(self.attention_input(x_BTD), rotary, document_BT, start)
        return self._finish_branch("attention", branch_BTD)

    def ffn_update(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        """f_BTD, what the feed-forward part adds to the stream after attention."""
        return self._finish_branch("ffn", self.ffn(self.ffn_input(u_BTD), router_loss))

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        """The stream after adding a branch's update."""
        streams = self._part("streams", part)
        if streams is not None:
            return streams.add_update(x_BTD, update_BTD)
        norm = self._sum_norm(part)
        x_BTD = x_BTD if norm is None else self._gpas(x_BTD)
        if self.residual_gate == "admin":
            x_BTD = times(x_BTD, self.gate(part))
        elif self.stream_factor is not None:
            x_BTD = self.stream_factor * x_BTD
        x_BTD = x_BTD + update_BTD
        if self.depth_scale == "after_residual":
            x_BTD = times(x_BTD, self.depth_factor)
        return self._gpas(x_BTD) if norm is None else self._normed(norm, x_BTD)

    def after_attention(
        self, x_BTD: Tensor, rotary: Rotary, document_BT: Tensor | None = None, start: StreamStart | None = None
    ) -> Tensor:
        """u_BTD, the stream between attention and the feed-forward part."""
        x_BTD = self.mix_with_start(x_BTD, start)
        if self.attention.can_fuse and self._use_fused(x_BTD):
            return self.attention.added(x_BTD, self._fused_norm(self.attention_norm), rotary, document_BT, start)
        return self.add_update("attention", x_BTD, self.attention_update(x_BTD, rotary, document_BT, start))

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary,
        router_loss: RouterLoss | None = None,
        document_BT: Tensor | None = None,
        start: StreamStart | None = None,
    ) -> Tensor:
        u_BTD = self.after_attention(x_BTD, rotary, document_BT, start)
        if isinstance(self.ffn, FeedForward) and self.ffn.can_fuse and self._use_fused(u_BTD):
            return self.ffn.added(u_BTD, self._fused_norm(self.ffn_norm))
        return self.add_update("ffn", u_BTD, self.ffn_update(u_BTD, router_loss))

    def _use_fused(self, x_BTD: Tensor) -> bool:
        """Whether to train with whole branches by `fused`, without calling the modules of the branches: no hook of
        theirs runs."""
        is_plain_sum = self.is_plain_sum and self.depth_scale in ("none", "lns")
        return self.training and is_plain_sum and fused.use_fused(x_BTD)

    def _fused_norm(self, norm: nn.Module) -> fused.Norm:
        """The norm of a branch of a plain sum, with s_l as part of its weight."""
        assert isinstance(norm, RMSNorm)
        weight_D = norm.weight * self.depth_factor if self.depth_scale == "lns" else norm.weight
        return fused.Norm(weight_D, norm.eps)

    def gate(self, part: Part) -> nn.Parameter:
        """The gate of a branch; exists only with `residual_gate`."""
        return self._part("gate", part)

    def _part(self, kind: str, part: Part) -> Any:
        """The branch's module or parameter of this kind, or None. Branches are no modules of their own: parameter names
        seed the initial values, and are the keys of all stored models."""
        return getattr(self, f"{part}_{kind}")

    def _branch_input(self, part: Part, x_BTD: Tensor) -> Tensor:
        """The d_model channels that a branch reads, from one or several streams, or from sources."""
        reader = self._part("streams", part) or self._part("sources", part)
        return x_BTD if reader is None else reader.read(x_BTD)

    def _gpas(self, x_BTD: Tensor) -> Tensor:
        """x - silu(p_l) x with a learned number p_l, initially 0 (`gpas`, 2506.22049): applied to each sum, or to the
        stream before the sum if a norm follows, as in the authors' code. The training gradient ignores this factor; in
        evaluation, where measures differentiate, the derivative is exact."""
        if self.gpas_scalar is None:
            return x_BTD
        return x_BTD - times(x_BTD.detach() if self.training else x_BTD, F.silu(self.gpas_scalar))

    def _sum_norm(self, part: Part) -> nn.Module | None:
        """The norm after the sum of stream and branch, or None."""
        return self._part("norm" if self.is_post else "sum_norm", part)

    def _normed(self, norm: nn.Module, x_BTD: Tensor) -> Tensor:
        x_BTD = norm(times(x_BTD, self.depth_factor) if self.depth_scale == "before_norm" else x_BTD)
        return times(x_BTD, self.depth_factor) if self.depth_scale == "lns" else x_BTD

    def _finish_branch(self, part: Part, branch_BTD: Tensor) -> Tensor:
        """A branch output as it is added: with dropout, norm, gate, depth scale and depth multiplier."""
        if self.dropout:
            branch_BTD = F.dropout(branch_BTD, self.dropout, self.training)
        out_norm = self._part("out_norm", part)
        if out_norm is not None:
            branch_BTD = self._normed(out_norm, branch_BTD)
        if self.residual_gate in ("layerscale", "skipinit"):
            branch_BTD = times(branch_BTD, self.gate(part))
        is_scaled = self.depth_scale in ("after_branch", f"after_{part}")
        branch_BTD = times(branch_BTD, self.depth_factor) if is_scaled else branch_BTD
        branch_BTD = branch_BTD if self.branch_factor == 1 else self.branch_factor * branch_BTD
        sources = self._part("sources", part)
        return branch_BTD if sources is None else sources.expand_update(branch_BTD)


class Decoder(nn.Module):
    """Tokens (or patches) in, logits out. The weights are a function of (config, seed) on any device (`init`)."""

    blocks: Sequence[Block]

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        is_vit = config.architecture == "vit"
        self.embed = PatchEmbedding(config) if is_vit else Embedding(config.vocab_size, config.d_model)
        self.embed_norm = make_norm(config) if config.norm == "peri" else nn.Identity()
        blocks = [Block(config, layer) for layer in range(1, config.n_blocks + 1)]
        for layer in range(config.n_blocks + 1, config.n_layers + 1):
            blocks.append(blocks[layer - 1 - config.n_blocks].tied_copy(config, layer))
        self.blocks = cast(Sequence[Block], nn.ModuleList(blocks))
        if config.attention_residuals:
            self.sources = Sources(config, 2 * config.n_layers)
        self.norm = make_norm(config)
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        if self.embed.weight.device.type != "meta":
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights (`init.draw`), and set buffers (undefined on the meta device) and fixed initial values."""
        init.draw(self, self.config, seed)
        for layer, block in enumerate(self.blocks, start=1):
            block.depth_factor.fill_(1 / math.sqrt(layer))
            if block.attention_streams is not None and block.ffn_streams is not None and layer <= self.config.n_blocks:
                block.attention_streams.initialise(2 * layer - 2)
                block.ffn_streams.initialise(2 * layer - 1)
        for part in self.modules():
            if isinstance(part, Sources):
                part.initialise()
        if self.config.residual_gate == "admin":
            self._profile_admin(seed)

    def _profile_admin(self, seed: int) -> None:
        """Admin's weights of the stream: w_1 = 1, w_i^2 = Var[x_0] + sum_(j<i) Var[branch j], i = 1..2L (2004.08249).

        Variances are over all entries, for random tokens drawn from the seed, without dropout. w_1 .. w_i are set
        before branch i is profiled, as in the authors' code, which also includes Var[x_0].
        """
        was_training = self.training
        self.eval()
        n_tokens = min(self.config.seq_len, 128)
        draws = init.generator(seed, "profile")
        tokens_BT = self.random_tokens(8, n_tokens, draws).to(self.embed.weight.device)
        x_BTD, rotary = self.embed_tokens(tokens_BT), self.rotary(n_tokens)
        weight, variance, start = torch.ones_like(x_BTD[0, 0, 0]), x_BTD.var(), StreamStart(x_BTD)
        for block in self.blocks:
            for part in PARTS:
                block.gate(part).fill_(weight)
                is_attention = part == "attention"
                update_BTD = (
                    block.attention_update(x_BTD, rotary, start=start) if is_attention else block.ffn_update(x_BTD)
                )
                x_BTD = block.add_update(part, x_BTD, update_BTD)
                variance = variance + update_BTD.var()
                weight = variance.sqrt()
        self.train(was_training)

    def random_tokens(self, n_sequences: int, n_tokens: int, draws: torch.Generator) -> Tensor:
        """Uniformly random inputs; for a ViT all its positions."""
        if isinstance(self.embed, PatchEmbedding):
            return torch.randint(256, (n_sequences, self.config.seq_len, self.embed.weight.shape[-1]), generator=draws)
        return torch.randint(self.config.vocab_size, (n_sequences, n_tokens), generator=draws)

    def embed_tokens(self, tokens_BT: Tensor) -> Tensor:
        """x_BTD, the residual stream before the first block."""
        x_BTD = self.embed_norm(self.embed(tokens_BT))
        if self.config.attention_residuals:
            return F.pad(x_BTD, (0, self.config.stream_width - self.config.d_model))
        return x_BTD if self.config.n_streams == 1 else x_BTD.repeat(1, 1, self.config.n_streams)

    def stream_start(self, x_BTD: Tensor) -> StreamStart | None:
        """x_0 and v_1 for blocks that read them, complete before any block runs; None if none does."""
        if not self.config.reads_stream_start:
            return None
        start, block = StreamStart(x_BTD), self.blocks[0]
        if self.config.value_residual:
            start.value_BGTK = block.attention.values(block.attention_input(block.mix_with_start(x_BTD, start)))
        return start

    def rotary(self, n_tokens: int) -> Rotary:
        """cos_TK and sin_TK in fp32; None for a ViT."""
        if self.config.architecture == "vit":
            return None
        d_head = self.config.d_model // self.config.n_heads
        return tables(n_tokens, d_head, self.config.rope_theta, self.embed.weight.device)

    def documents(self, tokens_BT: Tensor) -> Tensor | None:
        """document_BT, the index of each token's document in its sequence, or None without `mask_documents`. The token
        `eod` is the last of its document. Positions do not restart: RoPE depends only on differences."""
        if not self.config.mask_documents:
            return None
        assert self.config.eod is not None
        is_end_BT = (tokens_BT == self.config.eod).int()
        return is_end_BT.cumsum(1) - is_end_BT

    def hidden(self, tokens_BT: Tensor, router_losses: list[Tensor] | None = None) -> Tensor:
        """x_BTD after the last block, before the final norm; appends the (balance, z) losses of each MoE layer."""
        rotary, document_BT = self.rotary(tokens_BT.shape[1]), self.documents(tokens_BT)
        x_BTD = self.embed_tokens(tokens_BT)
        start = StreamStart(x_BTD) if self.config.reads_stream_start else None
        for block in self.blocks:
            router_loss = None if router_losses is None else RouterLoss()
            x_BTD = block(x_BTD, rotary, router_loss, document_BT, start)
            if router_losses is not None and router_loss is not None and router_loss.value is not None:
                router_losses.append(router_loss.value)
        return x_BTD

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        """Input of the head: the norm of the stream, of the sum of streams, or of the attended sources."""
        n_streams = self.config.n_streams
        if self.config.attention_residuals:
            x_BTD = self.sources.read(x_BTD)
        return self.norm(x_BTD if n_streams == 1 else x_BTD.unflatten(-1, (n_streams, -1)).sum(-2))

    def logits(self, x_BTD: Tensor) -> Tensor:
        """logits_BTV of a residual stream: final norm, then head."""
        return self.head(self.final_norm(x_BTD))

    def cross_entropy(self, x_BTD: Tensor, target_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss over scored targets, and loss_BT, in nat/token; logits in bounded memory."""
        return self.head.cross_entropy(self.final_norm(x_BTD), target_BT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """logits_BTV."""
        return self.logits(self.hidden(tokens_BT))

    def use_kernels(
        self, *, attention: str | None = None, experts: str | None = None, products: str | None = None
    ) -> None:
        """Set the kernels by name (`kernels.OBSTACLES`); None keeps the current one."""
        kernels = ((Attention, attention), (Experts, experts), (Linear, products))
        for module in self.modules():
            for kind, kernel in kernels:
                if kernel and isinstance(module, kind):
                    module.kernel = kernel
