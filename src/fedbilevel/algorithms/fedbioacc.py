"""FedBiOAcc (Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems", NeurIPS 2023): local steps along momenta of the kind of STORM. The equations are written
from memory of the paper.

With s = (x, y, v), the directions d_i of `single.py` and a momentum M for all three, an outer iteration r is

    M ← mean_i [d_i(s_r) - (1 - c) d_i(s_{r-1})] + (1 - c) M                        c = 1 in the first iteration
    s_i = s_r, M_i = M;  s_i ← s_i - (α, β, ρ) M_i;  M_i ← d_i(s_i) + (1 - c) (M_i - d_i(s_i before))
    τ steps;  s_{r+1} = mean_i s_i

Both directions of a difference are taken on the same rows. The cohort is asked in both rounds. There are two, as
the momentum is taken at the averaged point: a message with s_i cannot have it. If s_i and M_i were averaged in one
message, the averaged momentum would belong to no point, and the correction of the drift would be lost.

The paper's c is c a_t² for a rate a_t = δ/(u_0 + t)^{1/3}, which also multiplies the step sizes: `schedule`.

On full batches the local direction is d_i(s_i) + (1 - c)^k (mean_j d_j - d_i)(s_r) after k steps, so the drift of
clients that differ is corrected but for a part that is proportional to c. With c = 1 it is that of SimFBO but for
the first step, and as c goes to zero the fixed point becomes the stationary point.

In the paper a client keeps its own s_i and M_i from the last step before a round. Here the last averaged pair is
in their place, as in FedMSA. The fixed points of both are the same on full batches. Clients then keep nothing, the
sampling of cohorts is a part of the noise that the momentum averages out, and a client that was away has no old
momentum. The price is that s_{r-1} is sent again: a client sends 2(p + 2q) numbers and receives 3(p + 2q), or
2(p + 2q) if c = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..federation import Federation
from ..settings import settings
from .fedmsa import Corrected
from .single import SingleState


@settings
class FedBiOAcc(Corrected):
    """FedBiOAcc: local steps on x, y and v along momenta, which are averaged in a round of their own."""

    decay: ClassVar[Mapping[str, float]] = {"alpha": 1 / 3, "beta": 1 / 3, "rho": 1 / 3, "renewal": 2 / 3}

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: a round for the momentum, and one for the local steps."""
        fed = fed.cohort(self.participation)
        s, momentum = self.renewed(fed, s)
        return self.travel(fed, s, momentum, keep=1 - self.renewal)
