"""Wrong inputs of a user's own problem: what is given, and the whole message."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.data import ClientData
from fedbilevel.problem import flatten

METHOD = fb.AggITD(N=1, lower_steps=1, batch_zeta_local="full", participation=1.0)
ROWS = np.arange(20.0).reshape(4, 5)
GOOD = (ROWS, np.zeros(4))


def mean(x: Any, y: Any, b: fb.Batch) -> Any:
    return b.mean((b.inputs @ y - b.targets) ** 2) + jnp.exp(x[0]) * jnp.sum(y**2)


def problem(**changed: Any) -> fb.Problem:
    given: dict[str, Any] = {"x": jnp.zeros(1), "y": jnp.zeros(5), "lower": mean, "upper": mean}
    return fb.Problem(**given | changed)


def clients(*parts: Any) -> fb.Clients:
    """Three clients, the last of which has these parts."""
    return fb.clients_from([(GOOD, GOOD), (GOOD, GOOD), parts if parts else (GOOD, GOOD)])


def trained(changed: dict[str, Any], own: fb.Clients | None = None, **more: Any) -> None:
    fb.train(problem(**changed), own or clients(), METHOD, stop={"iterations": 1}, **more)


def with_row(row: int, value: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[row, 2] = value
    return rows


def lazily(**changed: Any) -> fb.Clients:
    part = fb.Part(*GOOD)
    made: dict[str, Any] = {
        "count": 10**6,
        "capacity": fb.ClientSize(4, 4),
        "make": lambda i: fb.ClientData(part, part),
    }
    return fb.LazyClients(**made | changed)


GIVEN = "it was given x (1,), y (5,) and a batch of inputs (4, 5), targets (4,)"
DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "no clients": (
        lambda: fb.clients_from([]),
        "a federation needs at least one client; the list of client data is empty",
    ),
    "one part only": (
        lambda: clients(GOOD),
        "client 2: a tuple of 1, where its two parts are needed; give a pair (lower, upper)",
    ),
    "a dict of parts": (
        lambda: fb.clients_from([{"lower": GOOD, "upper": GOOD}]),  # type: ignore[list-item]
        "client 0: a dict, where its two parts are needed; give a pair (lower, upper)",
    ),
    "a part that is missing": (
        lambda: clients(GOOD, None),
        "client 2, upper: there are no data; give inputs, or inputs and targets",
    ),
    "an empty dict": (
        lambda: clients({}, GOOD),
        "client 2, lower: there are no data; give inputs, or inputs and targets",
    ),
    "three in a part": (
        lambda: clients(GOOD, (ROWS, ROWS, ROWS)),
        "client 2, upper: a tuple of 3; give inputs, or a pair of inputs and targets",
    ),
    "fewer targets than inputs": (
        lambda: clients((ROWS, np.zeros(3)), GOOD),
        "client 2, lower: inputs has 4 rows and targets has 3; give both the same number of rows",
    ),
    "fewer rows of one input": (
        lambda: clients({"a": ROWS, "b": ROWS[:2]}, GOOD),
        "client 2, lower: inputs['a'] has 4 rows and inputs['b'] has 2; give both the same number of rows",
    ),
    "no rows": (
        lambda: clients(GOOD, (ROWS[:0], np.zeros(0))),
        "client 2 has no upper rows; give it some, or remove the client",
    ),
    "a column less than client 0": (
        lambda: clients((ROWS[:, :4], np.zeros(4)), GOOD),
        "client 2, lower inputs: rows of shape (4,), and those of client 0 have (5,); "
        "give all clients the same shape",
    ),
    "no targets, unlike client 0": (
        lambda: clients(ROWS, GOOD),
        "client 2, lower has inputs, and that of client 0 has inputs, targets; give all clients the same",
    ),
    "strings": (
        lambda: clients(GOOD, (ROWS, np.asarray(["cat", "dog", "cat", "dog"]))),
        "client 2, upper targets: strings, where numbers are needed; encode them as numbers",
    ),
    "a list of strings": (
        lambda: clients(GOOD, (ROWS, ["cat", "dog", "cat", "dog"])),
        "client 2, upper targets: strings, where numbers are needed; encode them as numbers",
    ),
    "objects": (
        lambda: clients((np.asarray([None] * 4), np.zeros(4)), GOOD),
        "client 2, lower inputs: Python objects, where numbers are needed; encode them as numbers",
    ),
    "rows of different lengths": (
        lambda: clients(([[1.0, 2.0], [3.0]], np.zeros(2)), GOOD),
        "client 2, lower inputs: rows of different lengths; give them one length, or pad them",
    ),
    "NaN": (
        lambda: clients((with_row(3, np.nan), np.zeros(4)), GOOD),
        "client 2, lower inputs: a number is not finite in row 3; remove such rows, or fill the gaps",
    ),
    "infinite targets": (
        lambda: clients(GOOD, (ROWS, np.full(4, np.inf))),
        "client 2, upper targets: a number is not finite in 4 rows, the first of which is 0; "
        "remove such rows, or fill the gaps",
    ),
    "a number beyond float32": (
        lambda: clients((with_row(0, 1e300), np.zeros(4)), GOOD),
        "client 2, lower inputs: 1e+300 is too large for the 32 bits of a number; scale the numbers",
    ),
    "a label beyond 32 bits": (
        lambda: clients(GOOD, (ROWS, np.full(4, 2**40))),
        "client 2, upper targets: 1.09951e+12 is too large for the 32 bits of a number; scale the numbers",
    ),
    "a single number": (
        lambda: clients(GOOD, (ROWS, 3.0)),
        "client 2, upper targets: a single number, where rows are needed; give an array of rows",
    ),
    "lazy clients beyond their capacity": (
        lambda: lazily(capacity=fb.ClientSize(4, 3)).load(7),
        "client 7, upper: 4 rows, and the capacity of the clients is 3; "
        "make 1 to 3 rows, or give another capacity",
    ),
}
PROBLEM: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss that is no function": (
        lambda: problem(lower=0.5),
        "lower is of type float; give a function",
    ),
    "no parameters": (
        lambda: problem(x="ridge"),
        "x has no floating-point array, but is of type str; give its parameters as jnp arrays",
    ),
    "parameters that are not finite": (
        lambda: problem(y=jnp.full(5, jnp.nan)),
        "y has a number that is not finite; start from finite parameters",
    ),
    "a loss for each row": (
        lambda: trained({"upper": lambda x, y, b: (b.inputs @ y - b.targets) ** 2}),
        "upper returns an array of shape (4,), and a loss is one number; average over the rows with b.mean(...)",
    ),
    "a loss that returns nothing": (
        lambda: trained({"lower": lambda x, y, b: None}),
        "lower returns an object of type NoneType; return one number",
    ),
    "a loss that counts": (
        lambda: trained({"upper": lambda x, y, b: jnp.sum(b.targets > 0)}),
        "upper returns a number of type int32; return a floating-point number",
    ),
    "parameters of another size than the data": (
        lambda: trained({"y": jnp.zeros(6)}),
        "lower fails with TypeError: dot_general requires contracting dimensions to have the same shape, "
        f"got (5,) and (6,); {GIVEN.replace('y (5,)', 'y (6,)')}",
    ),
    "a field that a batch does not have": (
        lambda: trained({"upper": lambda x, y, b: b.mean(b.labels)}),
        f"upper fails with AttributeError: 'Batch' object has no attribute 'labels'; {GIVEN}",
    ),
    "an embedding that does not fit": (
        lambda: trained({"embed": lambda x, inputs: inputs @ jnp.zeros((3, 2))}),
        "embed fails with TypeError: dot_general requires contracting dimensions to have the same shape, "
        "got (5,) and (3,); it was given x (1,) and inputs (4, 5), the lower rows of a client",
    ),
    "metrics that are no mapping": (
        lambda: trained({"metrics": lambda x, y, b: jnp.zeros(())}, test=fb.Part(*GOOD)),
        "metrics returns an object of type ShapeDtypeStruct; return numbers by name, as in "
        "{'test_accuracy': b.mean(...)}",
    ),
    "a metric for each row": (
        lambda: trained({"metrics": lambda x, y, b: {"error": b.targets}}, test=fb.Part(*GOOD)),
        "metrics returns an array of shape (4,) for error; return one number for each name",
    ),
}
WRONG = DATA | PROBLEM


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_input_is_refused_in_one_line(given: Callable[[], Any], message: str) -> None:
    with pytest.raises(fb.SettingsError, match=f"^{re.escape(message)}$"):
        given()


def test_the_table_is_long_and_every_message_is_a_line_of_its_own() -> None:
    messages = [message for _, message in WRONG.values()]
    assert len(WRONG) >= 20 and not any("\n" in message for message in messages)


def test_a_loss_that_is_not_finite_at_the_start_names_the_client(tmp_path: Path) -> None:
    """A label out of range, of which only the loss knows the classes."""

    def loss(x: Any, y: Any, b: fb.Batch) -> Any:
        return b.mean(optax.softmax_cross_entropy_with_integer_labels(b.inputs + y, b.targets)) + x[0] ** 2

    labels = np.zeros(4, int)
    right, wrong = (ROWS, labels), (ROWS, labels + 5)
    own = fb.clients_from([(right, right), (right, wrong), (right, right)])
    with pytest.raises(fb.Diverged) as raised:
        trained({"lower": loss, "upper": loss}, own)
    assert str(raised.value) == (
        "losses, probe 0: 2 valid replies of 3, 3 needed; client 1: upper is not finite, at the start, where no "
        "step size matters; look for labels out of range and numbers that are not finite in the data, and at the "
        "losses there"
    )


def test_lists_of_numbers_are_arrays() -> None:
    made = fb.clients_from([(([[1, 2], [3, 4]], [0, 1]), {"a": [1.0], "b": [2]})]).load(0)
    assert made.lower.inputs.shape == (2, 2) and made.lower.targets.shape == (2,)
    assert made.upper.inputs["a"].shape == (1,)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (0.5, "x is the float 0.5"),
        ([1, 2.0], "x[0] is the int 1; x[1] is the float 2.0"),
        (np.zeros(3, int), "x is an array of int64"),
        ({"w": jnp.zeros(2), "b": 0.0}, "x['b'] is the float 0.0"),
    ],
)
def test_numbers_and_integer_arrays_are_parameters_with_a_word(x: Any, message: str) -> None:
    told = f"^{re.escape(message)}, and is taken as float32; write jnp.float32 or jnp.zeros\\(...\\) to say so$"
    with pytest.warns(fb.FedBilevelWarning, match=told) as caught:
        made = problem(x=x)
    assert made.size_x == sum(np.size(leaf) for leaf in jax.tree.leaves(x))
    assert caught[0].filename == __file__, "the warning points at the user's own line"


def test_the_constants_of_a_module_are_no_parameters() -> None:
    module = eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    assert flatten(module, "x").vector.size == 9


def test_the_check_at_the_start_loads_one_client_of_a_million() -> None:
    made = list[int]()
    part = fb.Part(*GOOD)

    def make(client: int) -> fb.ClientData:
        made.append(client)
        return fb.ClientData(part, part)

    with pytest.raises(fb.SettingsError, match="lower returns an array of shape"):
        trained({"lower": lambda x, y, b: b.targets}, lazily(make=make))
    assert made == [0]


def test_client_data_without_test_rows_are_taken_as_they_are() -> None:
    rows = fb.Part(np.ones((2, 1), np.float32), np.ones(2, np.float32))
    made = fb.clients_from([ClientData(rows, rows)])
    assert made.data[0].test is None and made.test_rows == 0
