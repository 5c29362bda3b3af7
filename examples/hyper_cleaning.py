"""Hyper-cleaning: a weight for each row, where half of the labels are wrong.

Four clients share scikit-learn's digits. Half of the labels were replaced by other ones, and nobody knows which.
Every client also has ten rows whose labels were checked by hand. A classifier y is trained on the unchecked rows,
each with its own weight, and the weights x serve the loss on the checked rows.
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

out = folder("hyper-cleaning")
CLIENTS, ROWS, CHECKED, DECAY = 4, 400, 40, 0.005

# The data: the loss finds the weight of a row by its number, which is an input of the row.
draw = np.random.default_rng(0)
pixels, truth = load_digits(return_X_y=True)
order = draw.permutation(len(pixels))
pixels, truth = pixels[order] / 16 - 0.3, truth[order]
unchecked, checked, test = np.split(np.arange(len(pixels)), [ROWS, ROWS + CHECKED])
wrong = draw.random(ROWS) < 0.5
labels = truth.copy()
labels[unchecked[wrong]] = (truth[unchecked[wrong]] + draw.integers(1, 10, wrong.sum())) % 10


def rows(numbers):
    return {"pixels": pixels[numbers], "row": numbers}, labels[numbers]


clients = fb.clients_from([(rows(unchecked[i::CLIENTS]), rows(checked[i::CLIENTS])) for i in range(CLIENTS)])


# The problem: multinomial logistic regression, with weights between 0 and 1.
def losses(y, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch.inputs["pixels"] @ y, batch.targets)


def lower(x, y, batch):
    weights = jax.nn.sigmoid(x)[batch.inputs["row"]]
    return batch.mean(weights * losses(y, batch)) + 0.5 * DECAY * jnp.sum(y**2)


problem = fb.Problem(
    x=jnp.zeros(ROWS),  # all rows start with the weight 1/2
    y=jnp.zeros((64, 10)),
    lower=lower,
    upper=lambda x, y, batch: batch.mean(losses(y, batch)),
    metrics=lambda x, y, batch: {"accuracy": batch.mean((batch.inputs["pixels"] @ y).argmax(-1) == batch.targets)},
)
steps = dict(alpha=1000.0, beta=0.7, lam=0.7, lower_steps=1, batch_zeta_local="full")
method = fb.AggITD(N=10, estimator="summed", participation=1.0, **steps)
judges = fb.Part(*rows(test))
result = fb.train(problem, clients, method, stop={"iterations": 30}, evaluate={"every": 5}, test=judges)
weights = jax.nn.sigmoid(result.x)
suspected = np.asarray(weights < 0.5)
precision, recall = wrong[suspected].mean(), suspected[wrong].mean()


# Beside it: the same classifier on rows that are given, trained to the end by scikit-learn.
def trained(numbers):
    model = LogisticRegression(C=1 / (len(numbers) * DECAY), fit_intercept=False, max_iter=2000)
    return model.fit(pixels[numbers], labels[numbers])


agreeing = unchecked[trained(checked).predict(pixels[unchecked]) == labels[unchecked]]
controls = {
    "oracle, who knows the wrong labels": unchecked[~wrong],
    "rows that agree with the checked ones": np.append(agreeing, checked),
    "all rows alike": unchecked,
    "all rows alike, with the checked rows": np.append(unchecked, checked),
    "the checked rows alone": checked,
}
accuracies = {"bilevel": float(result.history[-1]["accuracy"])}
accuracies |= {name: float(trained(at).score(pixels[test], labels[test])) for name, at in controls.items()}
tell("Accuracy on the test rows", accuracies)
print(f"of the rows with a weight below 1/2, {precision:.1%} are wrong")
print(f"of the wrong rows, {recall:.1%} have a weight below 1/2")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
colours, kinds = ["tab:blue", "tab:red"], ["label is right", "label is wrong"]
left.hist([weights[~wrong], weights[wrong]], bins=20, stacked=True, color=colours, label=kinds)
left.set(xlabel="weight", ylabel="rows", title="The weights found")
left.legend(frameon=False, loc="upper center")
bars(right, "Accuracy on the test rows", accuracies)
figure.savefig(out / "hyper-cleaning.png", dpi=90)
