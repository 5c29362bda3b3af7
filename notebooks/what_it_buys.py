# %% [markdown]
# # What a hypergradient buys
#
# A penalty that is tuned on a grid is a bilevel problem that is solved by trying. One number can be tried. With
# one penalty for each of 30 features a grid is out of reach, and a gradient of the validation loss with respect
# to all penalties is what is left. Five clients have 20 training and 40 validation rows each, and 25 of the 30
# features do not matter.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb

rng = np.random.default_rng(1)
truth = np.r_[rng.normal(size=5) * 2, np.zeros(25)]


def rows(count):
    a = rng.normal(size=(count, 30))
    return a, a @ truth + 3 * rng.normal(size=count)


parts = [(rows(20), rows(40)) for _ in range(5)]
clients, test = fb.clients_from(parts), fb.Part(*rows(2000))


def error(y, b):
    return b.mean((b.inputs @ y - b.targets) ** 2)


problem = fb.Problem(
    x=jnp.full(30, -2.0),
    y=jnp.zeros(30),
    lower=lambda x, y, b: error(y, b) + jnp.sum(jnp.exp(x) * y**2),
    upper=lambda x, y, b: error(y, b),
    feasible_x=fb.Box(-6.0, 4.0),
    metrics=lambda x, y, b: {"test_error": error(y, b)},
)

# %% [markdown]
# The controls, solved exactly. The first is one penalty for all features, the best of a grid of 25 on the
# validation rows. The second may train on the validation rows as well, three times as many rows, and is even given
# the penalty that is best on the test rows.


# %%
def stacked(part):
    return np.concatenate([p[part][0] for p in parts]), np.concatenate([p[part][1] for p in parts])


def solved(penalty, a, b):
    return np.linalg.solve(a.T @ a / len(a) + penalty * np.eye(30), a.T @ b / len(a))


def mean_error(y, a, b):
    return float(np.mean((a @ y - b) ** 2))


grid = np.logspace(-3, 1, 25)
train, valid = stacked(0), stacked(1)
both = np.concatenate([train[0], valid[0]]), np.concatenate([train[1], valid[1]])
chosen = min(grid, key=lambda g: mean_error(solved(g, *train), *valid))
control = mean_error(solved(chosen, *train), test.inputs, test.targets)
generous = min(mean_error(solved(g, *both), test.inputs, test.targets) for g in grid)
floor = mean_error(truth, test.inputs, test.targets)  # the noise alone
print(f"one penalty: {control:.2f}; with all rows: {generous:.2f}; the noise alone: {floor:.2f}")

# %% [markdown]
# The hypergradient moves all 30 penalties at once. A first-order method cannot move them at all: the validation
# loss does not contain x, so without the implicit part its derivative is zero.

# %%
method = fb.AggITD(alpha="auto", beta="auto", estimator="cg", memory=20, N=10, participation=1.0)
result = fb.train(problem, clients, method, stop={"iterations": 25}, test=test)
blind = fb.FedAvg(control="first-order", alpha=1.0, beta=0.05, participation=1.0)
still = fb.train(problem, clients, blind, stop={"rounds": 300}, test=test)
assert np.array_equal(still.x, problem.x), "nothing moves x"

# %%
figure, (curve, bars) = plt.subplots(1, 2, figsize=(9.5, 3.3), layout="constrained")
history = result.history
curve.plot([line["rounds"] for line in history], [line["test_error"] for line in history], label="30 penalties")
curve.axhline(control, color="0.5", linestyle="--", label="one penalty, best of 25")
curve.axhline(generous, color="0.5", linestyle=":", label="one penalty, trained on all rows")
curve.axhline(floor, color="0.8", label="the noise alone")
curve.set(xlabel="communication rounds", ylabel="test error", ylim=(8, None))
curve.legend(fontsize=8)
matters = truth != 0
bars.bar(range(30), np.asarray(result.x), color=np.where(matters, "C0", "C3"))
bars.set(xlabel="feature (blue: matters)", ylabel="log of its penalty", title="what it found")
plt.show()

# %%
print(f"test error: {history[-1]['test_error']:.2f} with 30 penalties, {control:.2f} and {generous:.2f} with one")
assert history[-1]["test_error"] < generous < control
assert np.asarray(result.x)[matters].mean() < np.asarray(result.x)[~matters].mean() - 1
