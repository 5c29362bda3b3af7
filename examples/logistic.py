"""Logistic regression with penalties for groups of features and one client, beside the exact answer.

A federation of one is a bilevel solver like any other. In scikit-learn's breast cancer data ten things were
measured, and of each there are the mean, the error and the worst value. The 30 coefficients y are fitted on 200
lower rows, and ten penalties x are judged on 200 upper rows. The lower problem is ill-conditioned, since the
features are nearly dependent, so the client takes many local steps, and the Hessian series is long.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

import fedbilevel as fb
from showing import folder, tell

out = folder("logistic")

# The data, with mean 0 and deviation 1 for each feature.
cancer = load_breast_cancer()
order = np.random.default_rng(0).permutation(569)
inputs = ((cancer.data - cancer.data.mean(0)) / cancer.data.std(0))[order]
targets = cancer.target[order].astype(float)
lower, upper, test = ((inputs[rows], targets[rows]) for rows in (slice(200), slice(200, 400), slice(400, None)))
clients = fb.clients_from([(lower, upper)])


# The problem: the penalty of a group is between 0.005 and 0.105, and x has the log-odds of all penalties.
def penalties(x):
    return 0.005 + 0.1 * jax.nn.sigmoid(x)


def penalty(x, y):
    return 0.5 * penalties(x) @ jnp.sum(y.reshape(3, 10) ** 2, axis=0)


def losses(y, inputs, targets):
    return jnp.logaddexp(0.0, inputs @ y) - targets * (inputs @ y)


start = jnp.full(10, -1.0)
problem = fb.Problem(
    x=start,
    y=jnp.zeros(30),
    lower=lambda x, y, b: b.mean(losses(y, b.inputs, b.targets)) + penalty(x, y),
    upper=lambda x, y, b: b.mean(losses(y, b.inputs, b.targets)),
)
steps = dict(alpha=2000.0, beta=0.7, lam=0.7, lower_steps=20, batch_zeta_local="full")
method = fb.AggITD(N=40, estimator="summed", participation=1.0, **steps)
result = fb.train(problem, clients, method, stop={"iterations": 20}, evaluate={"every": 1})


# The truth: y*(x) by Newton's method, and the exact hypergradient by the implicit function theorem.
def penalised(x, y):
    return jnp.mean(losses(y, *lower)) + penalty(x, y)


slope, curvature = jax.grad(penalised, 1), jax.hessian(penalised, 1)


@jax.jit
def exact(x):
    """y*(x), f(x, y*(x)) and its gradient."""
    y = jax.lax.fori_loop(0, 15, lambda _, y: y - jnp.linalg.solve(curvature(x, y), slope(x, y)), jnp.zeros(30))
    value, gradient = jax.value_and_grad(lambda y: jnp.mean(losses(y, *upper)))(y)
    p = jnp.linalg.solve(curvature(x, y), gradient)
    return y, value, -jax.grad(lambda x: slope(x, y) @ p)(x)


best = minimize(lambda x: exact(x)[1:], start, jac=True, method="L-BFGS-B", bounds=[(-8, 8)] * 10)
begun, reached, minimum = float(exact(start)[1]), float(exact(result.x)[1]), float(best.fun)

# Beside it on the test rows: one penalty for all features, by cross-validation on the lower rows.
model = LogisticRegression(fit_intercept=False, max_iter=5000)
search = GridSearchCV(model, {"C": np.logspace(-1, 2, 9)}, scoring="neg_log_loss").fit(*lower)
ways = {
    "bilevel, by fedbilevel": result.y,
    "bilevel, exact": exact(best.x)[0],
    "one penalty, by cross-validation": search.best_estimator_.coef_[0],
    "all penalties as at the start": exact(start)[0],
}
errors = {name: float(np.mean(losses(y, *test))) for name, y in ways.items()}
tell("Logistic loss on the test rows", errors, min)
rounds = result.summary["rounds"]
print(f"outer loss: start {begun:.4f}, after {rounds} rounds {reached:.4f}, exact minimum {minimum:.4f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
at, names = np.arange(10), [name.removeprefix("mean ") for name in cancer.feature_names[:10]]
left.barh(at - 0.2, penalties(result.x), 0.4, label="by fedbilevel")
left.barh(at + 0.2, penalties(best.x), 0.4, color="black", label="exact")
left.set_yticks(at, names)
left.invert_yaxis()
left.set(title="The penalty of each group of features")
records = result.history[1:]  # the first one is at y = 0
right.plot([r["rounds"] for r in records], [r["upper_loss"] for r in records], label="by fedbilevel")
right.axhline(minimum, color="black", linestyle="--", label="exact minimum")
right.axhline(begun, color="grey", linestyle=":", label="at the start, with y fitted to the end")
right.set(xlabel="rounds", ylabel="loss on the upper rows", title="The outer loss")
for axes in (left, right):
    axes.legend(frameon=False)
figure.savefig(out / "logistic.png", dpi=90)
