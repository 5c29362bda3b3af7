"""Personal heads: all clients share the body of a network, and each has a head of its own.

    min_x 1/m Σ_i CE_i(head(y_i*; body(x; ·)))    subject to    y_i* = argmin_y CE_i(head(y; body(x; ·))) + R(y)

with the validation rows of client i above and its training rows below. The heads never leave the clients. Every
client has test rows of its own, with labels in the shares of its training rows, and the metrics are measured there
with the client's own head. `data.partition = "classes"` gives clients a few classes each, as in FedRep (Collins et
al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021), whose alternation of body
and heads is `local-lower` with `implicit = false`.

The regulariser is squared, so that every head is unique. Heads start at zero, whatever the seed is.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from pydantic import Field

from ..data import DataSettings
from ..models import ModelName
from ..problem import Problem, Task
from ..settings import Size, about, settings
from .representation import HyperRepresentation


@settings
class PersonalHeads:
    """Personal heads: the body of a network is x, and every client has its own head."""

    model: Annotated[ModelName, about("mlp: one hidden layer; cnn: LeNet, for 28 x 28 or 32 x 32 pixels")] = "mlp"
    hidden: Annotated[Size, about("mlp: hidden units, the features that all clients share")] = 200
    decay: Annotated[float, Field(gt=0), about("weight of the squared norm of a head")] = 0.01

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Load and split the data, and start the body from the seed."""
        dataset, clients = data.load(seed, own_test=True)
        return Task(self.remote(dataset.shape, dataset.classes, seed), clients)

    def without_clients(self, data: DataSettings, seed: int) -> Problem:
        """The problem of `task` alone. Data are loaded only if the table of data sets lacks their shape."""
        return self.remote(data.shape, data.classes, seed)

    def remote(self, shape: tuple[int, int, int], classes: int, seed: int = 0) -> Problem:
        """The problem without clients, for images of this shape: what a site needs beside its own rows."""
        alike = HyperRepresentation(
            model=self.model, hidden=self.hidden, head_layers=1, decay=self.decay, regulariser="ridge"
        )
        problem = alike.remote(shape, classes, seed)
        zero = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if eqx.is_inexact_array(leaf) else leaf, problem.y)
        return dataclasses.replace(problem, y=zero, lower_is="local")
