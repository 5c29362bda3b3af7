"""Models: sizes of the paper's networks, and convolutions against JAX's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel import SettingsError
from fedbilevel._derivatives import remember
from fedbilevel.data import ClientData, ClientSize, Part
from fedbilevel.engines._work import pad
from fedbilevel.models import Convolution, Shape, Strided, TwoHalves, cnn, in_blocks, mlp, pool, small_cnn
from fedbilevel.problems import HyperRepresentation, representation_problem


def size(tree: object) -> int:
    return int(ravel_pytree(tree)[0].size)


@pytest.mark.parametrize(
    ("shape", "head_layers", "body", "head"),
    [
        ((28, 28, 1), 2, 156 + 2_416 + 48_120, 10_164 + 850),
        ((28, 28, 1), 1, 156 + 2_416 + 48_120 + 10_164, 850),
        ((32, 32, 3), 2, 456 + 2_416 + 48_120, 10_164 + 850),
    ],
)
def test_lenet_has_the_layers_of_the_experiments(shape: Shape, head_layers: int, body: int, head: int) -> None:
    model: Any = cnn(shape, 10, head_layers=head_layers, key=jax.random.key(0))
    assert (size(model.body), size(model.head)) == (body, head)
    rows = jnp.ones((3, int(np.prod(shape))))
    assert jax.eval_shape(lambda: model.head(model.body(rows))).shape == (3, 10)


@pytest.mark.parametrize(
    ("channels", "side", "padding", "size"), [((1, 6), 5, 2, 28), ((3, 6), 5, 0, 28), ((2, 3), 4, 0, 13)]
)
@pytest.mark.slow
def test_a_convolution_by_patches_is_the_convolution_of_jax_with_its_derivatives(
    channels: tuple[int, int], side: int, padding: int, size: int
) -> None:
    layer = Convolution(channels, side, padding, key=jax.random.key(1))
    images = jax.random.normal(jax.random.key(2), (4, size, size, channels[0]))

    def plain(layer: Convolution, images: Array) -> Array:
        kernel = layer.kernel.reshape(side, side, *channels)
        pads = [(padding, padding)] * 2
        out = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        out = jax.nn.relu(out + layer.bias)
        return jax.lax.reduce_window(out, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def ours(layer: Convolution, images: Array) -> Array:
        return layer(images.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)

    @functools.partial(jax.jit, static_argnums=0)
    def with_derivatives(f: Callable[[Convolution, Array], Array], layer: Convolution, images: Array) -> Any:
        out, pulled = jax.vjp(f, layer, images)
        return out, pulled(jax.random.normal(jax.random.key(3), out.shape))

    (one, got), (other, expected) = (with_derivatives(f, layer, images) for f in (ours, plain))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_of_equal_pixels_the_first_gets_the_derivative_of_pooling_and_none_where_the_result_is_zero() -> None:
    four = jnp.asarray([[1.0, -1.0, 0.0], [1.0, -3.0, 2.0], [0.5, -2.0, 2.0], [1.0, -1.0, 2.0]])
    out, pulled = jax.vjp(pool, four, jnp.asarray([0.5]))
    np.testing.assert_array_equal(out, [[1.5, 0.0, 2.5]])
    to_four, to_bias = pulled(jnp.asarray([[5.0, 6.0, 7.0]]))
    np.testing.assert_array_equal(to_four, [[5.0, 0.0, 0.0], [0.0, 0.0, 7.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(to_bias, [12.0])


@pytest.mark.parametrize("count", [5, 48, 100])
def test_rows_in_blocks_give_what_they_give_at_once(count: int) -> None:
    """100 rows are six blocks of 16 and a last one with zeros; 5 and 48 fit into one block."""
    rows = jnp.arange(2.0 * count).reshape(count, 2)
    np.testing.assert_array_equal(in_blocks(lambda some: some**2 + 1, rows, 50), rows**2 + 1)


def test_a_heavy_forward_pass_is_redone_and_a_light_one_stored() -> None:
    """The pullback of the CNN keeps no patches; that of the MLP keeps its forward pass."""
    part = Part(np.ones((4, 784), np.float32), np.zeros(4, np.int32))
    data = pad(ClientData(part, part), ClientSize(4, 4))

    def stored(model: TwoHalves) -> int:
        problem = representation_problem(model, 0.05, "norm")
        memory = jax.eval_shape(lambda x: remember(problem, x, data), problem.flat_x.vector)
        assert memory is not None
        return sum(leaf.size for leaf in jax.tree.leaves(memory.upper.pullback))

    key = jax.random.key(0)
    assert stored(cnn((28, 28, 1), 10, head_layers=2, key=key)) < 2 * (4 * 784 + 50_692)
    assert 4 * 784 <= stored(mlp(784, 200, 10, key=key)) < 2 * 4 * (784 + 2 * 200)


def test_images_of_another_size_are_refused_with_a_remedy() -> None:
    with pytest.raises(SettingsError, match="8 x 8; use mlp"):
        cnn((8, 8, 1), 10, head_layers=1, key=jax.random.key(0))


def test_a_problem_can_be_sent_to_another_process_after_its_vectors_were_used() -> None:
    from ray import cloudpickle  # what the engine on Ray sends problems with

    problem = HyperRepresentation(hidden=3).remote((8, 8, 1), 10)
    copy = cloudpickle.loads(cloudpickle.dumps(problem))
    np.testing.assert_array_equal(copy.flat_x.vector, problem.flat_x.vector)
    restored = copy.flat_x.restore(problem.flat_x.vector)
    np.testing.assert_array_equal(restored.layers[0].weight, problem.x.layers[0].weight)


def test_a_convolution_by_two_pixels_is_that_of_jax() -> None:
    layer = Strided((3, 4), 5, key=jax.random.key(1))
    images = jax.random.normal(jax.random.key(2), (6, 12, 13, 3))
    kernel = layer.kernel.reshape(5, 5, 3, 4)
    plain = jax.lax.conv_general_dilated(
        images, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    found = layer(images.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)
    np.testing.assert_allclose(found, jax.nn.relu(plain), rtol=1e-5, atol=1e-5)


def test_the_small_network_has_hessian_products_so_that_it_may_be_the_lower_level() -> None:
    """Forward over reverse is reverse over reverse. The LeNet has reverse mode only."""
    model: Any = small_cnn((12, 12, 2), 3, key=jax.random.key(0))
    y, restore = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))
    rows = jax.random.normal(jax.random.key(1), (5, 288))
    v = jax.random.normal(jax.random.key(2), y.shape)

    def loss(y: Array) -> Array:
        made = eqx.combine(restore(y), model)
        return jnp.sum(jax.nn.logsumexp(made.head(made.body(rows)), -1))

    forward = jax.jit(lambda y: jax.jvp(jax.grad(loss), (y,), (v,))[1])(y)
    backward = jax.jit(jax.grad(lambda y: jnp.vdot(jax.grad(loss)(y), v)))(y)
    assert float(jnp.abs(forward).max()) > 1e-3
    np.testing.assert_allclose(forward, backward, rtol=1e-3, atol=1e-4 * float(jnp.abs(forward).max()))
