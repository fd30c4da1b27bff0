"""The decoder: an embedding, blocks on a residual stream, a norm, and the head.

    x_0 = E tokens,   x_l = block_l(x_(l-1)),   logits = W N(x_L)

With all options off this is Llama; with experts Mixtral (gates renormalised) or OLMoE (raw gates,
q/k norm over all heads); with q/k norm Qwen3; with a window Mistral.

A block is `model.block`, LNS included; every other variation is a class of `model.variants`.

Shapes: B sequences, T tokens, D d_model (of x: all sources together), K head width, V vocabulary.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import init
from sparsedepth.model.attention import Attention
from sparsedepth.model.block import Block
from sparsedepth.model.context import Context, rotary_tables
from sparsedepth.model.feedforward import Experts, RouterLoss
from sparsedepth.model.head import Head
from sparsedepth.model.linear import Embedding, TensorPair
from sparsedepth.model.norms import make_norm
from sparsedepth.model.variants.factors import profile
from sparsedepth.model.variants.loops import make_blocks
from sparsedepth.model.variants.sources import Sources
from sparsedepth.model.variants.streams import Coefficients, SumOfStreams


class Decoder(nn.Module):
    """Tokens in, logits out; the initial weights are a function of (config, seed)."""

    blocks: Sequence[Block]

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.embed_norm = make_norm(config) if config.norm == "peri" else nn.Identity()
        self.blocks = cast(Sequence[Block], nn.ModuleList(make_blocks(config)))
        self.sources = Sources(config, 2 * config.n_layers) if config.attention_residuals else None
        self.sources = SumOfStreams(config) if config.n_streams > 1 else self.sources
        self.norm = make_norm(config)
        self.head = Head(config)
        self.stream = torch.float32
        """of the residual stream under autocast"""
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        if self.embed.weight.device.type != "meta":
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights (`init.draw`), and set buffers, undefined on the meta device."""
        init.draw(self, self.config, seed)
        for part in self.modules():
            if isinstance(part, Block | Sources | Coefficients):
                part.initialise()
        if self.config.residual_gate == "admin":
            was_training = self.training
            self.eval()
            n_tokens = min(self.config.seq_len, 128)
            tokens_BT = self.embed.random_inputs(8, n_tokens, init.generator(seed, "profile"))
            x_BTD = self.embed_tokens(tokens_BT.to(self.embed.weight.device))
            profile(self.blocks, x_BTD, self.context(tokens_BT, x_BTD))
            self.train(was_training)

    def embed_tokens(self, tokens_BT: Tensor) -> Tensor:
        """x_BTD, the residual stream before the first block."""
        x_BTD = self.embed_norm(self.embed(tokens_BT))
        return x_BTD if self.sources is None else self.sources.widen(x_BTD)

    def positions(self, n_tokens: int) -> Context:
        """What blocks read of any tokens: their positions, and what each sees."""
        config = self.config
        rotary = rotary_tables(n_tokens, config.d_head, config.rope_theta, self.embed.weight.device)
        return Context(rotary, window=config.sliding_window)

    def documents(self, tokens_BT: Tensor) -> Tensor | None:
        """document_BT, the index of each token's document in its sequence, with `mask_documents`;
        the token `eod` is its last. Positions do not restart: RoPE depends only on differences."""
        if not self.config.mask_documents:
            return None
        is_end_BT = tokens_BT.eq(cast(int, self.config.eod)).int()
        return is_end_BT.cumsum(1) - is_end_BT

    def context(self, tokens_BT: Tensor, x_BTD: Tensor, *, in_order: bool = True) -> Context:
        """What blocks read beside the stream, given x_0; `in_order`, block 1 adds v_1 itself."""
        context = self.positions(tokens_BT.shape[1])
        context.document_BT = self.documents(tokens_BT)
        context.first_BTD = x_BTD if self.config.reads_stream_start else None
        if self.config.value_residual and not in_order:
            block = self.blocks[0]
            input_BTD = block.branch_input("attention", block.mix_with_start(x_BTD, context))
            context.value_BGTK = block.attention.values(input_BTD)
        if self.config.stream_skips and not in_order:
            for block in self.blocks[: self.config.n_layers // 2 + 1]:
                x_BTD = block(x_BTD, context)
        return context

    def hidden(self, tokens_BT: Tensor, router_losses: list[Tensor] | None = None) -> Tensor:
        """x_BTD after the last block; appends the (balance, z) losses of each MoE layer."""
        x_BTD = self.embed_tokens(tokens_BT)
        x_BTD = x_BTD.to(self.stream) if torch.is_autocast_enabled(x_BTD.device.type) else x_BTD
        context = self.context(tokens_BT, x_BTD)
        for block in self.blocks:
            router_loss = None if router_losses is None else RouterLoss()
            x_BTD = block(x_BTD, context, router_loss)
            if router_losses is not None and router_loss is not None and router_loss.value is not None:
                router_losses.append(router_loss.value)
        return x_BTD

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        """Input of the head: the norm of the stream, of the sum of streams, or of the attended sources."""
        return self.norm(x_BTD if self.sources is None else self.sources.read(x_BTD))

    def logits(self, x_BTD: Tensor) -> Tensor:
        """logits_BTV of a residual stream: final norm, then head."""
        return self.head(self.final_norm(x_BTD))

    def cross_entropy(self, x_BTD: Tensor, target_BT: Tensor) -> TensorPair:
        """The mean loss over scored targets, and loss_BT, in nat/token, in bounded memory."""
        return self.head.cross_entropy(self.final_norm(x_BTD), target_BT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """logits_BTV."""
        return self.logits(self.hidden(tokens_BT))

    def use_kernels(self, **names: str) -> None:
        """Set kernels of attention or experts by name (`kernels.OBSTACLES`), and the dtype of the stream."""
        self.stream = torch.bfloat16 if names.pop("stream", None) == "bf16" else self.stream
        kinds = {"attention": Attention, "experts": Experts}
        for part, name in names.items():
            for module in self.modules():
                if isinstance(module, kinds[part]):
                    module.kernel = name
