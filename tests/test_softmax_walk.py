"""The compiled local loop of a softmax head: each kind against the loop by XLA, and what is done without it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxlib.version import __version__ as jaxlib

from fedbilevel import heads
from fedbilevel.heads import Layer, Softmax
from fedbilevel.native import _library, _softmax
from test_permutations import ROOT, build

__all__ = ["build"]
KINDS = ["plain", "avx2", "avx512"]
FLAGS = {"plain": set[str](), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers take the compiled loop, too."""
    monkeypatch.setattr(heads, "SMALL", 0)


@pytest.fixture(params=range(len(KINDS)), ids=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of loop that this processor can do."""
    if not _softmax._registered():
        pytest.skip("nothing was compiled")
    known = Path("/proc/cpuinfo")
    if not FLAGS[KINDS[request.param]] <= set(known.read_text().split() if known.exists() else ()):
        pytest.skip(f"this processor has no {KINDS[request.param]}")
    monkeypatch.setattr(_softmax, "KIND", request.param + 1)


def operands(
    classes: int, features: int, rows: int, steps: int, size: int, bias: bool = True, seed: int = 0
) -> tuple[Any, ...]:
    """What a walk of one client is given, with minibatches of which some are short and some are not used."""
    g = np.random.default_rng(seed)

    def layer(scale: float) -> Layer:
        weight, own = (scale * g.normal(size=shape).astype(np.float32) for shape in ((classes, features), classes))
        return Layer(jnp.asarray(weight), jnp.asarray(own) if bias else None)

    known = jax.nn.softmax(jnp.asarray(g.normal(size=(classes, rows)), jnp.float32), axis=0)
    taken = jnp.asarray(g.normal(size=(rows, features)), jnp.float32)
    index = jnp.asarray(g.integers(0, rows, size=(steps, size)), jnp.int32)
    shares = jnp.asarray(0.1 * g.random((steps, size)) * (g.random((steps, size)) < 0.8), jnp.float32)
    active = jnp.asarray(g.random(steps) < 0.8)
    return layer(1.0), layer(0.01), known, taken, index, shares, active, jnp.float32(0.02)


def near(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, other)


def walks(head: Softmax) -> tuple[Any, Any]:
    """The compiled loop, and the one by XLA."""
    return jax.jit(head._native), jax.jit(head._by_xla)


HEADS = [Softmax(0.1), Softmax(0.1, "norm", 1e-3), Softmax(0.1, "norm", 0.0)]


@settings(max_examples=12)
@given(
    classes=st.integers(1, 11),
    features=st.integers(1, 40),
    rows=st.integers(1, 20),
    steps=st.integers(0, 6),
    size=st.integers(1, 23),
    bias=st.booleans(),
    head=st.sampled_from(HEADS),
)
def check_any_shape(
    classes: int, features: int, rows: int, steps: int, size: int, bias: bool, head: Softmax
) -> None:
    given = operands(classes, features, rows, steps, size, bias)
    one, other = walks(head)
    near(one(*given), other(*given))


def test_every_kind_of_loop_is_the_loop_by_xla_for_any_shape(kind: None) -> None:
    check_any_shape()


def test_operands_that_clients_or_runs_share_are_taken_for_all(kind: None) -> None:
    """Three runs of two clients: the layer differs by run, the rows by client, and the drift by both."""
    head, sizes = HEADS[1], (4, 9, 12, 5, 3)
    base = operands(*sizes)
    runs = jax.tree.map(lambda *a: jnp.stack(a), *(operands(*sizes, seed=s)[0] for s in range(3)))
    clients = jax.tree.map(lambda *a: jnp.stack(a), *(operands(*sizes, seed=s)[3:5] for s in range(2)))
    drifts = jax.tree.map(
        lambda *a: jnp.stack(a).reshape(3, 2, *a[0].shape), *(operands(*sizes, seed=s)[1] for s in range(6))
    )

    def all_of(walk: Any) -> Any:
        def one(layer: Layer, drift: Layer, rows: Any) -> Any:
            return walk(layer, drift, base[2], *rows, *base[5:])

        return jax.vmap(jax.vmap(one, (None, 0, 0)), (0, 0, None))(runs, drifts, clients)

    one, other = walks(head)
    near(all_of(one), all_of(other))


def test_derivatives_are_those_of_the_loop_by_xla(kind: None) -> None:
    given = operands(3, 5, 8, 4, 3)

    def end(walk: Any, start: Layer, features: Any) -> Any:
        made = walk(start, given[1], given[2], features, *given[4:])
        return jnp.sum(made.weight**2) + jnp.sum(made.bias**3)

    one, other = (jax.grad(partial(end, walk), (0, 1))(given[0], given[3]) for walk in walks(HEADS[0]))
    near(one, other)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_and_only_if_it_is_drawn(kind: None, wrong: float) -> None:
    start, drift, known, features, index, *others = operands(4, 6, 9, 5, 3)
    index = jnp.where(index == 8, 0, index)
    others[1] = jnp.ones(5, bool)
    features = features.at[8].set(wrong)
    walk = walks(HEADS[0])[0]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(walk(start, drift, known, features, index, *others)))
    drawn = walk(start, drift, known, features, index.at[2, 1].set(8), *others)
    assert not np.isfinite(drawn.weight).any()


def test_probabilities_of_extreme_scores_are_zero_and_one(kind: None) -> None:
    start, drift, known, features, *others = operands(4, 6, 9, 5, 3)
    start = start.each(lambda a: 1e4 * a)
    one, other = (walk(start, drift, known, features, *others) for walk in walks(Softmax()))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_library_has_the_loop_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert _softmax._registered(), "there is a compiler, and the installation has compiled nothing"
    called = jax.make_jaxpr(HEADS[0]._native)(*operands(4, 6, 9, 5, 3))
    assert "ffi_call" in str(called)


def test_small_layers_other_numbers_and_a_missing_file_take_the_loop_by_xla(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = operands(4, 6, 9, 5, 3)
    monkeypatch.setattr(heads, "SMALL", 25)
    assert "ffi_call" not in str(jax.make_jaxpr(HEADS[0]._native)(*given))
    monkeypatch.setattr(heads, "SMALL", 0)
    halves = jax.tree.map(lambda a: a.astype(jnp.float16) if a.dtype == jnp.float32 else a, given)
    assert "ffi_call" not in str(jax.make_jaxpr(HEADS[0]._native)(*halves))
    monkeypatch.setattr(_library, "FOLDER", tmp_path)
    monkeypatch.setattr(_softmax, "_registered", _softmax._registered.__wrapped__)
    assert not _softmax._registered()
    assert "ffi_call" not in str(jax.make_jaxpr(HEADS[0]._native)(*given))


def test_a_loop_that_was_compiled_for_another_version_of_xla_is_not_used(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    include = ["-I", jax.ffi.include_dir()]
    for version, wanted in (("0.0.1", False), (jaxlib, True)):
        folder = tmp_path / version
        folder.mkdir()
        monkeypatch.setattr(build, "headers", lambda version=version: [*include, f'-DJAXLIB="{version}"'])
        assert build.compile_file(ROOT / build.NATIVE / "softmax.c", folder / "softmax.so") == ""
        monkeypatch.setattr(_library, "FOLDER", folder)
        monkeypatch.setattr(_softmax, "TARGET", "fedbilevel_softmax_walk")
        registered = list[str]()
        monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *a, to=registered, **k: to.append(name))
        assert _softmax._registered.__wrapped__() is wanted
        assert bool(registered) is wanted
