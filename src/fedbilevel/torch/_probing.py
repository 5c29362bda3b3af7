"""What is found by trying the user's functions on a few rows: each finding is one line with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

from ..errors import FedBilevelError, SettingsError, one_line
from ._oracle import Losses, rows_of
from ._parameters import Rows, computing, tensors, tree_map

PyTree = Any
FEW = 6  # rows that are tried
NEAR = 1e-2  # how far gradients are from each other whose difference is taken
SAME = 1e-3  # how much features of a row may differ by rounding, relative to the largest
TIMES = 4  # a graph that takes more than so many times the memory of the inputs is not kept


def probe(problem: Losses, level: str, data: tuple[PyTree, PyTree]) -> None:
    """Try a loss and its derivatives on a few rows; raise with what is wrong."""
    inputs, targets = (tree_map(lambda a: a[:FEW].clone(), tree) for tree in data)
    body, head = problem.body, problem.head
    x, y = (group.leaves(torch.from_numpy(group.vector).to(group.device)) for group in (body, head))
    before = {f"{g}.{n}": t.clone() for g, group in (("x", body), ("y", head)) for n, t in group.constants()}
    watched = [(t, t._version) for t in tensors((inputs, targets))]

    def unchanged(name: str) -> None:
        if any(t._version != version for t, version in watched):
            raise SettingsError(
                f"{name} changes its inputs in place; use operations that make new tensors, such as x + 1 instead "
                "of x.add_(1)"
            )

    def loss(seed: int) -> Any:
        with torch.random.fork_rng(devices=[]), computing((body, x), (head, y)):
            torch.manual_seed(seed)
            features = inputs
            if problem.embed is not None:
                features = called("embed", problem.embed, body.module, inputs)
                unchanged("embed")
                if level == "lower":
                    _check_features(problem, features, inputs)
            ids = torch.arange(len(tensors(inputs)[0]), device=head.device)
            rows = Rows(inputs, targets, features, ids)
            return called(level, problem.function(level), body.module, head.module, rows)

    made = loss(0)
    _check_number(level, made)
    unchanged(level)
    for name, value in [
        *(("x." + n, t) for n, t in body.constants()),
        *(("y." + n, t) for n, t in head.constants()),
    ]:
        if not torch.equal(value, before[name]):
            raise SettingsError(
                f"{level} or embed changes the buffer {name}; call .eval() on the module, or keep what changes "
                "outside of it"
            )
    again = loss(1)
    if not torch.equal(made.detach(), again.detach()):
        raise SettingsError(
            f"{level} is random: two calls on the same rows give {made.item():.6g} and {again.item():.6g}; call "
            ".eval() on the modules, and use no dropout or noise in the functions"
        )
    with computing((body, x), (head, y)):
        _check_derivatives(level, made, y, lambda: loss(0))


def called(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user returns, or an error that names it."""
    try:
        return function(*arguments)
    except FedBilevelError:
        raise
    except Exception as error:
        why = one_line(str(error).strip().splitlines()[0] if str(error).strip() else "no reason", 200).rstrip(".")
        shapes = [tuple(t.shape) for a in arguments if not isinstance(a, torch.nn.Module) for t in _tensors(a)]
        raise SettingsError(
            f"{name} fails with {type(error).__name__}: {why}; it was given the modules and tensors of the shapes "
            f"{one_line(str(shapes), 100)}"
        ) from error


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tensors(value) if isinstance(t, Tensor)]


def _check_number(level: str, made: Any) -> None:
    if not isinstance(made, Tensor):
        raise SettingsError(
            f"{level} returns an object of type {type(made).__name__}; return a tensor of one number"
        )
    if made.shape:
        raise SettingsError(
            f"{level} returns a tensor of shape {tuple(made.shape)}, and a loss is one number; take its mean()"
        )
    if made.dtype != torch.float32:
        raise SettingsError(
            f"{level} returns a number of type {made.dtype}; return float32, for example by .float()"
        )


def _check_features(problem: Losses, features: PyTree, inputs: PyTree) -> None:
    """Raise unless the features are tensors with a row for each input, which depends on that input alone."""
    count = len(tensors(inputs)[0])
    for made in tensors(features):
        if not isinstance(made, Tensor):
            raise SettingsError(
                f"embed returns an object of type {type(made).__name__}; return a tensor, or a tuple "
                "or dict of tensors"
            )
        if made.shape[:1] != (count,):
            raise SettingsError(
                f"embed returns a tensor of shape {tuple(made.shape)} for {count} rows; give each row its "
                "features, with the row as the first axis"
            )
    with torch.no_grad():
        alone = called("embed", problem.embed, problem.body.module, tree_map(lambda a: a[:1], inputs))
    for together, single in zip(tensors(features), tensors(alone), strict=True):
        if count > 1 and not torch.allclose(
            together[:1], single, rtol=SAME, atol=SAME * float(together.detach().abs().max())
        ):
            raise SettingsError(
                "embed mixes rows: the features of a row depend on the other rows; call .eval() on a BatchNorm, "
                "or compute what mixes rows in the losses"
            )


def _check_derivatives(level: str, loss: Tensor, y: list[Tensor], again: Callable[[], Tensor]) -> None:
    """Raise unless the loss depends on y, and the lower loss has second derivatives there.

    They are compared with differences of gradients, since a graph may also be cut without an error. Kinks make
    differences wrong, so only what is wrong by more than half is refused; `check` looks closer.
    """
    second = level == "lower"
    found = grad(loss, y, create_graph=second, allow_unused=True) if loss.requires_grad else ()
    if all(g is None for g in found):
        raise SettingsError(
            f"{level} does not depend on the parameters of y; use the modules that the function is given, not "
            "those around it"
        )
    if not second:
        return
    generator = torch.Generator().manual_seed(0)
    along = [torch.randn(w.shape, generator=generator).to(w.device) for w in y]
    hint = "for attention in y, use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    try:
        slope = sum(((g * v).sum() for g, v in zip(found, along, strict=True) if g is not None), torch.zeros(()))
        made = grad(slope, y, allow_unused=True) if slope.requires_grad else [None] * len(y)
    except RuntimeError as error:  # PyTorch raises NotImplementedError, too, which is one
        why = one_line(str(error).strip().splitlines()[0], 150)
        raise SettingsError(f"lower has no second derivatives by y: {why}; {hint}") from None
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for w, v in zip(y, along, strict=True):
                w += sign * NEAR * v
        ends.append(grad(again(), y, allow_unused=True))
        with torch.no_grad():
            for w, v in zip(y, along, strict=True):
                w -= sign * NEAR * v
    expected, wrong = 0.0, 0.0
    for product, after, before in zip(made, *ends, strict=True):
        if after is not None and before is not None:
            slope = (after - before) / (2 * NEAR)
            expected += float((slope**2).sum())
            wrong += float(((slope - (0.0 if product is None else product)) ** 2).sum())
    if wrong > 0.25 * expected and wrong > 1e-6:
        raise SettingsError(
            "lower has no second derivatives by y: those of autograd are not the differences of its gradients; "
            f"compute it by functions that can be differentiated twice; {hint}"
        )


def measured_names(problem: Any, data: tuple[PyTree, PyTree]) -> tuple[str, ...]:
    """The names of the metrics, tried on a few rows."""
    inputs, targets = (tree_map(lambda a: a[:FEW], tree) for tree in data)
    with torch.no_grad():
        made = called("metrics", problem.measured, rows_of(problem, inputs, targets))
    if not isinstance(made, Mapping):
        raise SettingsError(
            f"metrics returns an object of type {type(made).__name__}; return numbers by name, as in "
            "{'test_accuracy': (scores.argmax(1) == rows.targets).float().mean()}"
        )
    for name, value in made.items():
        if torch.as_tensor(value).shape:
            raise SettingsError(
                f"metrics returns a tensor of shape {tuple(value.shape)} for {name}; return one number "
                "for each name"
            )
    return tuple(made)


def is_light(problem: Losses, inputs: PyTree) -> bool:
    """Whether a graph of `embed` takes at most four times the memory of its inputs, tried on a few rows."""
    few, body, sizes = tree_map(lambda a: a[:FEW].clone(), inputs), problem.body, dict[int, int]()
    leaves = body.leaves(torch.from_numpy(body.vector).to(body.device))
    theirs = {t.untyped_storage().data_ptr() for t in leaves} | {
        t.untyped_storage().data_ptr() for _, t in body.constants()
    }

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in theirs:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), computing((body, leaves)):
        graph = problem.embed(body.module, few)
    del graph
    own = sum(t.nbytes for t in tensors(few)) + body.size * 4 * FEW / max(len(tensors(inputs)[0]), 1)
    return sum(sizes.values()) <= TIMES * own
