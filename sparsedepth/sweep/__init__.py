"""Sweeps: the one part that knows both tensors and rows. Optuna samples and queues; run folders are the record."""

import sparsedepth

sparsedepth.make_callable(__name__)
