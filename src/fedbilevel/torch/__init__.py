"""PyTorch modules as problems: the extra `fedbilevel[torch]`, which is imported only when it is used.

    import torch
    from torch.nn import functional as F

    import fedbilevel as fb
    from fedbilevel.torch import TorchProblem

    problem = TorchProblem(
        x=body, y=head,
        embed=lambda body, inputs: body(inputs),
        lower=lambda body, head, b: F.cross_entropy(head(b.features), b.targets) + decay(head),
        upper=lambda body, head, b: F.cross_entropy(head(b.features), b.targets),
    )
    result = fb.train(problem, fb.clients_from([(lower_rows, upper_rows), ...]), fb.AggITD(), stop={"rounds": 60})
    torch.save(result.x.state_dict(), "body.pt")  # result.x and result.y are modules

The algorithms are the library's own, unchanged. A client's step runs eagerly on flat float32 tensors, and no JAX
program calls back into PyTorch. Importing this package gives PyTorch one thread, unless the environment sets
their number (OMP_NUM_THREADS or MKL_NUM_THREADS): with two on two busy cores, rounds took many times as long.
"""

import os as _os

from ..errors import SettingsError as _SettingsError

try:
    import torch as _torch
except ImportError:
    raise _SettingsError("fedbilevel.torch needs an extra: pip install 'fedbilevel[torch]'") from None

if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & _os.environ.keys():
    _torch.set_num_threads(1)

from ._batched import Batched
from ._parameters import Rows
from ._problem import TorchProblem

__all__ = ["Batched", "Rows", "TorchProblem"]
