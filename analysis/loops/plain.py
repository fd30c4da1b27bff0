"""`watch` in a plain loop: a small Llama, of a copying task."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsedepth as sd

torch.manual_seed(0)
tokens = torch.randint(0, 64, (544, 17)).repeat(1, 2)[:, :33]
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
watch = sd.watch(model, tokens[:64], every=10, out="results/mine", name="plain-0", seed=0, tokens_per_step=16 * 32)
for step, batch in enumerate(tokens[64:].split(16), start=1):
    optimizer.zero_grad()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    watch(step)

model.save_pretrained("checkpoint")
np.save("held_out.npy", tokens[:64].numpy())
