"""A network of one's own, as an Equinox module: its body is the upper variable, and its head is the lower one.

Ten clients share scikit-learn's digits, and each has rows of three digits only. The head y is fitted to the
features that the body x makes of the lower rows, and the body serves the loss of the fitted head on the upper
rows. `embed` says what depends on the body alone: it is computed once in an outer iteration.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

import fedbilevel as fb
from showing import bars, folder, tell

out = folder("network")
CLIENTS, ROWS, DECAY = 10, 80, 0.01

# The data: 40 lower and 40 upper rows for each client, of digits i, i+1 and i+2; the other rows are for the test.
draw = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16 - 0.3).astype(np.float32)
free, parts = draw.permutation(len(pixels)), []
for client in range(CLIENTS):
    own = free[np.isin(labels[free], [client, (client + 1) % 10, (client + 2) % 10])][:ROWS]
    free = free[~np.isin(free, own)]
    lower, upper = np.split(own, 2)
    parts.append(((pixels[lower], labels[lower]), (pixels[upper], labels[upper])))
clients, test = fb.clients_from(parts), fb.Part(pixels[free], labels[free])


class Body(eqx.Module):
    """From 64 pixels to 16 features."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.first = eqx.nn.Linear(64, 32, key=first)
        self.second = eqx.nn.Linear(32, 16, key=second)

    def __call__(self, pixels):
        return jnp.tanh(self.second(jnp.tanh(self.first(pixels))))


def scores(y, batch):
    return jax.vmap(y)(batch.features)


def loss(y, batch):
    return batch.mean(optax.softmax_cross_entropy_with_integer_labels(scores(y, batch), batch.targets))


def head_loss(x, y, batch):
    return loss(y, batch) + 0.5 * DECAY * (jnp.sum(y.weight**2) + jnp.sum(y.bias**2))


body, head = Body(jax.random.key(0)), eqx.nn.Linear(16, 10, key=jax.random.key(1))
problem = fb.Problem(
    x=body,
    y=head,
    embed=lambda x, pixels: jax.vmap(x)(pixels),
    lower=head_loss,
    upper=lambda x, y, batch: loss(y, batch),
    metrics=lambda x, y, batch: {"test_accuracy": batch.mean(scores(y, batch).argmax(-1) == batch.targets)},
)
steps = dict(alpha=1.0, beta=0.5, lam=0.5, lower_steps=5, upper_steps=5, batch_zeta_local="full")
method = fb.AggITD(N=5, estimator="summed", participation=1.0, **steps)
result = fb.train(problem, clients, method, stop={"iterations": 30}, evaluate={"every": 3}, test=test)

# Beside it, with the rows of all clients in one place: the network as one, no body, and the body as it was drawn.
rows, classes = (np.concatenate([part[level][kind] for part in parts for level in (0, 1)]) for kind in (0, 1))


def accuracy(model, features=lambda rows: rows):
    return float(model.fit(features(rows), classes).score(features(test.inputs), test.targets))


linear = LogisticRegression(C=10.0, max_iter=3000)
whole = MLPClassifier((32, 16), activation="tanh", max_iter=1000, random_state=0)
accuracies = {
    "bilevel, ten clients": float(result.history[-1]["test_accuracy"]),
    "in one place: the network": accuracy(
        MLPClassifier((32, 16), activation="tanh", max_iter=1000, random_state=0)
    ),
    "in one place: no body": accuracy(linear),
    "in one place: the first body": accuracy(linear, jax.vmap(body)),
}
tell("Accuracy on the test rows", accuracies)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.plot([r["rounds"] for r in result.history], [r["test_accuracy"] for r in result.history])
left.set(xlabel="communication rounds", ylim=(0, 1), title="Accuracy during the training")
bars(right, "Accuracy on the test rows", accuracies)
figure.savefig(out / "network.png", dpi=90)
