"""Which modules of PyTorch work, against float64 differences, and which are refused: by name, or by a probe."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import Function  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedbilevel.torch import TorchProblem  # noqa: E402
from torch_cases import (  # noqa: E402
    CLASSES,
    INPUTS,
    METHODS,
    clients,
    flat,
    rows,
    torch_embed,
    torch_lower,
    torch_problem,
    torch_upper,
)

HIDDEN = 4


def ids(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of eight token ids."""
    g = np.random.default_rng(seed)
    inputs = g.integers(0, 11, size=(count, 8))
    return inputs, inputs[:, 0] % CLASSES


def head() -> Any:
    return nn.Linear(HIDDEN, CLASSES)


class Tied(nn.Module):  # type: ignore[misc]
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight
        self.last = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.last(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Text(nn.Module):  # type: ignore[misc]
    """Token ids through an embedding and a layer over the sequence."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.tokens, self.over = nn.Embedding(11, HIDDEN), over
        if over == "lstm":
            self.layer: Any = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        elif over == "transformer":
            self.layer = nn.TransformerEncoderLayer(HIDDEN, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        h = self.tokens(x)
        if self.over == "lstm":
            return self.layer(h)[0][:, -1]
        return (self.layer(h) if self.over == "transformer" else h).mean(1)


class Checkpointed(nn.Module):  # type: ignore[misc]
    """A layer whose forward pass is done again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda a: torch.tanh(self.layer(a)), x, use_reentrant=False)


class Pixels(nn.Module):  # type: ignore[misc]
    """Images of 6 numbers through a convolution and a normalisation."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv1d(1, 4, 3), norm, nn.Linear(16, HIDDEN)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.last(torch.tanh(self.norm(self.convolution(x[:, None]))).flatten(1)))


def dense(*more: Any) -> Any:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), *more)


def frozen() -> Any:
    body = nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, HIDDEN), nn.Tanh())
    body[0].requires_grad_(False)
    return body


def weight_normed() -> Any:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, HIDDEN)), nn.Tanh())


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        return torch.jit.script(dense())


def in_eval_mode() -> Any:
    return Pixels(nn.BatchNorm1d(4)).eval()


WORKS: dict[str, Callable[[], Any]] = {
    "tied weights": Tied,
    "embedding of token ids": lambda: Text("mean"),
    "lstm": lambda: Text("lstm"),
    "transformer": lambda: Text("transformer"),
    "group norm": lambda: Pixels(nn.GroupNorm(2, 4)),
    "batch norm in eval mode": in_eval_mode,
    "dropout in eval mode": lambda: dense(nn.Dropout(0.5)).eval(),
    "frozen layers": frozen,
    "weight norm": weight_normed,
    "compiled": lambda: torch.compile(dense(), backend="eager"),
    "scripted": scripted,
    "checkpointing": Checkpointed,
}


def made(body: Any, top: Any = None, **more: Any) -> TorchProblem:
    torch.manual_seed(0)
    fields: dict[str, Any] = dict(lower=torch_lower, upper=torch_upper, embed=torch_embed)
    return TorchProblem(body, top or head(), **fields | more)


@pytest.mark.parametrize("name", WORKS)
def test_the_derivatives_of_a_module_are_those_of_its_losses(name: str) -> None:
    if (
        name == "compiled" and "torchax" in sys.modules
    ):  # which ends torch.compile for its process, see docs/torch.md
        case = f"{__file__}::{test_the_derivatives_of_a_module_are_those_of_its_losses.__name__}[{name}]"
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case], check=True)
        return
    torch.manual_seed(0)
    own = ids if isinstance(body := WORKS[name](), Text) else rows
    data = fb.clients_from([(own(9, 0), own(7, 1))])
    report = fb.check(made(body), data)
    assert report.ok, str(report)
    assert [f.name for f in report.findings][:5] == ["f_x", "f_y", "g_y", "g_yy", "g_xy"]


def test_dict_inputs_and_a_head_of_two_layers_without_embed_work() -> None:
    def loss(body: Any, top: Any, b: Any) -> Any:
        return F.cross_entropy(top(torch.tanh(body(b.inputs["a"]))) * b.inputs["scale"][:, None], b.targets)

    def part(count: int, seed: int) -> tuple[Any, Any]:
        inputs, labels = rows(count, seed)
        return {"a": inputs, "scale": np.ones(count, np.float32)}, labels

    top = nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    problem = made(nn.Linear(INPUTS, HIDDEN), top, lower=loss, upper=loss, embed=None)
    assert fb.check(problem, fb.clients_from([(part(9, 0), part(7, 1))])).ok


def test_a_head_that_does_its_forward_pass_again_takes_the_same_local_steps() -> None:
    def again(body: Any, top: Any, b: Any) -> Any:
        scores = torch.utils.checkpoint.checkpoint(top, b.features, use_reentrant=False)
        return F.cross_entropy(scores, b.targets) + 0.05 * sum((p**2).sum() for p in top.parameters())

    found, expected = (
        fb.train(torch_problem(lower=lower), clients(), METHODS["fbo-aggitd"], stop={"iterations": 2})
        for lower in (again, torch_lower)
    )
    np.testing.assert_allclose(flat(found.y), flat(expected.y), rtol=1e-6)
    np.testing.assert_allclose(flat(found.x), flat(expected.x), rtol=1e-6)


def test_check_finds_a_wrong_derivative() -> None:
    class Wrong(Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return 1.3 * g

    def lower(body: Any, top: Any, b: Any) -> Any:
        return torch_lower(body, lambda_head(top), b)

    def lambda_head(top: Any) -> Any:
        class Around:
            parameters = top.parameters

            def __call__(self, x: Any) -> Any:
                return Wrong.apply(top(x))

        return Around()

    report = fb.check(made(dense(), lower=lower), clients())
    assert {f.name for f in report.findings if not f.ok} >= {"g_y", "g_yy", "g_xy"}


def lazy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.LazyLinear(HIDDEN)


SHARED = nn.Linear(HIDDEN, HIDDEN)
BY_NAME: dict[str, tuple[Callable[[], Any], str]] = {
    "batch norm": (lambda: Pixels(nn.BatchNorm1d(4)), r"x\.norm is a BatchNorm1d in train mode.*call x\.eval\(\)"),
    "no statistics": (
        lambda: Pixels(nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        r"x\.norm is a BatchNorm1d without running statistics.*GroupNorm",
    ),
    "dropout": (lambda: dense(nn.Dropout(0.5)), r"x\.2 is a Dropout with dropout 0\.5 in train mode.*x\.eval\(\)"),
    "sparse": (
        lambda: nn.EmbeddingBag(9, HIDDEN, sparse=True),
        r"x is a EmbeddingBag with sparse gradients.*sparse=False",
    ),
    "lazy": (lazy, r"x\.weight belongs to a lazy module.*on a few rows first"),
    "float64": (lambda: dense().double(), r"x\.0\.weight is float64; call x\.float\(\)"),
    "bfloat16": (lambda: dense().bfloat16(), r"x\.0\.weight is bfloat16; call x\.float\(\)"),
    "nothing to train": (lambda: dense().requires_grad_(False), r"x is a Sequential without a parameter to train"),
    "no module": (lambda: [nn.Parameter(torch.zeros(3))], r"x is of type list; give an nn\.Module"),
    "not finite": (
        lambda: nn.ParameterList([nn.Parameter(torch.tensor([np.nan]))]),
        r"x has a parameter that is not",
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_module_that_cannot_be_trained_is_refused_by_its_name(name: str) -> None:
    make, message = BY_NAME[name]
    with pytest.raises(fb.SettingsError, match=message) as told:
        made(make())
    assert "\n" not in str(told.value)


def test_a_parameter_of_both_levels_is_refused_by_its_names() -> None:
    top = nn.Sequential(SHARED, head())
    with pytest.raises(fb.SettingsError, match=r"y\.0\.weight and x\.0\.weight are the same parameter"):
        made(nn.Sequential(SHARED), top)


class Counting(nn.Module):  # type: ignore[misc]
    """A layer that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, HIDDEN)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x)


class NoSecond(Function):  # type: ignore[misc]
    """The identity, whose derivative has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Any) -> Any:
        return g


OUTSIDE = head()
BY_PROBE: dict[str, tuple[dict[str, Any], str]] = {
    "hidden randomness": (
        dict(upper=lambda x, y, b: torch_upper(x, lambda f: y(F.dropout(f, 0.5)), b)),
        r"upper is random: two calls on the same rows give .*\.eval\(\)",
    ),
    "a buffer that changes": (dict(x=Counting()), r"changes the buffer x\.calls; call \.eval\(\)"),
    "inputs changed in place": (
        dict(embed=lambda x, inputs: x(inputs.add_(1.0))),
        r"changes its inputs in place; use operations that make new tensors",
    ),
    "rows mixed": (
        dict(embed=lambda x, inputs: x(inputs - inputs.mean(0))),
        r"embed mixes rows: the features of a row depend on the other rows",
    ),
    "no second derivatives": (
        dict(lower=lambda x, y, b: torch_lower(x, Around(y), b)),
        r"lower has no second derivatives by y: .*SDPBackend\.MATH",
    ),
    "flash attention in y": (
        dict(lower=lambda x, y, b: torch_lower(x, Attending(y), b)),
        r"lower has no second derivatives by y: .*SDPBackend\.MATH",
    ),
    "a loss that is no scalar": (
        dict(lower=lambda x, y, b: F.cross_entropy(y(b.features), b.targets, reduction="none")),
        r"lower returns a tensor of shape \(6,\), and a loss is one number; take its mean\(\)",
    ),
    "a loss that is no tensor": (dict(upper=lambda x, y, b: 1.0), r"upper returns an object of type float"),
    "a loss of other modules": (
        dict(lower=lambda x, y, b: F.cross_entropy(OUTSIDE(b.features), b.targets)),
        r"lower does not depend on the parameters of y; use the modules that the function is given",
    ),
    "a shape that does not fit": (
        dict(x=nn.Linear(INPUTS + 1, HIDDEN)),
        r"embed fails with RuntimeError: .*; it was given the modules and tensors of the shapes \[\(6, 6\)\]",
    ),
    "features without rows": (
        dict(embed=lambda x, inputs: x(inputs).mean()),
        r"embed returns a tensor of shape \(\) for 6 rows",
    ),
}


class Around:
    """A head whose output has no second derivatives."""

    def __init__(self, module: Any) -> None:
        self._module, self.parameters = module, module.parameters

    def __call__(self, x: Any) -> Any:
        return NoSecond.apply(self._module(x))


class Attending(Around):
    """A head that attends over its four numbers, by a kernel that has no second derivatives."""

    def __call__(self, x: Any) -> Any:
        keys = self._module(x)[:, None, :, None]
        return F.scaled_dot_product_attention(keys, keys, keys)[:, 0, :, 0]


@pytest.mark.parametrize("name", BY_PROBE)
def test_functions_that_cannot_be_trained_are_found_by_a_probe(name: str) -> None:
    fields, message = BY_PROBE[name]
    problem = made(fields.get("x") or dense(), **{k: v for k, v in fields.items() if k != "x"})
    with pytest.raises(fb.SettingsError, match=message) as told:
        fb.train(problem, clients(), fb.FedSOBA(), stop={"rounds": 1})
    assert "\n" not in str(told.value)


def test_engines_that_trace_refuse_modules_and_name_the_engines_to_use() -> None:
    for engine in ("simulation", "fused"):
        with pytest.raises(fb.SettingsError, match=rf"engine = '{engine}' is wrong.*use 'loop', or 'batched'"):
            fb.train(torch_problem(), clients(), fb.FedSOBA(), engine=engine, stop={"rounds": 1})


def test_the_batched_engine_refuses_what_vmap_cannot_batch_and_what_is_no_module() -> None:
    def lower(x: Any, y: Any, b: Any) -> Any:
        loss = torch_lower(x, y, b)
        return loss if loss.item() > 0 else 2 * loss

    with pytest.raises(
        fb.SettingsError, match=r"engine = 'batched' is wrong .*vmap cannot batch it .*; use 'loop'"
    ):
        fb.train(made(dense(), lower=lower), clients(), fb.FedSOBA(), engine="batched", stop={"rounds": 1})
    task = fb.Quadratic().make(clients=2, seed=0)
    with pytest.raises(fb.SettingsError, match="it is for PyTorch modules"):
        fb.train(task.problem, task.clients, fb.FedSOBA(), engine="batched", stop={"rounds": 1})


def test_one_thread_is_used_unless_the_environment_says_otherwise() -> None:
    assert torch.get_num_threads() == 1
