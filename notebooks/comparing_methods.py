# %% [markdown]
# # Comparing methods
#
# A quadratic problem has closed forms for everything, so the norm of the true hypergradient can be drawn. Ten
# clients differ from each other. Every method has 200 rounds; two find their own step sizes, the others have
# untuned ones, so this is no ranking. The leaderboard tunes all methods alike.

# %%
import matplotlib.pyplot as plt

import fedbilevel as fb

task = fb.Quadratic(size_x=5, size_y=5, heterogeneity=1.0).make(10, seed=0)
everybody = dict(participation=1.0)
methods = {
    "FedSOBA, steps found": fb.FedSOBA(alpha="auto", beta="auto", **everybody),
    "FBO-AggITD, conjugate gradients": fb.AggITD(N=5, estimator="cg", alpha="auto", beta="auto", **everybody),
    "SimFBO, five local steps": fb.SimFBO(alpha=0.1, beta=0.1, tau=5, **everybody),
    "control: first-order": fb.FedAvg(control="first-order", alpha=0.1, beta=0.1, **everybody),
}
results = {
    name: fb.train(
        task.problem,
        task.clients,
        method,
        stop={"rounds": 200},
        measure=task.measure,
        closed=task,
        engine="auto",
    )
    for name, method in methods.items()
}

# %% [markdown]
# Rounds and bytes are different currencies, so both are drawn.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True, layout="constrained")
for name, result in results.items():
    norms = [line["hypergradient_norm"] for line in result.history]
    axes[0].semilogy([line["rounds"] for line in result.history], norms, label=name)
    axes[1].semilogy([line["bytes_up"] / 1000 for line in result.history], norms)
axes[0].set(xlabel="communication rounds", ylabel="norm of the true hypergradient")
axes[1].set(xlabel="kilobytes that clients sent")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Each method tells where it would end with full batches, in closed form. What leaves out the implicit part ends
# elsewhere, with any number of rounds; local steps end at a floor.

# %%
for name, result in results.items():
    print(f"{name}: {result.summary['floor']}")
last = {name: result.history[-1]["hypergradient_norm"] for name, result in results.items()}
assert last["FedSOBA, steps found"] < 1e-5 and last["control: first-order"] > 1
assert 0.03 < last["SimFBO, five local steps"] < 0.04
