# %% [markdown]
# # A problem of your own: which clinics help?
#
# Ten clinics have 30 patients each. In three of them a device was wired the wrong way round, and nobody knows
# which. Every clinic has eight further patients whose records were checked by hand. A weight for each clinic is
# the upper variable x, a linear model the lower variable y. The tutorial *Your own problem* explains each line.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb

rng = np.random.default_rng(0)
truth, bad = rng.normal(size=12), (1, 4, 7)


def patients(clinic, rows, checked):
    a = rng.normal(size=(rows, 12))
    shown = -a if clinic in bad and not checked else a
    return {"a": shown, "clinic": np.full(rows, clinic)}, a @ truth + rng.normal(size=rows)


clients = fb.clients_from([(patients(i, 30, False), patients(i, 8, True)) for i in range(10)])

# %% [markdown]
# Two losses over two pytrees. `b.mean` leaves out padding. The last term of the upper loss trusts a clinic
# unless the checked rows speak against it.


# %%
def errors(y, b):
    return (b.inputs["a"] @ y - b.targets) ** 2


problem = fb.Problem(
    x=jnp.zeros(10),
    y=jnp.zeros(12),
    lower=lambda x, y, b: b.mean(jax.nn.sigmoid(x)[b.inputs["clinic"]] * errors(y, b)) + 0.01 * jnp.sum(y**2),
    upper=lambda x, y, b: b.mean(errors(y, b)) + 0.0005 * jnp.sum((x - 2) ** 2),
    feasible_x=fb.Box(-4.0, 4.0),
)
method = fb.AggITD(alpha="auto", beta="auto", estimator="cg", memory=20, N=10, participation=1.0)
result = fb.train(problem, clients, method, stop={"iterations": 10})
weights = np.asarray(jax.nn.sigmoid(result.x))

# %% [markdown]
# The controls: all clinics alike, the checked rows alone, and somebody who knows the three clinics.


# %%
def fit(parts):
    a = np.concatenate([part.inputs["a"] for part in parts])
    b = np.concatenate([part.targets for part in parts])
    return np.linalg.solve(a.T @ a / len(a) + 0.01 * np.eye(12), a.T @ b / len(a))


rows = [clients.load(i) for i in range(10)]
answers = {
    "all clinics alike": fit([r.lower for r in rows]),
    "checked rows alone": fit([r.upper for r in rows]),
    "a weight for each": np.asarray(result.y),
    "who knows them": fit([r.lower for i, r in enumerate(rows) if i not in bad]),
}
distance = {name: float(np.linalg.norm(y - truth)) for name, y in answers.items()}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.bar(range(10), weights, color=["C3" if i in bad else "C0" for i in range(10)])
left.set(xlabel="clinic (red: wired the wrong way round)", ylabel="weight", title="who helps, and who harms")
right.barh(list(distance), list(distance.values()), color=["0.7", "0.7", "C0", "0.4"])
right.set(xlabel="distance of the coefficients from the truth", title="what it buys")
right.invert_yaxis()
plt.show()

# %%
print({name: round(value, 3) for name, value in distance.items()})
assert set(np.argsort(weights)[:3]) == set(bad)
assert distance["a weight for each"] < distance["checked rows alone"] < distance["all clinics alike"]
