"""The decoder: RoPE, grouped-query attention, a feed-forward part, and where norms and scales stand.

One block l = 1..L adds two branches F, attention and then the feed-forward part, to the residual stream x:

    pre       x + F(N x)                                                                 (2002.04745)
    post      N(x + F x)                                                                 (1706.03762)
    mix       the first `mix_frac` of the blocks post, the rest pre                      (2412.13795)
    sandwich  x + N'(F(N x))                                                             (2105.13290)
    peri      sandwich, and x_0 = N(embedding)                                           (2502.02732)
    deepnorm  N(alpha x + F x),  alpha = (2L)^(1/4), initial weights by (8L)^(-1/4)      (2203.00555, decoder only)
    keel      N(2L x + F(N' x)),  2L = the number of branches                            (2601.19895)

`depth_scale` multiplies one place by s_l = 1/sqrt(l) (2502.05795, section 3 and Table 8), the same l for both branches,
never the norm of the embedding, of queries and keys, or the last one:

    lns              the output of every norm of the block          before_norm     the input of every norm of the block
    after_branch     what either branch adds                        after_residual  each sum of stream and branch
    after_attention  what attention adds                            after_ffn       what the feed-forward part adds

`residual_gate` weighs the sum by learned numbers: g F with a vector g that starts at gate_init (layerscale, 2103.17239)
or a number that starts at 0 (skipinit, 2002.10444); or N(w x + F x) with a vector w (admin, 2004.08249). In what order
they act on one branch: F, N', gate, s (after a branch), sum, s (after the residual), N.

Dropout (1706.03762, section 5.4), in training alone: of attention's weights, of the hidden units of the feed-forward
part, and of what either branch adds, as F leaves it. Deviates: not of the embedding.

`parametrisation` completep multiplies what either branch adds by base_depth / n_layers, last of all (2505.01618); it
and mup divide what the head reads by d_model / base_width. `train.optimizer` has their other rules. Deviates: attention
keeps 1/sqrt(K), which is 1/K up to a constant where the width of a head is the same at all widths.

Elsewhere: `gpas` in `Block._shrunk`, `loops` in `Block.tied`, `residual_scalars` and `value_residual` in
`model.stream_start`, `n_streams` in `model.streams`, `attention_residuals` in `model.sources`.

With `architecture` vit (2010.11929) the same blocks make an encoder of images: every position sees every other, the
stream begins with patches and learned positions (`patches`) in place of tokens and a rotation, and the head reads
classes off the first position. With all else off that is exactly ViT without the biases of its matrices.

With everything off this is exactly Llama, with experts Mixtral (gates renormalised) or OLMoE (raw gates, q/k norm over
all heads), with q/k norm Qwen3, with a window Mistral; tests hold it to the reference implementations. Deviates: post
and deepnorm keep the final norm before the head, as the code of 2502.05795 does; it can change no more than a gain
there. The same code has 8^(1/2) for alpha at any depth, and multiplies the initial weights by (8L)^(+1/4): we follow
the paper.

Shapes: B sequences, T tokens of one sequence, D d_model (of x the width of all streams), K width of a head,
V vocabulary. tokens_BT are ids, of images bytes [B, T, numbers of a patch].
"""

import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import init
from sparsedepth.model.feedforward import FeedForward, RouterLoss
from sparsedepth.model.head import Head
from sparsedepth.model.linear import Embedding, Linear
from sparsedepth.model.moe import Experts
from sparsedepth.model.norms import make_norm
from sparsedepth.model.patches import PatchEmbedding
from sparsedepth.model.rotary import Rotary, tables
from sparsedepth.model.self_attention import Attention
from sparsedepth.model.sources import Sources
from sparsedepth.model.stacked import times
from sparsedepth.model.stream_start import StreamStart
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
        # What the config leaves out is None. `init` sets the values of all parameters.
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
        # A buffer, not a float: compiled blocks then share one graph. Not saved: the config says it.
        self.register_buffer("depth_factor", torch.tensor(1 / math.sqrt(layer)), persistent=False)

    def tied(self, config: ModelConfig, layer: int) -> "Block":
        """A later layer that computes with this one's weights (`loops`).

        With `loops` = r the L = n_layers layers are r passes through L / r blocks: layer l has the weights of block
        (l - 1) mod (L / r) + 1, drawn as at its first layer, and everything else (s_l, mix, alpha) by its own l: each
        pass is a layer to `depth_scale` and to every measure. Skipped, swapped or replaced is one layer, not its block
        in all passes; two layers of one block are swapped without effect but for s_l. Layer 1 + L / r has its own
        values alone, like layer 1.
        """
        with torch.device("meta"):
            block = Block(config, layer)
        for name, part in (*self.named_children(), *self.named_parameters(recurse=False)):
            setattr(block, name, part)
        # Built on the meta device, it holds no number yet.
        block.depth_factor = torch.full_like(self.depth_factor, 1 / math.sqrt(layer))
        return block

    @property
    def is_sum(self) -> bool:
        """Whether the block is x + what attention adds + what the feed-forward part adds."""
        own = (self.stream_scalar, self.gpas_scalar, self.attention_streams)
        changes_stream = any(part is not None for part in own)
        return not (changes_stream or self.depth_scale == "after_residual" or self._sum_norm("ffn"))

    def mixed_with_start(self, x_BTD: Tensor, start: StreamStart | None) -> Tensor:
        """What the block starts from in place of its input: a x + b x_0, or the input itself."""
        if self.stream_scalar is None:
            return x_BTD
        assert start is not None and self.first_scalar is not None
        return times(x_BTD, self.stream_scalar) + times(start.x_BTD, self.first_scalar)

    def attention_input(self, x_BTD: Tensor) -> Tensor:
        """What the queries, keys and values are computed from: s N(x), or x itself where the norm comes after."""
        x_BTD = self._read("attention", x_BTD)
        return x_BTD if self.is_post else self._normed(self.attention_norm, x_BTD)

    def ffn_input(self, u_BTD: Tensor) -> Tensor:
        """What the feed-forward part and its router read, from the stream after attention: s N(u), or u itself."""
        u_BTD = self._read("ffn", u_BTD)
        return u_BTD if self.is_post else self._normed(self.ffn_norm, u_BTD)

    def added_by_attention(
        self, x_BTD: Tensor, rotary: Rotary, document_BT: Tensor | None = None, start: StreamStart | None = None
    ) -> Tensor:
        """a_BTD, the summand that attention gives the stream."""
        return self._weighed("attention", self.attention(self.attention_input(x_BTD), rotary, document_BT, start))

    def added_by_ffn(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        """f_BTD, the summand that the feed-forward part gives the stream after attention."""
        return self._weighed("ffn", self.ffn(self.ffn_input(u_BTD), router_loss))

    def joined(self, part: Part, x_BTD: Tensor, added_BTD: Tensor) -> Tensor:
        """The stream after a summand."""
        streams = self._of("streams", part)
        if streams is not None:
            return streams.joined(x_BTD, added_BTD)
        norm = self._sum_norm(part)
        x_BTD = x_BTD if norm is None else self._shrunk(x_BTD)
        if self.residual_gate == "admin":
            x_BTD = times(x_BTD, self.gate(part))
        elif self.stream_factor is not None:
            x_BTD = self.stream_factor * x_BTD
        x_BTD = x_BTD + added_BTD
        if self.depth_scale == "after_residual":
            x_BTD = times(x_BTD, self.depth_factor)
        return self._shrunk(x_BTD) if norm is None else self._normed(norm, x_BTD)

    def after_attention(
        self, x_BTD: Tensor, rotary: Rotary, document_BT: Tensor | None = None, start: StreamStart | None = None
    ) -> Tensor:
        """u_BTD, the stream between attention and the feed-forward part."""
        x_BTD = self.mixed_with_start(x_BTD, start)
        return self.joined("attention", x_BTD, self.added_by_attention(x_BTD, rotary, document_BT, start))

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary,
        router_loss: RouterLoss | None = None,
        document_BT: Tensor | None = None,
        start: StreamStart | None = None,
    ) -> Tensor:
        u_BTD = self.after_attention(x_BTD, rotary, document_BT, start)
        return self.joined("ffn", u_BTD, self.added_by_ffn(u_BTD, router_loss))

    def _read(self, part: Part, x_BTD: Tensor) -> Tensor:
        """What a branch takes of the stream: itself, or one of several streams' or sources' width."""
        reader = self._of("streams", part) or self._of("sources", part)
        return x_BTD if reader is None else reader.read(x_BTD)

    def gate(self, part: Part) -> nn.Parameter:
        """The gate of a branch, where `residual_gate` asks for one."""
        return self._of("gate", part)

    def _of(self, kind: str, part: Part) -> Any:
        """What a branch has of this kind, or None. The two branches are no modules of their own: a parameter's name
        draws its initial values, and is its key in every stored model."""
        return getattr(self, f"{part}_{kind}")

    def _shrunk(self, x_BTD: Tensor) -> Tensor:
        """x - silu(p_l) x, with the number p_l of block l that starts at 0 (`gpas`, 2506.22049): of each sum, or of the
        stream before it where a norm follows the sum, as in the authors' code. In training the gradient passes as if
        nothing had shrunk; in evaluation, where measures differentiate, it is the derivative."""
        if self.gpas_scalar is None:
            return x_BTD
        return x_BTD - times(x_BTD.detach() if self.training else x_BTD, F.silu(self.gpas_scalar))

    def _sum_norm(self, part: Part) -> nn.Module | None:
        """The norm of the sum of stream and branch, where there is one."""
        return self._of("norm" if self.is_post else "sum_norm", part)

    def _normed(self, norm: nn.Module, x_BTD: Tensor) -> Tensor:
        x_BTD = norm(times(x_BTD, self.depth_factor) if self.depth_scale == "before_norm" else x_BTD)
        return times(x_BTD, self.depth_factor) if self.depth_scale == "lns" else x_BTD

    def _weighed(self, part: Part, branch_BTD: Tensor) -> Tensor:
        if self.dropout:
            branch_BTD = F.dropout(branch_BTD, self.dropout, self.training)
        out_norm = self._of("out_norm", part)
        if out_norm is not None:
            branch_BTD = self._normed(out_norm, branch_BTD)
        if self.residual_gate in ("layerscale", "skipinit"):
            branch_BTD = times(branch_BTD, self.gate(part))
        is_scaled = self.depth_scale in ("after_branch", f"after_{part}")
        branch_BTD = times(branch_BTD, self.depth_factor) if is_scaled else branch_BTD
        branch_BTD = branch_BTD if self.branch_factor == 1 else self.branch_factor * branch_BTD
        sources = self._of("sources", part)
        return branch_BTD if sources is None else sources.placed(branch_BTD)


class Decoder(nn.Module):
    """Tokens (or patches) in, logits out. The weights are a function of (config, seed), on any device (`init`)."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        is_vit = config.architecture == "vit"
        self.embed = PatchEmbedding(config) if is_vit else Embedding(config.vocab_size, config.d_model)
        self.embed_norm = make_norm(config) if config.norm == "peri" else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(1, config.n_blocks + 1))
        for layer in range(config.n_blocks + 1, config.n_layers + 1):
            self.blocks.append(cast(Block, self.blocks[layer - 1 - config.n_blocks]).tied(config, layer))
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
        """Draw every weight (`init.draw`); set buffers, which the meta device lacks, and starts that are no draws."""
        init.draw(self, self.config, seed)
        for layer, block in enumerate(self.blocks, start=1):
            assert isinstance(block, Block)
            block.depth_factor.fill_(1 / math.sqrt(layer))
            if block.attention_streams is not None and block.ffn_streams is not None and layer <= self.config.n_blocks:
                block.attention_streams.initialise(2 * layer - 2)
                block.ffn_streams.initialise(2 * layer - 1)
        for part in self.modules():
            if isinstance(part, Sources):
                part.initialise()
        if self.config.residual_gate == "admin":
            self._profile(seed)

    def _profile(self, seed: int) -> None:
        """Admin's weights of the stream: w_1 = 1, w_i^2 = Var[x_0] + sum_(j<i) Var[branch j], i = 1..2L (2004.08249).

        Variances are over all entries for random tokens, a function of the seed; w_1 .. w_i are in place when branch
        i is profiled, as in the authors' code, which has Var[x_0] too. Nothing is dropped meanwhile.
        """
        was_training = self.training
        self.eval()
        n_tokens = min(self.config.seq_len, 128)
        draws = init.generator(seed, "profile")
        tokens_BT = self.random_tokens(8, n_tokens, draws).to(self.embed.weight.device)
        x_BTD, rotary = self.embed_tokens(tokens_BT), self.rotary(n_tokens)
        weight, variance, start = torch.ones_like(x_BTD[0, 0, 0]), x_BTD.var(), StreamStart(x_BTD)
        for block in self.blocks:
            assert isinstance(block, Block)
            for part in PARTS:
                block.gate(part).fill_(weight)
                added_BTD = (
                    block.added_by_attention(x_BTD, rotary, start=start)
                    if part == "attention"
                    else block.added_by_ffn(x_BTD)
                )
                x_BTD = block.joined(part, x_BTD, added_BTD)
                variance = variance + added_BTD.var()
                weight = variance.sqrt()
        self.train(was_training)

    def random_tokens(self, n_sequences: int, n_tokens: int, draws: torch.Generator) -> Tensor:
        """Inputs of the model, each value as likely; of a ViT as many as its positions."""
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
        """What blocks read of x_0 besides the stream, whole before any of them runs; None where they read nothing."""
        if not self.config.reads_stream_start:
            return None
        start, block = StreamStart(x_BTD), self.blocks[0]
        assert isinstance(block, Block)
        if self.config.value_residual:
            start.value_BGTK = block.attention.values(block.attention_input(block.mixed_with_start(x_BTD, start)))
        return start

    def rotary(self, n_tokens: int) -> Rotary:
        """cos_TK and sin_TK in fp32; None for a ViT."""
        if self.config.architecture == "vit":
            return None
        d_head = self.config.d_model // self.config.n_heads
        return tables(n_tokens, d_head, self.config.rope_theta, self.embed.weight.device)

    def documents(self, tokens_BT: Tensor) -> Tensor | None:
        """document_BT, the number of each token's document in its sequence, or None without `mask_documents`.

        The token `eod` is the last of its document. Positions do not start again: RoPE sees their differences alone.
        """
        if not self.config.mask_documents:
            return None
        assert self.config.eod is not None
        is_end_BT = (tokens_BT == self.config.eod).int()
        return is_end_BT.cumsum(1) - is_end_BT

    def hidden(self, tokens_BT: Tensor, router_losses: list[Tensor] | None = None) -> Tensor:
        """x_BTD after the last block, before the final norm; appends (balance, z) of each layer with experts."""
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
        """What the head reads: the norm of the stream, of the sum of several, or of the sources that it attends to."""
        n_streams = self.config.n_streams
        if self.config.attention_residuals:
            x_BTD = self.sources.read(x_BTD)
        return self.norm(x_BTD if n_streams == 1 else x_BTD.unflatten(-1, (n_streams, -1)).sum(-2))

    def logits(self, x_BTD: Tensor) -> Tensor:
        """logits_BTV of a residual stream: final norm, then head."""
        return self.head(self.final_norm(x_BTD))

    def cross_entropy(self, x_BTD: Tensor, target_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of `logits` over the targets that are not -100, and loss_BT, nat/token; in bounded memory."""
        return self.head.cross_entropy(self.final_norm(x_BTD), target_BT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """logits_BTV."""
        return self.logits(self.hidden(tokens_BT))

    def use_kernels(
        self, *, attention: str | None = None, experts: str | None = None, products: str | None = None
    ) -> None:
        """Set the kernels of these names (`kernels.OBSTACLES`); None leaves one."""
        named = ((Attention, attention), (Experts, experts), (Linear, products))
        for module in self.modules():
            for kind, kernel in named:
                if kernel and isinstance(module, kind):
                    module.kernel = kernel
