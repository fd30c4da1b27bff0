"""The decoder written with PyTorch's own modules, as a reference for the library's speed.

Pre-norm, RoPE, grouped queries, SwiGLU, no experts, like `sparsedepth.model.decoder` with every option off; with the
same weights it has the same losses.

Shapes: B sequences, T tokens of one sequence, D d_model, H heads, K width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.n_kv_heads and config.d_ff
        self.d_head = config.d_model // config.n_heads
        kv_width = config.n_kv_heads * self.d_head
        self.attention_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key = nn.Linear(config.d_model, kv_width, bias=False)
        self.value = nn.Linear(config.d_model, kv_width, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)
        self.ffn_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        q, k, v = (
            part(normed_BTD).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = (part * cos_TK + _turned(part) * sin_TK for part in (q, k))
        out_BHTK = F.scaled_dot_product_attention(q, k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        x_BTD = x_BTD + self.output(out_BHTK.transpose(1, 2).flatten(2))
        normed_BTD = self.ffn_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))


def _turned(x_BHTK: Tensor) -> Tensor:
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainLlama(nn.Module):
    """tokens and targets in, the mean cross-entropy out."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        config = decoder.config
        with torch.device("meta"):  # the weights are the decoder's
            self.embed = nn.Embedding(config.vocab_size, config.d_model)
            self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layers))
            self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        names = {
            name.replace("attention.", "").replace("ffn.", ""): weight for name, weight in decoder.state_dict().items()
        }
        self.load_state_dict(names)
        rotary = decoder.positions(config.seq_len).rotary
        assert rotary is not None
        cos_TK, sin_TK = rotary
        self.register_buffer("cos_TK", cos_TK, persistent=False)
        self.register_buffer("sin_TK", sin_TK, persistent=False)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embed(inputs_BT)
        cos_TK, sin_TK = self.get_buffer("cos_TK"), self.get_buffer("sin_TK")
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        logits_NV = self.head(self.norm(x_BTD)).flatten(0, 1)
        return F.cross_entropy(logits_NV.float(), targets_BT.flatten())
