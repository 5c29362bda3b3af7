"""Ridge regression with a penalty for each feature, beside the exact answer.

Five clients share scikit-learn's diabetes data. The coefficients y are fitted on each client's lower rows, and the
penalties x are judged on its upper rows. Everything here has a closed form, so the hypergradient and the minimum
that the federation finds are compared with the true ones.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV

import fedbilevel as fb
from showing import folder, tell

out = folder("ridge")

# The data: 165 lower and 165 upper rows for five clients, and 112 for the test, with mean 0 and deviation 1.
diabetes = load_diabetes()
order = np.random.default_rng(0).permutation(442)
inputs, targets = (((a - a.mean(0)) / a.std(0))[order] for a in (diabetes.data, diabetes.target))
lower, upper, test = ((inputs[rows], targets[rows]) for rows in (slice(165), slice(165, 330), slice(330, None)))
clients = fb.clients_from([((lower[0][i::5], lower[1][i::5]), (upper[0][i::5], upper[1][i::5])) for i in range(5)])


# The problem: the penalty of a feature is between 0 and 1, and x has the log-odds of all penalties.
def error(y, batch):
    return 0.5 * batch.mean((batch.inputs @ y - batch.targets) ** 2)


def problem(x, y):
    def penalised(x, y, batch):
        return error(y, batch) + 0.5 * jnp.sum(jax.nn.sigmoid(x) * y**2)

    return fb.Problem(x=x, y=y, lower=penalised, upper=lambda x, y, batch: error(y, batch))


# The truth: y*(x) in closed form, and f(x, y*(x)), whose gradient by JAX is the exact hypergradient.
def solution(x):
    a, b = lower
    return jnp.linalg.solve(a.T @ a / len(a) + jnp.diag(jax.nn.sigmoid(x)), a.T @ b / len(a))


def outer(x):
    return 0.5 * jnp.mean((upper[0] @ solution(x) - upper[1]) ** 2)


start = jnp.full(10, -1.0)
exact = minimize(jax.value_and_grad(outer), start, jac=True, method="L-BFGS-B", bounds=[(-8, 8)] * 10)

# The largest curvature of the lower loss is 4.7 + 1, so 0.17 is a good step for y and for the Hessian series.
steps = dict(estimator="summed", beta=0.17, lam=0.17, lower_steps=1, batch_zeta_local="full", participation=1.0)

# The hypergradient: one outer iteration from y*(x) with alpha = 1 moves x by exactly that.
method = fb.AggITD(N=150, alpha=1.0, **steps)
moved = fb.train(problem(start, solution(start)), clients, method, stop={"iterations": 1})
true = jax.grad(outer)(start)
hypergradient_error = float(jnp.linalg.norm(start - moved.x - true) / jnp.linalg.norm(true))

# The minimum.
method = fb.AggITD(N=10, alpha=400.0, **steps)
result = fb.train(problem(start, jnp.zeros(10)), clients, method, stop={"iterations": 50}, evaluate={"every": 2})
reached, minimum = float(outer(result.x)), float(exact.fun)

# Beside it on the test rows: one penalty for all features, by cross-validation on the lower rows; and none.
ways = {
    "bilevel, federated": result.y,
    "bilevel, exact": solution(exact.x),
    "RidgeCV": RidgeCV(np.logspace(-3, 4, 50), fit_intercept=False).fit(*lower).coef_,
    "no penalty": np.linalg.lstsq(*lower)[0],
}
errors = {name: float(np.mean((test[0] @ y - test[1]) ** 2)) for name, y in ways.items()}
tell("Mean squared error on the test rows", errors, min)
print(f"relative error of the hypergradient: {hypergradient_error:.1e}")
print(f"outer loss at the start: {outer(start):.5f}")
print(f"outer loss after {result.summary['rounds']} rounds: {reached:.5f}")
print(f"outer loss at the exact minimum: {minimum:.5f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
records = result.history[1:]  # the first one is at y = 0
left.plot([r["rounds"] for r in records], [r["upper_loss"] for r in records], label="federated")
left.axhline(minimum, color="black", linestyle="--", label="exact minimum, by SciPy")
left.set(xlabel="communication rounds", ylabel="loss on the upper rows", title="The outer loss")
right.bar(np.arange(10) - 0.2, jax.nn.sigmoid(result.x), 0.4, label="federated")
right.bar(np.arange(10) + 0.2, jax.nn.sigmoid(exact.x), 0.4, color="black", label="exact")
right.set_xticks(np.arange(10), diabetes.feature_names)
right.set(title="The penalty of each feature", ylim=(0, 1))
for axes in (left, right):
    axes.legend(frameon=False)
figure.savefig(out / "ridge.png", dpi=90)
