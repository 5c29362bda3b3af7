"""A federation of three tables, read from CSV files.

Each hospital has a folder with `rows.csv` and `site.toml`, which names the columns and says that the last half of
the rows is for the upper loss. Here the rows of all hospitals are read into one process. From the same two files
`fedbilevel site site.toml --kit KIT` starts a hospital of a real federation. The problem is in hospitals.py.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import fedbilevel as fb
from hospitals import COLUMNS, HOSPITALS, IDLE, make, penalties, read, standard, write_tables
from showing import bars, folder, tell, together

out = folder("tabular")
write_tables(out)
task = make(out)
test = fb.Part(*together(read(out, "test").parts.values()))
steps = dict(alpha=100.0, beta=0.5, lam=0.5, lower_steps=5, batch_zeta_local="full")
method = fb.AggITD(N=15, estimator="summed", participation=1.0, **steps)
result = fb.train(task.problem, task.clients, method, stop={"iterations": 25}, evaluate={"every": 5}, test=test)
found = penalties(result.x)


# Beside it: one penalty for all columns, the best of five for the test rows.
def error(rows, columns):
    inputs, targets = rows
    models = [LogisticRegression(C=C, max_iter=2000) for C in (0.03, 0.1, 0.3, 1, 3)]
    fitted = [model.fit(standard(inputs)[:, columns], targets) for model in models]
    return min(log_loss(test.targets, m.predict_proba(standard(test.inputs)[:, columns])) for m in fitted)


tables = [together(read(out, name).parts.values()) for name in HOSPITALS]
every, useful = np.arange(len(COLUMNS)), np.flatnonzero(~np.isin(COLUMNS, IDLE))
errors = {
    "bilevel, three hospitals": float(result.history[-1]["test_loss"]),
    "tables in one place, useful columns": error(together(tables), useful),
    "tables in one place, all columns": error(together(tables), every),
    **{f"{name} alone": error(table, every) for name, table in zip(HOSPITALS, tables, strict=True)},
}
tell("Logistic loss on other patients", errors, min)
print("largest penalties:", *np.array(COLUMNS)[np.argsort(-found)][:6], sep="  ")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.barh(useful, found[useful], color="tab:blue", label="a measurement")
left.barh(every[-len(IDLE) :], found[-len(IDLE) :], color="tab:red", label="says nothing about a patient")
left.set_yticks(every, COLUMNS)
left.invert_yaxis()
left.set(title="The penalty of each column")
left.legend(frameon=False)
bars(right, "Loss on other patients", errors, "{:.3f}")
figure.savefig(out / "tabular.png", dpi=90)
