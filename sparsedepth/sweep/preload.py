"""What the forkserver imports before it forks: everything a run needs, and nothing that cannot be forked.

pandas is what pyarrow imports at its first table, _dynamo what torch imports at its first optimizer.
"""

import atexit
import gc
import os

# Without it torch's mere question whether there is a GPU leaves a trace that forbids CUDA in a fork.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pandas  # noqa: F401
import torch
import torch._dynamo

import sparsedepth.run.execute  # noqa: F401
from sparsedepth.run.signals import end_with_parent

assert not torch.cuda.is_initialized(), "a CUDA context does not survive a fork"
end_with_parent(os.getppid())
gc.collect()
gc.freeze()  # a collection in a child would copy every page it looks at
atexit.register(os._exit, 0)  # nothing is open, and what is frozen cannot be torn down
