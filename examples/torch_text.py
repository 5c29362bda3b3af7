"""A transformer over bytes, as the upper variable of a federation of four sources of text.

Which package of Python's library do 48 bytes of source code come from? Four clients have windows of four
packages, and each has most of its rows from one of them. The transformer is x and a linear head is y: the head
is fitted to the lower rows, and the transformer serves the loss of the fitted head on the upper rows. Attention
in x needs first derivatives only. Beside it: FedAvg of the same network, the transformer as it began, and
counts of pairs of bytes. Needs `pip install 'fedbilevel[torch]'`; takes two minutes.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

import fedbilevel as fb
from byte_model import SOURCES, WIDTH, ByteTransformer, windows
from fedbilevel.torch import TorchProblem
from showing import bars, folder, tell, together

out = folder("torch_text")
ROUNDS = 100

# The data: a client has 120 lower and 120 upper rows, of which 70 % come from its own source.
text, labels = windows(400, seed=0)
places, draw, parts = [list(np.flatnonzero(labels == source)) for source in range(4)], np.random.default_rng(0), []
for client in range(4):
    counts = [168 if source == client else 24 for source in range(4)]
    own = draw.permutation([places[s].pop() for s, count in enumerate(counts) for _ in range(count)])
    parts.append([(text[half], labels[half]) for half in np.split(own, 2)])
test = windows(250, seed=1)

torch.manual_seed(0)
body, head = ByteTransformer(), nn.Linear(WIDTH, len(SOURCES))


def upper(body, head, rows):
    return F.cross_entropy(head(rows.features), rows.targets)


def lower(body, head, rows):
    return upper(body, head, rows) + 0.01 * sum((w**2).sum() for w in head.parameters())


def metrics(body, head, rows):
    return {"test_accuracy": (head(rows.features).argmax(1) == rows.targets).float().mean()}


problem = TorchProblem(body, head, lower, upper, embed=lambda body, text: body(text), metrics=metrics)


def train(method):
    """The accuracy on other windows after the rounds."""
    run = fb.train(
        problem, fb.clients_from(parts), method, test=test, stop={"rounds": ROUNDS}, evaluate={"every": 50}
    )
    return run.history[-1]["test_accuracy"]


adam = {"name": "adam", "learning_rate": 0.01}
accuracies = {
    "bilevel, federated": train(fb.FedSOBA(upper=adam, beta=0.5, participation=1.0, batch_zeta=32, batch_xi=32)),
    "FedAvg of both": max(
        train(fb.FedAvg(alpha=rate, beta=rate, tau=2, participation=1.0, batch_zeta=32, batch_xi=32))
        for rate in (0.2, 0.5)
    ),
    "the head alone": train(fb.FedAvg(control="lower-only", beta=0.5, tau=2, participation=1.0)),
}
rows, own = together([half for pair in parts for half in pair])
pairs = CountVectorizer(analyzer="char", ngram_range=(1, 2), lowercase=False)
counted = pairs.fit_transform([bytes(row.astype(np.uint8)).decode("latin-1") for row in rows])
others = pairs.transform([bytes(row.astype(np.uint8)).decode("latin-1") for row in test[0]])
accuracies["pairs of bytes, at one place"] = (
    LogisticRegression(C=0.1, max_iter=2000).fit(counted, own).score(others, test[1])
)
tell("accuracy on other windows (chance: 25 %)", accuracies)
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars(axes, "Which package are 48 bytes from?", accuracies)
figure.savefig(out / "torch_text.png", dpi=90)
