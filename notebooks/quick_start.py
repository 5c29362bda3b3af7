# %% [markdown]
# # Quick start
#
# A run, its curve, and what it cost. One hundred clients hold scikit-learn's 1,797 images of digits, each those
# of few digits. The body of a network is the upper variable x, its head the lower variable y. Ten clients work
# in each outer iteration.

# %%
import matplotlib.pyplot as plt

import fedbilevel as fb

spec = fb.load_spec("demo", {"data.name": "digits", "stop.rounds": 150})
result = fb.run(spec, "runs/notebook-quick-start", overwrite=True)
print(f"best accuracy {result.summary['accuracy']['best']:.1%} after {result.summary['rounds']} rounds")

# %% [markdown]
# The history has a line for each evaluation, and the ledger the rounds and bytes of each kind of round.

# %%
figure, (curve, bars) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
curve.plot([line["rounds"] for line in result.history], [line["test_accuracy"] for line in result.history])
curve.set(xlabel="communication rounds", ylabel="test accuracy", title="what it learns")
ledger = result.summary["ledger"]
bars.barh(list(ledger), [step["bytes_up"] / 1e6 for step in ledger.values()], color="C1")
bars.set(xlabel="megabytes that clients sent", title="what it costs")
bars.invert_yaxis()
plt.show()

# %% [markdown]
# One outer iteration took `2N+3` rounds, which is five here. Nobody wrote that number down: it comes out of the
# ledger.

# %%
per_iteration = result.summary["rounds"] / result.summary["iterations"]
print(f"{per_iteration:g} rounds per outer iteration")
assert per_iteration == 2 * spec.algorithm.N + 3 == 5
