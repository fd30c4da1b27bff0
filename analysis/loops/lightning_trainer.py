"""`watch` in the Trainer of Lightning, as a callback."""

import lightning.pytorch as lightning
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsedepth as sd

torch.manual_seed(0)
tokens = torch.randint(0, 64, (544, 17)).repeat(1, 2)[:, :33]
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)
module = lightning.LightningModule()
module.model = LlamaForCausalLM(config)
module.training_step = lambda batch: module.model(input_ids=batch[0], labels=batch[0]).loss
module.configure_optimizers = lambda: torch.optim.AdamW(module.model.parameters(), lr=3e-3)
watching = sd.LightningCallback(tokens[:64], every=10, out="results/mine", name="lightning-0", tokens_per_step=16 * 32)
trainer = lightning.Trainer(accelerator="cpu", max_steps=30, callbacks=[watching], logger=False)
rows = torch.utils.data.TensorDataset(tokens[64:])  # a batch is a tuple of one
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=16))

module.model.save_pretrained("checkpoint")
np.save("held_out.npy", tokens[:64].numpy())
