"""Run examples that PyTorch-Ignite publishes, unmodified, from the environment; prints a line of JSON.

python -m camshaft.as_ignite tests/clients/published.py "mnist/mnist.py --epochs 1" ...
"""

import json
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import ignite.engine
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

try:
    import torchvision  # noqa: F401
except RuntimeError:  # it was built for a torch with CUDA: here, it is enough that the names of its operators are known
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

EXAMPLES = Path(sys.prefix) / "share" / f"pytorch_ignite-{version('pytorch-ignite')}" / "examples"
sums: list[float] = []  # of all weights, after each step
register_optimizer_step_post_hook(
    lambda optimizer, *_: sums.append(
        sum(float(one.sum()) for group in optimizer.param_groups for one in group["params"])
    )
)
results = {}
for command in sys.argv[1:]:
    sums.clear()
    torch.manual_seed(0)
    sys.argv = command.split()
    runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    results[command] = {"steps": len(sums), "last": sums[-1], "random": torch.rand(1).item()}
print(json.dumps({"engine": ignite.engine.Engine.__module__, **results}))
