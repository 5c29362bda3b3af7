"""Fair training: the classifier that is best for the worst clients, as a minimax problem over weights of clients.

    min_x max_u 1/m Σ_i [u_i CE_i(x) - strength/2 (u_i - 1)²] + decay/2 ||x||²    with  u ≥ 0,  mean u = 1

The lower loss is the negative of the upper one (g = -f), and y is u, on its simplex. Where all u_i are positive,
u_i = 1 + (CE_i(x) - mean CE) / strength, so that the objective is the mean of the clients' losses plus their
variance / (2 strength). A small strength lets u go to the worst clients alone, as in agnostic federated learning
(Mohri, Sivek and Suresh, ICML 2019); a large one is FedAvg.

As ∇_y f is zero in the directions in which y can move, the implicit part of the hypergradient is zero. FedSOBA
with `minimax = true` drops v, and any other method computes a v that goes to zero.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from ..batch import Batch
from ..data import ClientData, DataSettings, Drawn, ListedClients, Part, own_tests
from ..errors import SettingsError
from ..feasible import Simplex
from ..problem import Finding, Task, minimax
from ..settings import Positive, about, settings
from ._checked import CheckedRows, halved_metrics


@settings
class Fair:
    """Fair training: a classifier is x, and a weight for each client y."""

    strength: Annotated[
        Positive, about("how strongly weights are held at one; smaller: more for the worst clients")
    ] = 0.1
    components: Annotated[
        int, Field(ge=0, le=10**4), about("principal components that are the inputs; 0: the pixels")
    ] = 60
    rows: Annotated[int, Field(ge=0), about("rows of a client that are used; 0: all")] = 0
    valid: Annotated[
        bool, about("every second test row of a client is for the choice of settings: valid_accuracy")
    ] = False
    decay: Annotated[float, Field(ge=0), about("weight of the ridge 1/2 ||x||²")] = 0.001

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Deal rows and test rows to clients. Both parts of a client are the same rows."""
        like = CheckedRows(components=self.components, decay=self.decay)
        dataset, parts = data.split(seed)
        if isinstance(parts, Drawn):
            raise SettingsError(
                "data.partition = 'drawn' is wrong: its clients have no test rows of their own; use classes"
            )
        inputs, test = like.inputs(dataset)
        dealt = [parts.rows(client)[: self.rows or None] for client in range(data.clients)]
        tests = own_tests(dataset.test_targets, [dataset.train_targets[rows] for rows in dealt], seed)
        clients = list[ClientData]()
        for client, (own, shown) in enumerate(zip(dealt, tests, strict=True)):
            number = np.int32(client)
            mine = _part(inputs(own), dataset.train_targets[own], number)
            clients.append(ClientData(mine, mine, _part(test[shown], dataset.test_targets[shown], number)))
        learner = like.learner(test.shape[1], dataset.shape, dataset.classes, seed)

        def loss(x: Any, u: Any, batch: Batch) -> Array:
            own = u[batch.inputs["client"]]
            losses = learner.losses(x, batch.inputs["features"], batch.targets)
            return batch.mean(own * losses - self.strength / 2 * (own - 1) ** 2) + like.penalty(x)

        def metrics(x: Any, u: Any, batch: Batch) -> Any:
            scores = learner.scores(x, batch.inputs["features"])
            return halved_metrics(scores, batch, self.valid)

        problem = minimax(
            learner.start,
            jnp.ones(data.clients),
            loss,
            metrics=metrics,
            feasible_y=Simplex(total=float(data.clients)),
            predict=lambda x, u, rows: learner.scores(x, rows["features"]),
        )

        def finding(x: Array, y: Array) -> Finding:
            return Finding("client", "weight", np.asarray(y).tolist())

        return Task(problem, ListedClients(clients), finding=finding)


def _part(inputs: Any, labels: Any, number: Any) -> Part:
    return Part({"features": inputs, "client": np.full(len(labels), number)}, labels)
