"""A small network on rows of digits' shape, once in PyTorch and once in JAX, with the same numbers and rows."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.torch import TorchProblem

INPUTS, HIDDEN, CLASSES = 6, 5, 3
ALL: dict[str, Any] = dict(participation=1.0)
STEPS: dict[str, Any] = dict(ALL, alpha=0.1, beta=0.1)
LOCAL: dict[str, Any] = dict(STEPS, lam=0.3, lower_steps=3, upper_steps=2, batch_zeta_local=4)
METHODS: dict[str, Any] = {
    "fbo-aggitd": fb.AggITD(N=2, **LOCAL),
    "fbo-aggitd, sgd": fb.AggITD(N=2, **LOCAL | dict(lower_solver="sgd", batch_u=4, batch_xi=5, batch_chi=6)),
    "fbo-aggitd, epochs": fb.AggITD(N=1, lower_epochs=2, batch_zeta_local=5, lam=0.3, **STEPS),
    "fbo-aggitd, cg": fb.AggITD(N=2, estimator="cg", lower_steps=2, **STEPS),
    "fbo-aggitd, skip": fb.FedNest(N=1, T=3, lam=0.3, lower_solver="skip", lower_steps=4, **STEPS),
    "fednest": fb.FedNest(N=1, T=3, **LOCAL),
    "fednest, released": fb.FedNest(N=1, T=3, mode="released_code", **LOCAL),
    "lfednest": fb.LFedNest(N=1, T=3, **LOCAL),
    "naive-itd": fb.NaiveITD(N=2, **LOCAL),
    "gossip": fb.Gossip(alpha=0.05, gamma=0.1, b=3, L_g=3.0, batch_u=5),
    "ma-dsbo": fb.MADSBO(alpha=0.05, beta=0.1, gamma=0.1, T=2, N=2),
    "fedsoba": fb.FedSOBA(**STEPS),
    "simfbo": fb.SimFBO(tau=3, batch_zeta=4, batch_xi=4, **STEPS),
    "shrofbo": fb.ShroFBO(tau=(1, 2, 3, 2), **STEPS),
    "fedbio": fb.FedBiO(tau=2, **STEPS),
    "fedbioacc": fb.FedBiOAcc(**STEPS),
    "fedmsa": fb.FedMSA(tau=2, **STEPS),
    "fed-f2sa": fb.FedF2SA(nu=0.1, **STEPS),
    "fedavg": fb.FedAvg(tau=2, **STEPS),
    "q-fedavg": fb.QFedAvg(tau=2, **STEPS),
    "q-fedavg, lower-only": fb.QFedAvg(control="lower-only", q=0.5, **STEPS),
    "local-lower": fb.LocalLower(tau=2, upper_steps=2, **STEPS),
    "local-lower, anew": fb.LocalLower(tau=3, solve="anew", products=8, **STEPS),
    "fedbioacc-local": fb.FedBiOAccLocal(tau=2, **STEPS),
}


def torch_lower(body: Any, head: Any, rows: Any) -> Any:
    decay = sum((p**2).sum() for p in head.parameters())
    return F.cross_entropy(head(rows.features), rows.targets) + 0.05 * decay


def torch_upper(body: Any, head: Any, rows: Any) -> Any:
    return F.cross_entropy(head(rows.features), rows.targets)


def torch_metrics(body: Any, head: Any, rows: Any) -> Any:
    right = head(rows.features).argmax(1) == rows.targets
    return {"test_accuracy": right.float().mean()}


def torch_embed(body: Any, inputs: Any) -> Any:
    return body(inputs)


def torch_problem(**more: Any) -> TorchProblem:
    """A tanh layer as x, and a linear head as y."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh()), nn.Linear(HIDDEN, CLASSES)
    fields: dict[str, Any] = dict(lower=torch_lower, upper=torch_upper, embed=torch_embed, metrics=torch_metrics)
    return TorchProblem(body, head, **fields | more)


def jax_problem(problem: TorchProblem, **more: Any) -> fb.Problem:
    """The same for JAX: weight and bias of a layer are in the same order."""

    def layer(vector: Any, inputs: int, outputs: int) -> Any:
        made = eqx.nn.Linear(inputs, outputs, key=jax.random.key(0))
        parts = jnp.split(vector, [inputs * outputs])
        return eqx.tree_at(lambda m: (m.weight, m.bias), made, (parts[0].reshape(outputs, inputs), parts[1]))

    def entropy(head: Any, b: fb.Batch) -> Any:
        scores = jax.vmap(head)(b.features)
        return b.mean(optax.softmax_cross_entropy_with_integer_labels(scores, b.targets))

    def metrics(x: Any, y: Any, b: fb.Batch) -> Any:
        return {"test_accuracy": b.mean(1.0 * (jax.vmap(y)(b.features).argmax(1) == b.targets))}

    return fb.Problem(
        layer(problem.flat_x.vector, INPUTS, HIDDEN),
        layer(problem.flat_y.vector, HIDDEN, CLASSES),
        lambda x, y, b: entropy(y, b) + 0.05 * (jnp.sum(y.weight**2) + jnp.sum(y.bias**2)),
        lambda x, y, b: entropy(y, b),
        embed=lambda x, inputs: jnp.tanh(jax.vmap(x)(inputs)),
        metrics=metrics,
        **more,
    )


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels that depend on them."""
    g = np.random.default_rng(seed)
    inputs = g.normal(size=(count, INPUTS)).astype(np.float32)
    return inputs, inputs[:, :CLASSES].argmax(1).astype(np.int32)


def clients(sizes: tuple[int, ...] = (12, 9, 12, 7), test: bool = False) -> fb.ListedClients:
    """Clients of unequal sizes."""
    parts = [(rows(n, i), rows(n + 2, 100 + i), rows(8, 200 + i)) for i, n in enumerate(sizes)]
    return fb.clients_from([each if test else each[:2] for each in parts])


def flat(module: Any) -> np.ndarray:
    """The parameters of a module of PyTorch or of JAX."""
    leaves = (
        module.parameters() if hasattr(module, "parameters") else jax.tree.leaves(eqx.filter(module, eqx.is_array))
    )
    return np.concatenate([np.ravel(leaf.detach() if hasattr(leaf, "detach") else leaf) for leaf in leaves])
