"""A weight for each client, where the labels of some clients are random.

Twelve clients share scikit-learn's digits. Six of them have random labels, and nobody knows which. Every client
also has six rows whose labels were checked by hand. A classifier y is trained on the unchecked rows, where those
of client i count with the weight w_i. The weights x serve the loss on the checked rows.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import fedbilevel as fb
from showing import bars, folder, tell

out = folder("client-weights")
CLIENTS, BAD, ROWS, CHECKED, DECAY = 12, (1, 3, 4, 6, 9, 10), 40, 6, 0.005

# The data: the loss finds the weight of a row by the client's number, which is an input of every row.
draw = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
order = draw.permutation(len(pixels))
pixels, labels = pixels[order] / 16 - 0.3, labels[order]


def rows(client, start, count):
    at = slice(start, start + count)
    return {"pixels": pixels[at], "client": np.full(count, client)}, labels[at]


unchecked = [rows(client, client * ROWS, ROWS) for client in range(CLIENTS)]
checked = [rows(client, 600 + client * CHECKED, CHECKED) for client in range(CLIENTS)]
test = fb.Part(*rows(0, 700, 1097))
for client in BAD:
    unchecked[client] = unchecked[client][0], draw.integers(10, size=ROWS)
clients = fb.clients_from(list(zip(unchecked, checked, strict=True)))


# The problem: multinomial logistic regression, with weights between 0 and 1.
def losses(y, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch.inputs["pixels"] @ y, batch.targets)


def lower(x, y, batch):
    weights = jax.nn.sigmoid(x)[batch.inputs["client"]]
    return batch.mean(weights * losses(y, batch)) + 0.5 * DECAY * jnp.sum(y**2)


problem = fb.Problem(
    x=jnp.zeros(CLIENTS),  # all clients start with the weight 1/2
    y=jnp.zeros((64, 10)),
    lower=lower,
    upper=lambda x, y, batch: batch.mean(losses(y, batch)),
    metrics=lambda x, y, batch: {"accuracy": batch.mean((batch.inputs["pixels"] @ y).argmax(-1) == batch.targets)},
)
steps = dict(alpha=50.0, beta=0.7, lam=0.7, lower_steps=1, batch_zeta_local="full")
method = fb.AggITD(N=10, estimator="summed", participation=1.0, **steps)
result = fb.train(problem, clients, method, stop={"iterations": 40}, evaluate={"every": 5}, test=test)
weights = jax.nn.sigmoid(result.x)


# Beside it: the same classifier with weights that are given, trained to the end by scikit-learn.
def accuracy(parts, weights=None):
    a, b = np.concatenate([part[0]["pixels"] for part in parts]), np.concatenate([part[1] for part in parts])
    model = LogisticRegression(C=1 / (len(a) * DECAY), fit_intercept=False, max_iter=2000)
    model.fit(a, b, None if weights is None else np.repeat(weights, ROWS))
    return float(model.score(test.inputs["pixels"], test.targets))


good = np.array([client not in BAD for client in range(CLIENTS)])
accuracies = {
    "bilevel": float(result.history[-1]["accuracy"]),
    "oracle, who knows the bad clients": accuracy(unchecked, good),
    "all clients alike": accuracy(unchecked),
    "all clients alike, with the checked rows": accuracy(unchecked + checked),
    "the checked rows alone": accuracy(checked),
}
tell("Accuracy on the test rows", accuracies)
print("weights of the good clients:", np.sort(weights[good]).round(2))
print("weights of the others:      ", np.sort(weights[~good]).round(2))

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
at = np.arange(CLIENTS)
left.bar(at[good], weights[good], color="tab:blue", label="labels are right")
left.bar(at[~good], weights[~good], color="tab:red", label="labels are random")
left.set(xlabel="client", title="The weight found for each client", ylim=(0, 1.3), xticks=at)
left.legend(frameon=False, loc="upper center", ncols=2, fontsize="small")
bars(right, "Accuracy on the test rows", accuracies)
figure.savefig(out / "client-weights.png", dpi=90)
