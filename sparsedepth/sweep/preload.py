"""Imported by the forkserver before it forks: everything a run needs, and nothing that cannot be forked.

pandas and torch._dynamo would otherwise be imported in each run, at pyarrow's first table and torch's first optimizer.
"""

# ruff: noqa: E402

import atexit
import gc
import os

parent = os.getppid()  # before seconds of imports, in which it may die
gc.disable()  # a tenth of them

# Otherwise torch.cuda.is_available() initialises CUDA, which then cannot be used in a fork.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pandas  # noqa: F401
import torch
import torch._dynamo

import sparsedepth.run.execute  # noqa: F401
from sparsedepth.run.process import end_with_parent, has_used_cuda

assert not (torch.cuda.is_initialized() or has_used_cuda()), "a CUDA context does not survive a fork"
end_with_parent(parent)
gc.collect()
gc.enable()
gc.freeze()  # a collection in a child would copy every page it touches
atexit.register(os._exit, 0)  # nothing is open, and frozen objects cannot be torn down
