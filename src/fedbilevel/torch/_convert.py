"""The functions of a `TorchProblem` as functions of JAX, by torchax.

torchax runs a function of PyTorch on tensors that hold arrays of JAX, and every operation becomes its counterpart
in JAX. So JAX traces the user's functions as if they were written for it: it compiles and batches them, and takes
all derivatives by itself. A flat vector has the same order as for PyTorch, so the engines agree.

A program of JAX has a fixed number of rows, and padding among them has the weight zero, while a loss of the user
takes an ordinary mean. So a loss is taken on one row at a time, batched by `vmap`, and the mean is taken here:

    loss(rows) = Σ_r w_r loss(row r) / Σ_r w_r

That is the user's loss if it is a mean over rows, plus terms without rows. Whether it is one, and whether all
derivatives are those of PyTorch, is tried at the start (`_agreement.py`). `embed` acts on each row by itself, so
it is given all rows. Metrics at the server are given all test rows, too, since those are not padded.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ..batch import Batch
from ..errors import FedBilevelError, SettingsError, one_line
from ..models import LANES, in_blocks
from ..problem import Over
from ._images import convolution, max_pool
from ._oracle import Losses
from ._parameters import Parameters, Rows, computing

PyTree = Any
OUT = "leave convert out"
CONVOLUTION = torch.ops.aten.convolution
MEAN = 1  # PyTorch's number for reduction = "mean"


class Converted:
    """The functions of a problem as functions of JAX on flat vectors, for the oracle of JAX.

    The modules are copies, in which buffers and frozen parameters are constants of JAX.
    """

    own_part: ClassVar[None] = None

    def __init__(self, problem: Losses, flat_y: Any) -> None:
        self._problem, self.flat_y, self.embed = problem, flat_y, problem.embed
        for level, group in (("x", problem.body), ("y", problem.head)):
            _refuse_compiled(level, group.module)
        self._torchax = _torchax()
        self._losses, self._features = self._environment(), self._environment()
        usual = self._torchax.registry.all_aten_ops[CONVOLUTION].func
        self._features.override_op_definition(CONVOLUTION, self._on_arrays(convolution(usual)))
        self._body, self._head = (self._with_constants(group) for group in (problem.body, problem.head))
        self._groups = {"x": self._body, "y": self._head}

    @property
    def over(self) -> Over:
        """The best way for a simulation to serve clients: in turn if there are convolutions."""
        modules = (each for group in self._groups.values() for each in group.module.modules())
        return "map" if any(isinstance(each, _ConvNd) for each in modules) else "vmap"

    def features(self, x: Array, inputs: PyTree) -> PyTree:
        """embed(x, inputs) for a flat x; the inputs themselves when the problem has no `embed`."""
        if self.embed is None:
            return inputs

        def embed(rows: PyTree) -> PyTree:
            with self._running("embed", self._features, (self._body, x)):
                return jax.tree.map(_array, self.embed(self._body.module, self._tensors(rows)))

        blocks = self.over == "map" and jax.default_backend() == "cpu"  # patches of a block stay in the caches
        return in_blocks(embed, inputs, LANES) if blocks else embed(inputs)

    def loss(self, level: str, x: Array, y: Array, batch: Batch) -> Array:
        """The mean over the rows of a loss at flat vectors."""

        def one(rows: Rows) -> Array:
            with self._running(level, self._losses, (self._body, x), (self._head, y)):
                given = self._rows(jax.tree.map(lambda a: a[None], rows))
                made = self._problem.function(level)(self._body.module, self._head.module, given)
                return jnp.asarray(_array(made), jnp.float32)

        return batch.mean(jax.vmap(one)(_of(batch)))

    def head(self, level: str) -> None:
        """No closed forms are known of a user's functions."""
        return None

    def measured(self, x: Array, y: Array, batch: Batch) -> Mapping[str, Array]:
        """The means over the rows of the metrics at flat vectors, for rows with padding."""
        found = jax.vmap(lambda rows: self._metrics(x, y, jax.tree.map(lambda a: a[None], rows)))(_of(batch))
        return {name: batch.mean(values) for name, values in found.items()}

    def measure(self, x: Array, y: Array, inputs: PyTree, targets: PyTree) -> Mapping[str, Array]:
        """The metrics at flat vectors on all of the rows, which are not padded."""
        ids = jnp.arange(len(jax.tree.leaves(inputs)[0]))
        return self._metrics(x, y, Rows(inputs, targets, self.features(x, inputs), ids))

    def _metrics(self, x: Array, y: Array, rows: Rows) -> dict[str, Array]:
        with self._running("metrics", self._losses, (self._body, x), (self._head, y)):
            made = self._problem.metrics(self._body.module, self._head.module, self._rows(rows))
            return {name: jnp.asarray(_array(value), jnp.float32) for name, value in made.items()}

    def _environment(self) -> Any:
        """An environment of torchax of its own, so that one of the user stays as it is."""
        made = self._torchax.tensor.Environment()
        made.override_op_definition(torch.ops.aten.nll_loss_forward, _nll_loss)
        usual = self._torchax.registry.all_torch_functions[F.max_pool2d].func
        made.override_op_definition(F.max_pool2d, self._on_arrays(max_pool(usual)))
        return made

    def _on_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of arrays as one of tensors."""

        def on_tensors(*given: Any, **named: Any) -> Any:
            arrays, more = jax.tree.map(_array, (given, named))
            return self._tensors(function(*arrays, **more))

        return on_tensors

    def _tensor(self, a: Any) -> Any:
        """An array as PyTorch's losses expect it: float32, or whole numbers, which JAX has with 32 bits."""
        a = jnp.asarray(a)
        if jnp.issubdtype(a.dtype, jnp.floating):
            a = a.astype(jnp.float32)
        elif jnp.issubdtype(a.dtype, jnp.integer) and a.dtype != jnp.uint8:
            a = a.astype(jnp.int32)
        return self._torchax.tensor.Tensor(a, self._losses)

    def _tensors(self, tree: PyTree) -> PyTree:
        return jax.tree.map(self._tensor, tree)

    def _rows(self, rows: Rows) -> Rows:
        return Rows(*self._tensors(tuple(rows)))

    def _with_constants(self, group: Parameters) -> Parameters:
        """A copy of a module in which all that is not trained is a constant of JAX."""
        made = copy.deepcopy(group)

        def convert(place: Any) -> None:
            for key, value in place.items():
                if isinstance(value, torch.Tensor) and not value.requires_grad:
                    place[key] = self._tensor(value.detach().cpu().numpy())

        with jax.ensure_compile_time_eval():  # it may be made in a program, but does not depend on it
            for owner in made.module.modules():
                for place in (owner._buffers, owner._parameters, vars(owner)):
                    convert(place)
        return made

    @contextmanager
    def _running(self, name: str, environment: Any, *given: tuple[Parameters, Array]) -> Iterator[None]:
        """Let a function of the user compute with arrays of JAX; what fails is told by its name."""
        parts = [(group, [self._tensor(part) for part in group.cut(vector)]) for group, vector in given]
        try:
            with warnings.catch_warnings(), environment, torch.device("jax"), computing(*parts):
                warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)  # int64 is int32 here
                yield
        except FedBilevelError:
            raise
        except Exception as error:
            raise self._refusal(name, error) from error

    def _refusal(self, name: str, error: Exception) -> SettingsError:
        """What failed, in one line that names the operation, the module it is in, and the remedy."""
        operation, module = self._where(error)
        start, in_module = f"{name} cannot be converted to JAX", f" in {module}" if module else ""
        if isinstance(error, self._torchax.tensor.OperatorNotFound):
            return SettingsError(f"{start}: torchax does not know {operation}{in_module}; {OUT}")
        why = one_line(str(error).strip().splitlines()[0] if str(error).strip() else "no reason", 150).rstrip(".")
        if "mixed math" in why:
            return SettingsError(
                f"{start}: {operation}{in_module} is given a tensor that belongs to no module; make it a buffer "
                f"of x or y (register_buffer), or {OUT}"
            )
        if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
            return SettingsError(
                f"{start}: it looks at the values of tensors{in_module} ({type(error).__name__}), which a "
                f"compiled program cannot; use torch.where or the like, or {OUT}"
            )
        told = f"{operation} " if operation else ""
        return SettingsError(f"{start}: {told}fails{in_module} with {type(error).__name__}: {why}; {OUT}")

    def _where(self, error: Exception) -> tuple[str, str]:
        """The operation and the module in which an error occurred, as far as its trace tells."""
        names = {
            id(each): f"{level}.{path}".rstrip(".") + f" ({type(each).__name__})"
            for level, group in self._groups.items()
            for path, each in group.module.named_modules()
        }
        operation, module, trace = "", "", error.__traceback__
        while trace is not None:
            found = trace.tb_frame.f_locals
            module = names.get(id(found.get("self")), module)
            if trace.tb_frame.f_code.co_name == "dispatch" and "func" in found:
                operation = getattr(found["func"], "name", lambda f=found["func"]: f.__name__)()
            trace = trace.tb_next
        return operation, module


def _refuse_compiled(level: str, module: Any) -> None:
    """Raise if a module is compiled by PyTorch, which PyTorch cannot do once torchax has named its device."""
    dynamo = sys.modules.get("torch._dynamo")  # whatever is compiled has imported it
    for path, each in module.named_modules():
        if dynamo is not None and isinstance(each, dynamo.OptimizedModule):
            where = f"{level}.{path}".rstrip(".")
            raise SettingsError(
                f"{where} is compiled by torch.compile, which does not work beside torchax; give the module as it "
                f"was before, which JAX compiles, or {OUT}"
            )


class _Names(NamedTuple):
    """What is used of torchax, which is imported only for a conversion."""

    tensor: Any
    registry: Any


def _torchax() -> _Names:
    """torchax, or an error that says what to install."""
    os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")  # torchax would set it to 1
    try:
        from torchax import tensor
        from torchax.ops import ops_registry
    except ImportError:
        raise SettingsError(
            f"convert = True needs an extra: pip install 'fedbilevel[torchax]', or {OUT}"
        ) from None
    except Exception as error:  # a version that does not fit the one of PyTorch
        raise SettingsError(
            f"convert = True is wrong here: this torchax cannot be imported with PyTorch {torch.__version__} "
            f"({one_line(str(error), 100)}); pip install 'fedbilevel[torchax]', or {OUT}"
        ) from None
    return _Names(tensor, ops_registry)


def _array(value: Any) -> Any:
    """What a tensor of torchax holds; other values as they are."""
    return value.jax() if isinstance(value, torch.Tensor) else value


def _of(batch: Batch) -> Rows:
    """The rows of a batch without their weights."""
    return Rows(batch.inputs, batch.targets, batch.features, batch.ids)


def _nll_loss(scores: Any, targets: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """PyTorch's own definition, but for class weights: their mean is not one over rows."""
    if weight is not None and reduction == MEAN:
        raise SettingsError(
            "cross_entropy or nll_loss with weight=... divides by the weights of all rows together, and a "
            "converted loss has to be a mean over rows; give it reduction='none', and take the mean() of what it "
            f"returns, or {OUT}"
        )
    return torch._decomp.decomposition_table[torch.ops.aten.nll_loss_forward.default](
        scores, targets, weight, reduction, ignore_index
    )
