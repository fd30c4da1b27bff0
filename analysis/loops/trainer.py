"""`watch` in the Trainer of transformers, as a callback."""

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sparsedepth as sd

torch.manual_seed(0)
tokens = torch.randint(0, 64, (544, 17)).repeat(1, 2)[:, :33]
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(config)
rows = Dataset.from_dict({"input_ids": tokens[64:], "labels": tokens[64:]})
watching = sd.TrainerCallback(tokens[:64], every=10, out="results/mine", name="trainer-0", tokens_per_step=16 * 32)
arguments = TrainingArguments("trainer", per_device_train_batch_size=16, max_steps=30, report_to=[], use_cpu=True)
Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watching]).train()

model.save_pretrained("checkpoint")
np.save("held_out.npy", tokens[:64].numpy())
