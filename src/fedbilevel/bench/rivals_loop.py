"""The PyTorch rival that a user would write first: one client after the other, with nn.Module and autograd.grad.

Every loss passes its rows through the whole network. Nothing is slow on purpose. A pass that needs no gradient
by x runs the body without a graph, and both gradients of a lower step share that pass. The gradient q and a
Hessian product at the same y share a graph. The first local steps, which need no new gradient, are not computed.
The correction of the upper steps is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

from .cases import ALPHA, BETA, CLASSES, DECAY, HIDDEN, LAM, SMOOTHING, Case
from .rivals import Group, Plan, Rival, Rows, State, loader, mean, padding, rival


def torch_loop(case: Case) -> Rival:
    """Return a rival that performs one outer iteration in each call, client by client."""
    return rival(case, loop_iterate(case))


def networks(case: Case) -> tuple[nn.Module, nn.Module]:
    """Return body and head as modules. Their parameters are set from a state later."""
    if case.model == "mlp":
        return nn.Sequential(nn.Linear(case.inputs, HIDDEN), nn.ReLU()), nn.Linear(HIDDEN, CLASSES)
    body = nn.Sequential(
        nn.Conv2d(case.shape[2], 6, 5, padding=padding(case)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
    )
    return body, nn.Sequential(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES))


def lower_loss(head: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """g_i: cross entropy, and DECAY Σ sqrt(||w||² + s²) over the arrays of the head."""
    penalty = sum(((w**2).sum() + SMOOTHING**2).sqrt() for w in head.parameters())
    return F.cross_entropy(head(features), labels) + DECAY * penalty


def features_of(body: nn.Module, inputs: Tensor) -> Tensor:
    """Run the body without a graph, for a loss that is differentiated by the head alone."""
    with torch.no_grad():
        return body(inputs)


def load(module: nn.Module, values: Sequence[Tensor]) -> None:
    """Set the parameters of a module."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)


def move(module: nn.Module, step: float, direction: Iterable[Tensor]) -> None:
    """w ← w - step d"""
    with torch.no_grad():
        for parameter, d in zip(module.parameters(), direction, strict=True):
            parameter.sub_(d, alpha=step)


def loop_iterate(case: Case) -> Callable[[State, Plan], State]:
    """Return iterate(state, plan) -> state, which takes one client after the other."""
    read = loader(case)
    body, head = networks(case)
    x, y = list(body.parameters()), list(head.parameters())

    def gradients(lower: Rows, upper: Rows, z: Group | None, source: bool, last: bool) -> tuple[Group, Group]:
        """Lines 4-6 of Algorithm AggITD: q_i, which is not used at t = N, and z_i, which is empty before t = Q."""
        q: Group = ()
        if not last or z is not None:
            loss = lower_loss(head, features_of(body, lower.inputs), lower.labels)
            q = grad(loss, y, create_graph=z is not None)
        if source:
            loss = F.cross_entropy(head(features_of(body, upper.inputs)), upper.labels)
            return _detached(q), grad(loss, y)
        if z is None:
            return q, ()
        product = grad(q, y, grad_outputs=z)
        return _detached(q), tuple(v - LAM * hv for v, hv in zip(z, product, strict=True))

    def lower_steps(lower: Rows, q: Group, index: Tensor, counts: Sequence[int]) -> Group:
        """One-Round-Lower by SVRG, started at y. At y both gradients are equal, so the first step is y - β q."""
        own = deepcopy(head)
        own_y = list(own.parameters())
        move(own, BETA, q)
        for rows, count in zip(index[1:], counts[1:], strict=True):
            rows = rows[:count]
            features, labels = features_of(body, lower.inputs[rows]), lower.labels[rows]
            here = grad(lower_loss(own, features, labels), own_y)
            anchor = grad(lower_loss(head, features, labels), y)
            move(own, BETA, (a - b + c for a, b, c in zip(here, anchor, q, strict=True)))
        return _detached(own_y)

    def upper_gradient(network: nn.Module, upper: Rows) -> Group:
        """∇_x f_i at the parameters of `network` and at the current y."""
        return grad(F.cross_entropy(head(network(upper.inputs)), upper.labels), list(network.parameters()))

    def hypergradient(lower: Rows, f_x: Group, p: Group) -> Group:
        """h_i = ∇_x f_i - ∇_x ⟨∇_y g_i, p⟩"""
        g_y = grad(lower_loss(head, body(lower.inputs), lower.labels), y, create_graph=True)
        g_xy = grad(g_y, x, grad_outputs=p)
        return tuple(f - g for f, g in zip(f_x, g_xy, strict=True))

    def upper_steps(upper: Rows, h: Group, f_x: Group) -> Group:
        """One-Round-Upper: x_i ← x_i - α (∇_x f_i(x_i) - ∇_x f_i(x) + h) from x; the first step is x - α h."""
        own = deepcopy(body)
        move(own, ALPHA, h)
        correction = [a - b for a, b in zip(h, f_x, strict=True)]
        for _ in range(case.tau - 1):
            move(own, ALPHA, (a + b for a, b in zip(upper_gradient(own, upper), correction, strict=True)))
        return _detached(own.parameters())

    def iterate(state: State, plan: Plan) -> State:
        load(body, state.body)
        load(head, state.head)
        cohort, count = [read(client) for client in plan.clients], len(plan.clients)
        z: Group | None = None
        for t in range(case.N + 1):
            replies = [gradients(*data, z, source=t == plan.Q, last=t == case.N) for data in cohort]
            z = mean((r[1] for r in replies), count) or None
            if t < case.N:
                q = mean((r[0] for r in replies), count)
                steps = (lower_steps(low, q, plan.index[t, i], plan.counts) for i, (low, _) in enumerate(cohort))
                load(head, mean(steps, count))
        assert z is not None  # the source enters at t = Q ≤ N
        p = tuple(LAM * (case.N + 1) * v for v in z)
        f_x = [upper_gradient(body, upper) for _, upper in cohort]
        h = mean((hypergradient(lower, f, p) for (lower, _), f in zip(cohort, f_x, strict=True)), count)
        new = mean((upper_steps(upper, h, f) for (_, upper), f in zip(cohort, f_x, strict=True)), count)
        return State(new, tuple(v.detach().clone() for v in y))

    return iterate


def _detached(group: Iterable[Tensor]) -> Group:
    return tuple(v.detach() for v in group)
