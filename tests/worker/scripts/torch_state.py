"""What a script that imports torch finds, and the numbers that it draws from given seeds."""

import json
import os
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist

cache = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "mine")
drawn = [torch.rand(1).item(), float(np.random.rand()), torch.initial_seed()]  # these must differ
torch.manual_seed(7)
np.random.seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()

print(json.dumps(drawn))
print(
    json.dumps(
        {
            "parameters": [parameter.tolist() for parameter in model.parameters()],
            "numpy": np.random.rand(3).tolist(),
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "debug level": str(dist.distributed_c10d.get_debug_level()),
            "elastic": dist.is_torchelastic_launched(),
            "cache": cache,
            "default": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
            "warnings": sorted(map(repr, warnings.filters)),
            "limits": sys.getrecursionlimit(),
            "cuda": torch.cuda.is_available(),
        }
    )
)
