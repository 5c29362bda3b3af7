"""The cases of the benchmark: one outer iteration of FBO-AggITD in the paper's set-ups and in larger ones, and of
the other methods in the standard set-up.

Gossip is not among them, because its matrices of 157,000 x 2,010 numbers for each agent do not fit the memory.

The data are random and have the shapes of the paper's data. The time does not depend on the values, and so
nothing has to be fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import jax
import numpy as np

from ..algorithms import MADSBO, AggITD, FedNest, LFedNest, NaiveITD
from ..data import ClientData, ClientSize, LazyClients, Part
from ..models import TwoHalves, cnn, mlp
from ..problem import Problem
from ..problems import representation_problem

HIDDEN, CLASSES, DECAY, SMOOTHING, LAM, BETA, ALPHA = 200, 10, 0.05, 1e-3, 0.01, 0.003, 0.01
BATCH, EPOCHS = 10, 5
Method = Literal["fbo-aggitd", "fednest", "lfednest", "naive-itd", "ma-dsbo"]


@dataclass(frozen=True)
class Case:
    """One set-up.

    `lower` and `upper` are the numbers of rows of a client, `tau` is the number of its upper steps, and `N` is the
    number of lower rounds. `terms` is T of the methods that have it: the Hessian products of FedNest and LFedNest,
    and the steps on y and on the Hessian system of MA-DSBO.
    """

    name: str
    model: Literal["mlp", "cnn"] = "mlp"
    shape: tuple[int, int, int] = (28, 28, 1)
    lower: int = 300
    upper: int = 300
    tau: int = 5
    N: int = 1
    cohort: int = 10
    registered: int = 100
    method: Method = "fbo-aggitd"
    terms: int = 5

    @property
    def inputs(self) -> int:
        return int(np.prod(self.shape))

    @property
    def steps(self) -> int:
        """The number of minibatches in a lower round of a client."""
        return EPOCHS * -(-self.lower // BATCH)

    @property
    def network(self) -> TwoHalves:
        key = jax.random.key(0)
        if self.model == "mlp":
            return mlp(self.inputs, HIDDEN, CLASSES, key=key)
        return cnn(self.shape, CLASSES, head_layers=2, key=key)

    @property
    def problem(self) -> Problem:
        over: Literal["vmap", "map"] = "vmap" if self.model == "mlp" else "map"
        return representation_problem(self.network, DECAY, "norm", SMOOTHING, over)

    @property
    def algorithm(self) -> Any:
        if self.method == "ma-dsbo":
            return MADSBO(alpha=ALPHA, beta=BETA, gamma=LAM, T=self.terms, N=self.terms)
        work: dict[str, Any] = dict(
            N=self.N,
            alpha=ALPHA,
            beta=BETA,
            lam=LAM,
            upper_steps=self.tau,
            lower_epochs=EPOCHS,
            batch_zeta_local=BATCH,
            participation=self.cohort,
        )
        if self.method == "fednest":
            return FedNest(T=self.terms, **work)
        if self.method == "lfednest":
            return LFedNest(T=self.terms, **work)
        return NaiveITD(**work) if self.method == "naive-itd" else AggITD(**work)

    def clients(self) -> LazyClients:
        """Return clients with random rows. A client's rows are cut from one table when it is loaded."""
        rng = np.random.default_rng(0)
        rows = 10 * (self.lower + self.upper)
        inputs = rng.random((rows, self.inputs), np.float32)
        labels = rng.integers(0, CLASSES, rows).astype(np.int32)

        def make(client: int) -> ClientData:
            start = client % 9 * (self.lower + self.upper)
            cuts = (start, start + self.lower, start + self.lower + self.upper)
            return ClientData(*(Part(inputs[a:b], labels[a:b]) for a, b in pairwise(cuts)))

        return LazyClients(self.registered, ClientSize(self.lower, self.upper), make)


SPLITS = {"iid": (300, 300), "shards": (480, 120)}
STANDARD = "mnist-mlp-iid-tau5"

_cases = [
    *(
        Case(f"mnist-mlp-{split}-tau{tau}" + ("" if N == 1 else f"-N{N}"), lower=low, upper=up, tau=tau, N=N)
        for split, (low, up) in SPLITS.items()
        for tau in (1, 5)
        for N in (1, 10)
    ),
    Case("mnist-cnn-iid-tau5", "cnn"),
    Case("cifar10-cnn-iid-tau5", "cnn", (32, 32, 3), 250, 250),
    *(Case(f"mnist-mlp-iid-{method}", method=method) for method in ("fednest", "lfednest", "naive-itd")),
    Case("mnist-mlp-iid-ma-dsbo", method="ma-dsbo", registered=10),
    *(Case(f"cohort-{cohort}", cohort=cohort, registered=1000) for cohort in (10, 100, 1000)),
]
CASES = {case.name: case for case in _cases}
