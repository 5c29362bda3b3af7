"""Any state of a run as named arrays, into the file of a checkpoint and back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedbilevel import CheckpointError
from fedbilevel._divergence import Restart
from fedbilevel.record import Checkpoint, Plan, RunFolder, flatten_state, restore_state
from fedbilevel.record._checkpoint import HELD, Seal, decode, encode

LEDGER: dict[str, Any] = {"steps": {}, "probes": {}, "rejected": {}}
SEAL = Seal("plan", "history")


class State(NamedTuple):
    x: Any
    y: Any
    opt: Any = None


def through_a_file(state: Any, start: Any, path: Path) -> Any:
    path.write_bytes(encode(Checkpoint(flatten_state(state), 3, LEDGER), SEAL))
    return restore_state(start, decode(path)[0].arrays)


def same(one: Any, other: Any) -> None:
    """The two pytrees have the same structure, and leaves of the same types, shapes and bits."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    assert structures[0] == structures[1]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if type(a) in (bool, int, float):
            assert type(a) is type(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype.name) == (b.shape, b.dtype.name)
        assert a.tobytes() == b.astype(a.dtype, order="C").tobytes()


def adam_state(seed: int) -> State:
    """The state of a run that keeps the moments of Adam for its upper variable, after one step."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = {"w": jax.random.normal(keys[0], (2, 3)), "b": [jax.random.normal(keys[1], (3,)), None]}
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    _, opt = adam.update(jax.tree.map(jnp.cos, x), adam.init(x))
    return State(x, jax.random.normal(keys[2], (4,)), opt)


# States -----------------------------------------------------------------------------------------------


def test_the_state_of_adam_inside_a_named_tuple_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = adam_state(0)
    assert list(flatten_state(state)) == [
        *("x.b.0", "x.w", "y", "opt.1.0.count"),
        *("opt.1.0.mu.b.0", "opt.1.0.mu.w", "opt.1.0.nu.b.0", "opt.1.0.nu.w"),
    ]
    found = through_a_file(state, adam_state(1), tmp_path / "file")
    same(state, found)
    assert isinstance(found, State) and isinstance(found.opt[1][0], optax.ScaleByAdamState)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))


def test_a_flat_named_tuple_is_named_by_its_fields() -> None:
    assert list(flatten_state(State(jnp.zeros(2), jnp.zeros(3)))) == ["x", "y"]


def test_python_numbers_come_back_as_python_numbers_of_the_same_type(tmp_path: Path) -> None:
    state = {"count": -(2**62) - 1, "rate": 0.1, "warm": True, "list": [7, (1e-300, None), float("nan")]}
    start = {"count": 0, "rate": 0.0, "warm": False, "list": [0, (0.0, None), 0.0]}
    found = through_a_file(state, start, tmp_path / "file")
    same(state, found)
    assert (found["count"], found["rate"], found["warm"]) == (-(2**62) - 1, 0.1, True)
    assert [type(found[name]) for name in ("count", "rate", "warm")] == [int, float, bool]


@pytest.mark.parametrize("kind", HELD)
def test_every_type_that_a_checkpoint_holds_comes_back(kind: str, tmp_path: Path) -> None:
    array = np.arange(6).astype(jnp.dtype(kind)).reshape(2, 3)
    found = through_a_file({"a": array}, {"a": np.zeros_like(array)}, tmp_path / "file")["a"]
    same({"a": array}, {"a": found})
    narrow = kind not in ("int64", "uint64", "float64")
    assert isinstance(found, jax.Array if narrow else np.ndarray), "JAX would round a 64-bit array"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(12, dtype=np.int32)[::-2],
        np.arange(3, dtype=">f4"),
        np.float32(3),
        np.zeros((0, 3), np.float32),
        np.array([np.nan, -0.0, np.inf], np.float16),
    ],
    ids=["transposed", "strided", "big-endian", "scalar", "empty", "not finite"],
)
def test_an_array_comes_back_however_it_lies_in_memory(array: Any, tmp_path: Path) -> None:
    found = through_a_file([array], [np.zeros_like(array)], tmp_path / "file")[0]
    assert found.shape == array.shape and found.dtype.name == array.dtype.name
    np.testing.assert_array_equal(np.asarray(found), array)


def test_names_that_read_alike_are_told_apart(tmp_path: Path) -> None:
    state = {"a": {"b": 1.0}, "a.b": 2.0, "a.b~2": 3.0, "__metadata__": 4.0}
    assert list(flatten_state(state)) == ["__metadata__~2", "a.b", "a.b~2", "a.b~2~2"]
    start = {"a": {"b": 0.0}, "a.b": 0.0, "a.b~2": 0.0, "__metadata__": 0.0}
    assert through_a_file(state, start, tmp_path / "file") == state


def test_a_state_that_is_one_array_or_nothing_has_a_name_too(tmp_path: Path) -> None:
    assert list(flatten_state(jnp.ones(2))) == ["state"]
    same(jnp.ones(2), through_a_file(jnp.ones(2), jnp.zeros(2), tmp_path / "file"))
    assert flatten_state(None) == {}
    assert through_a_file((None, []), (None, []), tmp_path / "file") == (None, [])


ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float16, np.int32, np.uint8, np.bool_, np.float64, np.int64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = ARRAYS | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans() | st.none()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab.~2", max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(State, inner, inner, inner)
    ),
    max_leaves=12,
)


@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES)
def test_any_pytree_comes_back_bit_for_bit(tmp_path: Path, tree: Any) -> None:
    start = jax.tree.map(lambda leaf: np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)(0), tree)
    same(tree, through_a_file(tree, start, tmp_path / "file"))


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "start", "message"),
    [
        ({"x": 1.0}, {"x": 1.0, "y": 1.0, "z": 2}, r"from: it has no y, z; go on with"),
        ({"x": 1.0, "old": 2}, {"x": 1.0}, r"it has old, which the state does not have"),
        (
            {"x": np.zeros(3)},
            {"x": np.zeros((3, 1))},
            r"its x is float64\[3\] where the state has float64\[3, 1\]",
        ),
        ({"n": jnp.int32(3)}, {"n": 3}, r"its n is int32\[\] where the state has a Python int"),
        ({"n": 3}, {"n": 3.0}, r"its n is int64\[\] where the state has a Python float"),
        ({"n": True}, {"n": 1}, r"its n is bool\[\] where the state has a Python int"),
        ({"m": {"w": jnp.zeros(2)}}, {"m": None}, r"it has m\.w, which the state does not have"),
        (
            {"a": 1.0, "b": 1},
            {"b": 1.0, "c": 1},
            r"it has no c; it has a, which the state does not have; its b is .*; go on with the settings and the "
            r"algorithm that wrote it, or delete it to start the run again",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(saved: Any, start: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        restore_state(start, flatten_state(saved))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jax.random.key(0), r"m\.0 in the state is an array of type key<fry>.*jax\.random\.key_data"),
        (np.zeros(2, np.complex128), r"m\.0 in the state is an array of type complex128, which a checkpoint"),
        (np.array([object()]), r"an array of type object"),
        (jnp.zeros(2, jnp.float8_e5m2), r"an array of type float8_e5m2.*one of the types bool, int8"),
        ("text", r"m\.0 in the state is a str, which a checkpoint cannot hold"),
        (jax.nn.relu, r"m\.0 in the state is a .*, which a checkpoint cannot hold"),
        (2**63, r"m\.0 = 9223372036854775808 in the state does not fit into the 64 bits"),
    ],
)
def test_a_leaf_that_a_checkpoint_cannot_hold_is_refused_by_name(leaf: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        flatten_state({"m": [leaf]})


# The file ---------------------------------------------------------------------------------------------


def test_a_checkpoint_and_its_seal_come_back_as_they_were(tmp_path: Path) -> None:
    restarts = (Restart(4, "beta", 0.5, 0.25, 12, "y is not finite"),)
    clients = {"3": "client.3.safetensors", "17": "client.17.safetensors"}
    saved = Checkpoint({"x": np.arange(3.0)}, 7, LEDGER, restarts, clients)
    (tmp_path / "file").write_bytes(encode(saved, SEAL))
    found, seal = decode(tmp_path / "file")
    assert (found[1:], seal) == (saved[1:], SEAL)
    np.testing.assert_array_equal(found.arrays["x"], saved.arrays["x"])


def test_the_files_of_clients_are_written_only_if_there_are_some(tmp_path: Path) -> None:
    none = encode(Checkpoint({}, 7, LEDGER), SEAL)
    some = encode(Checkpoint({}, 7, LEDGER, clients={"3": "a"}), SEAL)
    assert b"clients" not in none and b"clients" in some
    (tmp_path / "file").write_bytes(none)
    assert decode(tmp_path / "file")[0].clients == {}


def test_the_checksum_covers_the_files_of_clients(tmp_path: Path) -> None:
    plan = Plan({"seed": 0}, "plan")
    folder = RunFolder(tmp_path / "run")
    folder.open(plan, resume=False, overwrite=False)
    folder.save(plan, Checkpoint({}, 0, LEDGER, clients={"3": "state-a"}))
    folder.close()
    saved = folder.checkpoint(plan)
    assert saved is not None and saved.clients == {"3": "state-a"}
    path = folder.file("checkpoint.safetensors")
    path.write_bytes(path.read_bytes().replace(b"state-a", b"state-b"))
    with pytest.raises(CheckpointError, match="its SHA-256 differs; delete it to start this run again"):
        folder.checkpoint(plan)
