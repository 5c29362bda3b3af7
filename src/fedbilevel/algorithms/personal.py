"""What methods for a local lower level share: the steps of a client to its own y.

    min_x 1/m Σ_i f_i(x, y_i*(x))    subject to    y_i*(x) = argmin_y g_i(x, y)

The hypergradient is the mean of what every client computes by itself, and needs the Hessian of no other client:

    ∇f(x) = 1/m Σ_i [∇_x f_i - ∇_x∇_y g_i v_i],    ∇²_y g_i v_i = ∇_y f_i,    all at (x, y_i*(x))

So only vectors with the components of x are sent. The y of the server's state is the initial y of the problem,
which every client knows: a client that is asked for the first time starts from it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from ..problem import LowerIs
from ..settings import Positive, about, settings
from ..steps import Samples
from ..stepsizes import Moves
from .local import BatchSize, Steps, count_of, rows_of


class OwnLower(NamedTuple):
    """How a client finds its own y.

    beta    the step size of its gradient steps
    zeta    the rows of the steps
    kept    whether they start from the y that the client has kept; otherwise from the y of the problem
    shared  whether the step size is divided among the steps
    """

    beta: float
    zeta: Samples
    kept: bool
    shared: bool = False


@settings
class OwnLowerWork:
    """The local steps of a client on its own lower problem."""

    lower_kinds: ClassVar[tuple[LowerIs, ...]] = ("local",)

    beta: Annotated[Positive, Moves.LOWER, about("step size β of the client's own y")] = 0.1
    rho: Annotated[
        Positive | None, Moves.PRODUCT, about("step size of v; default: β, as y and v have the same curvature")
    ] = None
    tau: Annotated[Steps, about("local steps τ a round: one number, or a list with one for each client")] = 5
    batch_zeta: Annotated[BatchSize, about("rows for a derivative of the lower loss in a local step")] = "full"
    batch_xi: Annotated[BatchSize, about("rows for the gradient of the upper loss by y")] = "full"

    @property
    def product_step(self) -> float:
        """The step size of v."""
        return self.beta if self.rho is None else self.rho

    def lower_rows(self, steps: int | None = None) -> Samples:
        """The rows of the lower steps: those of a round, or of this many steps."""
        return Samples("lower", rows_of(self.batch_zeta), count_of(self.tau) if steps is None else steps)
