"""The problem of hyper-representation on images as PyTorch modules, for a site of a federation with JAX elsewhere.

The body is x and the head is y, as in the library's own problem with `model = "mlp"`. A layer has its weight and
then its bias in both libraries, so the flat vectors mean the same.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedbilevel.torch import Rows, TorchProblem


def make(inputs: int = 784, hidden: int = 200, classes: int = 10, decay: float = 0.05, smoothing: float = 1e-3):
    """The modules of the site; its numbers come from the server."""

    def upper(body: nn.Module, head: nn.Module, rows: Rows) -> Tensor:
        return F.cross_entropy(head(rows.features), rows.targets)

    def lower(body: nn.Module, head: nn.Module, rows: Rows) -> Tensor:
        penalty = sum(((w**2).sum() + smoothing**2).sqrt() for w in head.parameters())
        return upper(body, head, rows) + decay * penalty

    body, head = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU()), nn.Linear(hidden, classes)
    return TorchProblem(body, head, lower, upper, embed=lambda body, images: body(images))
