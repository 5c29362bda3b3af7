"""A residual network of PyTorch on digits: its convolutions are the upper variable, and its head is the lower one.

The clients are those of network.py: ten with rows of three digits each, of scikit-learn's 8 x 8 images. The
losses are written as for any PyTorch model; the algorithm is the library's own, and the result is two modules.
Beside it are plain federated training of the same network on the same rows, the same at one place, and the head
alone. Needs `pip install 'fedbilevel[torch]'`; takes about a minute.
"""

import copy

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import fedbilevel as fb
from fedbilevel.torch import TorchProblem
from showing import bars, folder, tell

out = folder("torch_network")
CLIENTS, ROWS, DECAY, ROUNDS = 10, 80, 0.01, 60

pixels, labels = load_digits(return_X_y=True)
rows = TensorDataset(
    torch.tensor(pixels / 16 - 0.3, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
)
free, parts, draw = np.arange(len(labels)), [], np.random.default_rng(0)
draw.shuffle(free)
for client in range(CLIENTS):
    own = free[np.isin(labels[free], [client, (client + 1) % 10, (client + 2) % 10])][:ROWS]
    free = free[~np.isin(free, own)]
    parts.append([Subset(rows, half) for half in np.split(own, 2)])
test = Subset(rows, free)


class Block(nn.Module):
    """Two convolutions around which the input is carried."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)  # a BatchNorm would mix rows, and is refused in train mode
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.second(F.silu(self.first(F.silu(self.norm(x)))))


torch.manual_seed(0)
body = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16), nn.MaxPool2d(2), nn.Flatten()
)
head = nn.Linear(64, 10)


def embed(body, images):
    return torch.tanh(body(images))


def upper(body, head, rows):
    return F.cross_entropy(head(rows.features), rows.targets)


def lower(body, head, rows):
    return upper(body, head, rows) + DECAY * sum((w**2).sum() for w in head.parameters())


def metrics(body, head, rows):
    return {"test_accuracy": (head(rows.features).argmax(1) == rows.targets).float().mean()}


problem = TorchProblem(body, head, lower, upper, embed=embed, metrics=metrics)


def train(method):
    """The result on all clients, with the accuracy on the rows that no client has."""
    return fb.train(
        problem, fb.clients_from(parts), method, test=test, stop={"rounds": ROUNDS}, evaluate={"every": 10}
    )


result = train(fb.FedSOBA(alpha=0.3, beta=0.5, participation=1.0))
together = [torch.cat(each) for each in zip(*(s[:] for pair in parts for s in pair), strict=True)]


def one_place(rate):
    """Plain PyTorch on all rows at one place, with as many steps as there are rounds."""
    network = nn.Sequential(copy.deepcopy(body), nn.Tanh(), copy.deepcopy(head))
    optimiser = torch.optim.SGD(network.parameters(), lr=rate)
    for _ in range(ROUNDS):
        optimiser.zero_grad()
        F.cross_entropy(network(together[0]), together[1]).backward()
        optimiser.step()
    return accuracy(network(test[:][0]))


def federated(rate, control):
    run = train(fb.FedAvg(control=control, alpha=rate, beta=rate, tau=1, participation=1.0))
    return run.history[-1]["test_accuracy"]


def accuracy(scores):
    return float((scores.argmax(1) == test[:][1]).float().mean())


RATES = (0.05, 0.2, 0.5)  # of every control, the best of three is shown
accuracies = {
    "bilevel, federated": accuracy(result.y(embed(result.x, test[:][0]))),
    "FedAvg of body and head": max(federated(rate, "joint") for rate in RATES),
    "the head alone": max(federated(rate, "lower-only") for rate in RATES),
    "PyTorch at one place": max(map(one_place, RATES)),
}
tell("accuracy on rows that no client has", accuracies)
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars(axes, f"Digits: accuracy after {ROUNDS} rounds or steps", accuracies)
figure.savefig(out / "torch_network.png", dpi=90)
