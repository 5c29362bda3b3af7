"""PyTorch problems that are converted to JAX: derivatives against PyTorch's own, runs, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedbilevel.data import ClientData, Part  # noqa: E402
from fedbilevel.spec import parse  # noqa: E402
from fedbilevel.torch import TorchProblem  # noqa: E402
from fedbilevel.torch._agreement import check_means, differences  # noqa: E402
from torch_cases import (  # noqa: E402
    CLASSES,
    INPUTS,
    METHODS,
    clients,
    flat,
    rows,
    torch_embed,
    torch_lower,
    torch_metrics,
    torch_problem,
    torch_upper,
)

HIDDEN, TOKENS, SIDE = 4, 8, 8
# Together these take every derivative in every way: products, solves, whole matrices, g_x alone, and local heads.
# All of METHODS agreed as well when they were tried; most of their time is spent on compilation.
EACH_KIND = "fbo-aggitd", "fbo-aggitd, cg", "lfednest", "gossip", "fedsoba", "fed-f2sa", "local-lower, anew"
ROUNDING = 1e-5  # the largest difference between JAX and PyTorch, relative to the length of a vector


def ids(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids."""
    inputs = np.random.default_rng(seed).integers(0, 11, size=(count, TOKENS))
    return inputs, inputs[:, 0] % CLASSES


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of images with one channel."""
    g = np.random.default_rng(seed)
    return g.normal(size=(count, 1, SIDE, SIDE)).astype(np.float32), g.integers(0, CLASSES, count)


class Activations(nn.Module):  # type: ignore[misc]
    """A sum of activations; one after the other they would flatten their inputs, and rounding would show."""

    def __init__(self) -> None:
        super().__init__()
        own = nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.ReLU, nn.Mish, nn.PReLU
        self.layer, self.own, self.norm = nn.Linear(INPUTS, HIDDEN), nn.ModuleList(), nn.LayerNorm(HIDDEN)
        self.own.extend(each() for each in own)

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        return self.norm(torch.stack([each((i + 1) * h) for i, each in enumerate(self.own)]).sum(0))


class Operations(nn.Module):  # type: ignore[misc]
    """Many operations on small tensors, with one that changes a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, HIDDEN))

    def forward(self, x: Any) -> Any:
        h = torch.einsum("ri,io->ro", x, self.weight)
        h = torch.cat([h[:, :2], h[:, 2:].clamp(-1, 1)], 1)
        h = torch.where(h > 0, h, h.exp() - 1) + torch.stack([h, (h**2 + 1).sqrt()]).sum(0)
        placed = torch.zeros_like(h)
        placed[:, 0] = h[:, 1]
        placed = placed + F.one_hot(x.argmax(1) % HIDDEN, HIDDEN).float() + h[:, [1, 0, 3, 2]]
        spread = h.var(1, keepdim=True) + h.pow(2) / (1 + h.norm(dim=1, keepdim=True))
        return F.softmax(h, 1) * h.logsumexp(1, keepdim=True) + placed + spread + h.max(1, keepdim=True).values


class Attending(nn.Module):  # type: ignore[misc]
    """Token ids with positions and a table that is no buffer, through attention in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.table, self.first = torch.randn(TOKENS, HIDDEN), nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.second, self.norm = nn.Linear(HIDDEN, 3 * HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Any) -> Any:
        h = self.tokens(x) + self.places(torch.arange(TOKENS)) + self.table
        mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
        h = self.norm(h + self.first(h, h, h, attn_mask=mask)[0])
        q, k, v = self.second(h).view(-1, TOKENS, 3, 2, HIDDEN // 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2).mean(1)


class Tied(nn.Module):  # type: ignore[misc]
    """Two layers with one weight, a frozen layer and a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(INPUTS, INPUTS).requires_grad_(False)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, HIDDEN))

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.last(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))))


class Sequences(nn.Module):  # type: ignore[misc]
    """Token ids through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(11, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(self.tokens(x[:, :3]))[0][:, -1]


def convolutions() -> Any:
    first = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, HIDDEN, 1, bias=False)
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def other_convolutions() -> Any:
    own = nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ConvTranspose2d(4, HIDDEN, 2)
    pools = nn.MaxPool2d(3, stride=1, padding=1), nn.MaxPool2d(3, ceil_mode=True), nn.AvgPool2d(2)
    return nn.Sequential(*own, nn.Tanh(), *pools, nn.Flatten())


def squared(body: Any, head: Any, b: Any) -> Any:
    return F.mse_loss(head(b.features), F.one_hot(b.targets.long(), CLASSES).float())


def binary(body: Any, head: Any, b: Any) -> Any:
    wanted = F.one_hot(b.targets.long(), CLASSES).float()
    return F.binary_cross_entropy_with_logits(head(b.features), wanted) + 0.1 * head[0].weight.norm()


def smoothed(body: Any, head: Any, b: Any) -> Any:
    scores = F.log_softmax(head(body(b.inputs)), 1)
    return F.nll_loss(scores, b.targets) + F.cross_entropy(scores, b.targets, label_smoothing=0.1)


def convolved(body: Any, head: Any, b: Any) -> Any:
    return F.cross_entropy(head(b.features[:, None]).mean(2), b.targets)


def dense(*more: Any) -> Any:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), *more)


def two_layers() -> Any:
    return nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class Kind:
    """A body, and the fields of a problem with it."""

    def __init__(self, body: Callable[[], Any], data: Any = rows, head: Any = None, **more: Any) -> None:
        self.body, self.data, self.head, self.more = body, data, head, more

    def problem(self) -> TorchProblem:
        torch.manual_seed(0)
        fields: dict[str, Any] = dict(lower=torch_lower, upper=torch_upper, embed=torch_embed, convert=True)
        head = self.head() if self.head else nn.Linear(HIDDEN, CLASSES)
        return TorchProblem(self.body(), head, **fields | self.more)

    def rows(self) -> ClientData:
        return ClientData(Part(*self.data(6, 0)), Part(*self.data(5, 1)))


KINDS: dict[str, Kind] = {
    "activations and layer norm": Kind(Activations),
    "convolutions as matrix products, pools, group and batch norm": Kind(convolutions, images),
    "other convolutions": Kind(other_convolutions, images),
    "embeddings and attention": Kind(Attending, ids),
    "lstm": Kind(Sequences, ids),
    "indexing, reductions, changes in place": Kind(Operations),
    "tied and frozen weights, weight norm": Kind(Tied),
    "squared error, two layers in y": Kind(dense, head=two_layers, lower=squared, upper=squared),
    "binary cross entropy": Kind(dense, head=two_layers, lower=binary, upper=binary),
    "nll and smoothed labels, without embed": Kind(dense, embed=None, lower=smoothed, upper=smoothed),
    "a convolution in y": Kind(dense, head=lambda: nn.Conv1d(1, CLASSES, 3), lower=convolved, upper=convolved),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_derivative_of_a_converted_module_is_the_one_of_pytorch(name: str) -> None:
    problem = KINDS[name].problem()
    data = KINDS[name].rows()
    check_means(problem, "lower", data.lower)
    assert problem.converted is not None
    for where, found in differences(problem, problem.converted, data).items():
        assert max(found) < ROUNDING, (where, found)


def trained(problem: Any, name: str, engine: str, iterations: int = 10, **more: Any) -> Any:
    stop = {"iterations": iterations}
    return fb.train(problem, clients(), METHODS[name], engine=engine, stop=stop, seed=1, **more)


def kind_of(name: str) -> dict[str, Any]:
    """The kind of lower level that a method solves."""
    local = "local" in getattr(METHODS[name], "lower_kinds", ("global",))
    return {"lower_is": "local" if local else "global"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_KIND)
def test_a_simulation_of_converted_modules_is_the_loop_of_pytorch_after_ten_iterations(name: str) -> None:
    ours = trained(torch_problem(convert=True, **kind_of(name)), name, "simulation")
    theirs = trained(torch_problem(**kind_of(name)), name, "loop")
    for a, b in ((ours.x, theirs.x), (ours.y, theirs.y)):
        np.testing.assert_allclose(flat(a), flat(b), rtol=1e-5, atol=1e-5)
    for figure in ("upper_loss", "lower_loss"):
        assert ours.history[-1][figure] == pytest.approx(theirs.history[-1][figure], rel=1e-4)


def test_fused_iterations_return_modules_and_measure_what_pytorch_measures() -> None:
    ours = trained(torch_problem(convert=True), "fedsoba", "fused", test=rows(40, 7))
    theirs = trained(torch_problem(), "fedsoba", "loop", test=rows(40, 7))
    assert isinstance(ours.x, nn.Sequential) and isinstance(ours.y, nn.Linear)
    np.testing.assert_allclose(flat(ours.x), flat(theirs.x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(flat(ours.y), flat(theirs.y), rtol=1e-5, atol=1e-5)
    assert [h["test_accuracy"] for h in ours.history] == [h["test_accuracy"] for h in theirs.history]


@pytest.mark.slow
def test_clients_measure_their_own_test_rows_as_in_pytorch() -> None:
    method, stop = METHODS["fedbioacc-local"], {"iterations": 2}
    both = [
        fb.train(torch_problem(lower_is="local", convert=convert), clients(test=True), method, stop=stop)
        for convert in (True, False)
    ]
    ours, theirs = (each.history[-1] for each in both)
    for figure in ("test_accuracy", "worst_test_accuracy", "spread_test_accuracy", "lower_loss"):
        assert ours[figure] == pytest.approx(theirs[figure], rel=1e-5)


def test_check_compares_the_derivatives_of_jax_with_the_losses_of_pytorch() -> None:
    report = fb.check(torch_problem(convert=True), clients())
    assert report.ok, str(report)
    assert {"g_xy", "blind to padding", "stored embedding"} <= {f.name for f in report.findings}


def test_a_module_with_convolutions_is_served_in_turn_and_others_batched() -> None:
    assert KINDS["other convolutions"].problem().over == "map"
    assert torch_problem(convert=True).over == "vmap"


def made(**more: Any) -> TorchProblem:
    return Kind(more.pop("x", dense), **more).problem()


class Pooled(nn.Module):  # type: ignore[misc]
    """A layer with an operation that torchax does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.AdaptiveMaxPool2d((1, HIDDEN)))

    def forward(self, x: Any) -> Any:
        return self.inner(x[:, None, None])[:, 0, 0]


class Branching(nn.Module):  # type: ignore[misc]
    """A layer that asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.abs().sum() > 0 else self.layer(-x)


OUTSIDE = torch.tensor([1.0, 2.0, 0.5])


def cut(body: Any, head: Any, b: Any) -> Any:
    scores = head(b.features)
    with torch.no_grad():
        sure = F.softmax(scores, 1).amax(1)
    return ((1 - sure) * F.cross_entropy(scores, b.targets, reduction="none")).mean()


def binary_of_one(body: Any, head: Any, b: Any) -> Any:
    return F.binary_cross_entropy_with_logits(head(b.features)[:, :1].squeeze(), (b.targets > 0).float())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a compiled module": (
        dict(x=lambda: torch.compile(nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh()), backend="eager")),
        r"x is compiled by torch\.compile, which does not work beside torchax; give the module as it was before",
    ),
    "an operation that torchax does not know": (
        dict(x=Pooled),
        r"embed cannot be converted to JAX: torchax does not know aten::adaptive_max_pool2d in x\.inner\.1 "
        r"\(AdaptiveMaxPool2d\); leave convert out",
    ),
    "a tensor of no module": (
        dict(upper=lambda x, y, b: F.cross_entropy(y(b.features) * OUTSIDE, b.targets)),
        r"upper cannot be converted to JAX: .*mul.* is given a tensor that belongs to no module; .*_buffer",
    ),
    "a function that looks at values": (
        dict(x=Branching),
        r"embed cannot be converted to JAX: it looks at the values of tensors in x \(Branching\) .*torch\.where",
    ),
    "a derivative that is cut off": (
        dict(lower=cut),
        r"at the start, g_x by JAX differs from PyTorch's by .* \(allowed: 3e-04\).*; leave convert out",
    ),
    "a sum over rows": (
        dict(lower=lambda x, y, b: F.cross_entropy(y(b.features), b.targets, reduction="sum")),
        r"lower cannot be converted to JAX: it is no mean over rows, but .* on 12 rows together, where the mean",
    ),
    "rows compared with each other": (
        dict(upper=lambda x, y, b: torch_upper(x, y, b) + y(b.features).std(0, correction=0).sum()),
        r"upper cannot be converted to JAX: it is no mean over rows",
    ),
    "class weights of a mean": (
        dict(lower=lambda x, y, b: F.cross_entropy(y(b.features), b.targets, weight=y.bias.detach().exp())),
        r"cross_entropy or nll_loss with weight=\.\.\. divides by the weights of all rows .*reduction='none'",
    ),
    "a loss that fails on one row": (
        dict(upper=binary_of_one),
        r"upper cannot be converted to JAX: it works on 14 rows and not on one row alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_in_one_line(name: str) -> None:
    more, message = REFUSED[name]
    data = clients().load(0)
    if name == "class weights of a mean":  # rows of one class hide it from the comparison of means
        data = data._replace(lower=Part(data.lower.inputs, np.zeros(data.lower.rows, np.int64)))
    with pytest.raises(fb.SettingsError, match=message) as told:
        made(**more).check_fit(data)
    assert "\n" not in str(told.value)


def test_metrics_that_are_no_means_are_refused_for_test_rows_of_clients_only() -> None:
    def spread(x: Any, y: Any, b: Any) -> Any:
        return {**torch_metrics(x, y, b), "spread": y(b.features).std()}

    problem, data = made(metrics=spread), clients(test=True).load(0)
    assert problem.converted is not None and data.test is not None
    problem._check_metrics(problem.converted, data.test, padded=False)
    with pytest.raises(
        fb.SettingsError, match="metrics, spread cannot be converted to JAX: it is no mean over rows"
    ):
        problem._check_metrics(problem.converted, data.test, padded=True)


def test_an_error_within_a_round_is_told_in_the_same_words() -> None:
    engine = fb.Simulation
    with pytest.raises(
        fb.FedBilevelError, match=r"torchax does not know aten::adaptive_max_pool2d in x\.inner\.1"
    ):
        engine(made(x=Pooled), clients())


def test_without_torchax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchax", None)
    with pytest.raises(
        fb.SettingsError, match=r"convert = True needs an extra: pip install 'fedbilevel\[torchax\]'"
    ):
        torch_problem(convert=True)


@pytest.mark.slow
def test_a_spec_runs_a_converted_problem_in_the_simulation_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    text = "import fedbilevel as fb\nfrom torch_cases import clients, torch_problem\n\n"
    text += "def make(convert):\n    return fb.Task(torch_problem(convert=convert), clients())\n"
    (tmp_path / "torch_converted.py").write_text(text)

    def spec(convert: bool, iterations: int) -> Any:
        own = {"participation": 1.0, "alpha": 0.1, "beta": 0.1, "lower_steps": 2}
        return parse(
            {
                "problem": {"name": "python", "function": "torch_converted:make", "convert": convert},
                "algorithm": own,
                "stop": {"iterations": iterations},
                "evaluate": {"checkpoint_every": 2},
            }
        )

    try:
        fb.run(spec(True, 2), tmp_path / "ours")
        ours = fb.run(spec(True, 4), tmp_path / "ours", resume=True)
        theirs = fb.run(spec(False, 4), tmp_path / "theirs")
    finally:
        sys.modules.pop("torch_converted", None)
    assert isinstance(ours.x, nn.Sequential)
    np.testing.assert_allclose(flat(ours.x), flat(theirs.x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(flat(ours.y), flat(theirs.y), rtol=1e-5, atol=1e-5)
