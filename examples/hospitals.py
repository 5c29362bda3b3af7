"""The problem of tabular.py and federation.py: three hospitals, each with a table that does not leave the house.

A row is a patient, and `benign` is what is to be predicted. The tables also have columns that say nothing about a
patient, as exports of real systems do. The lower variables y are the coefficients of a logistic regression, and x
has a penalty for each column.
"""

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import fedbilevel as fb
from fedbilevel.federate import load_site

HOSPITALS = ("berlin", "lyon", "turin")
# What is usual for a column, and by how much it varies: this is known before any patient is seen.
USUAL = {"radius": (14.1, 3.5), "texture": (19.3, 4.3), "perimeter": (92.0, 24.3), "area": (655.0, 352.0)}
USUAL |= {"smoothness": (0.096, 0.014), "compactness": (0.104, 0.053), "concavity": (0.089, 0.08)}
USUAL |= {"concave points": (0.049, 0.039), "symmetry": (0.181, 0.027), "fractal dimension": (0.063, 0.007)}
IDLE = ("bed", "weekday", "room", "clerk", "visit", "invoice")
COLUMNS = (*USUAL, *IDLE)


def write_tables(folder, rows=60):
    """Write a table and a site's file for each hospital, and a table of other patients for the test."""
    draw = np.random.default_rng(0)
    cancer = load_breast_cancer()
    order = draw.permutation(len(cancer.data))
    for name, patients in zip((*HOSPITALS, "test"), np.split(order, [rows, 2 * rows, 3 * rows]), strict=True):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        idle = draw.integers(1, 100, (len(patients), len(IDLE)))
        with (place / "rows.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*COLUMNS, "benign"])
            table.writerows(np.column_stack([cancer.data[patients, :10], idle, cancer.target[patients]]).tolist())
        (place / "site.toml").write_text(SITE)


SITE = f"""\
# fedbilevel site site.toml --kit KIT      takes part in a real federation with these rows
[data]
csv = "rows.csv"
inputs = {list(COLUMNS)}
targets = "benign"
upper_share = 0.5

[problem]
python = "hospitals:problem"
"""


def penalties(x):
    """Between 0.002 and 0.502, where x has the log-odds."""
    return 0.002 + 0.5 * jax.nn.sigmoid(x)


def standard(inputs):
    usual, spread = np.array([USUAL.get(column, (50.0, 29.0)) for column in COLUMNS], np.float32).T
    return (inputs - usual) / spread


def scores(y, inputs):
    return standard(inputs) @ y["slopes"] + y["bias"]


def loss(y, batch):
    z = scores(y, batch.inputs)
    return batch.mean(jnp.logaddexp(0.0, z) - batch.targets * z)


def problem():
    return fb.Problem(
        x=jnp.full(len(COLUMNS), -4.0),  # all penalties start at 0.011
        y={"slopes": jnp.zeros(len(COLUMNS)), "bias": jnp.zeros(())},
        lower=lambda x, y, b: loss(y, b) + 0.5 * penalties(x) @ y["slopes"] ** 2 + 0.001 * y["bias"] ** 2,
        upper=lambda x, y, b: loss(y, b),
        metrics=lambda x, y, b: {"test_loss": loss(y, b)},
        predict=lambda x, y, inputs: jax.nn.sigmoid(scores(y, inputs)),
    )


def read(folder, name):
    """The rows of a hospital, as its site reads them."""
    return load_site(Path(folder, name, "site.toml")).data


def make(folder):
    """The task of a spec."""
    return fb.Task(problem(), fb.clients_from([read(folder, name) for name in HOSPITALS]))
