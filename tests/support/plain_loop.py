"""Small models, and a plain loop that trains one, with or without `watch`."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH = 32, 16


def llama(n_layers: int = 3, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(num_hidden_layers=n_layers, vocab_size=VOCAB, max_position_embeddings=64, **sizes)
    config.attention_dropout = 0.1  # training draws random numbers
    return LlamaForCausalLM(config)


class Plain(nn.Module):
    """A decoder of nobody's library, with dropout, a buffer that changes and a norm of its own name."""

    def __init__(self, n_layers: int = 3, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        layers = [
            nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True, norm_first=True) for _ in range(n_layers)
        ]
        self.trunk = nn.ModuleDict({"blocks": nn.ModuleList(layers)})
        self.last_norm, self.words = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        nn.init.normal_(self.last_norm.weight)
        self.register_buffer("n_calls", torch.zeros(()))

    def stream(self, ids, places=0.0):
        self.n_calls += 1
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids) + places
        for block in self.trunk["blocks"]:
            x = block(x, src_mask=mask)
        return x

    def forward(self, ids):
        return self.words(self.last_norm(self.stream(ids)))


class Headless(Plain):
    """Its vectors, not logits."""

    def forward(self, ids):
        return self.stream(ids)


class Capped(Plain):
    """Its norm is no module, and its logits are capped; positions are learned, for the length of its training. With
    `late` they are added after the blocks."""

    def __init__(self, late=False):
        super().__init__()
        self.late, self.last_norm, self.places = late, None, nn.Embedding(LENGTH, 16)

    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[1]))
        x = self.stream(ids) + places if self.late else self.stream(ids, places)
        return {"loss": None, "logits": 2 * torch.tanh(self.words(F.rms_norm(x, (16,))) / 2)}


class TakesTargets(Plain):
    """Its forward gives the loss alone."""

    def forward(self, ids, targets):
        return F.cross_entropy(super().forward(ids).flatten(0, 1), targets.flatten())


class Mixing(Plain):
    """The first block's input is added to that of each, and half of the first block's output taken off at the end."""

    def forward(self, ids):
        self.n_calls += 1
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = start = self.embedding(ids)
        outputs = []
        for block in self.trunk["blocks"]:
            x = block(0.9 * x + 0.1 * start, src_mask=mask)
            outputs.append(x)
        return self.words(self.last_norm(x - outputs[0] / 2))


NAMES = {"layers": "trunk.blocks", "norm": "last_norm", "head": "words"}


def held_out(n: int = 8, seed: int = 9) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    """All that a step can change, as bytes."""
    tensors = [*model.state_dict().values(), *(weight.grad for weight in model.parameters())]
    moments = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    streams = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()]
    modes = [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    facts = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()]
    return [
        [tensor.detach().clone().numpy().tobytes() for tensor in (*tensors, *moments)],
        streams,
        modes,
        hooks,
        facts,
    ]


def train(model: nn.Module, n_steps: int, watch=lambda step: None, *, first: int = 1, after=lambda step: None) -> list:
    """The states after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model.train()
    states = []
    for step in range(first, n_steps + 1):
        ids = torch.randint(0, VOCAB, (4, LENGTH + 1)) if step else None
        optimizer.zero_grad()
        out = model(ids[:, :-1])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
            watch(step)
        states.append(state_of(model, optimizer))
        after(step)
    return states
