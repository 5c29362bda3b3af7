"""Adapters (LoRA) of a frozen transformer that all clients share, and a head that belongs to each client.

A transformer over bytes was trained elsewhere on two sources, and is frozen. Clients have other sources and
name them as they like: the label that means "email" at one client means "html" at another, so that no single
head serves all. The shared x is a low-rank change of the transformer's layers, some thousand numbers, and only
it is sent; every client has a head y_i of its own, which stays there (`lower_is = "local"`). Beside it: the
same without the implicit part of the hypergradient (as FedRep trains), heads on the frozen transformer, and one
shared head. Needs `pip install 'fedbilevel[torch]'`; takes about two minutes.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedbilevel as fb
from byte_model import SOURCES, WIDTH, ByteTransformer, windows
from fedbilevel.torch import TorchProblem
from showing import bars, folder, tell

out = folder("torch_lora")
CLIENTS, RANK = 6, 4
torch.manual_seed(0)


class LoRA(nn.Module):
    """A linear layer that is frozen, plus a product of two thin matrices, which begins at zero."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


# The transformer from elsewhere: trained on the first two sources with a head of its own, and then frozen.
body, first = ByteTransformer(), nn.Linear(WIDTH, 2)
text, labels = windows(400, seed=5)
known = labels < 2
optimiser = torch.optim.Adam([*body.parameters(), *first.parameters()], lr=0.003)
for batch in torch.arange(known.sum()).repeat(6)[torch.randperm(6 * int(known.sum()))].split(64):
    optimiser.zero_grad()
    F.cross_entropy(first(body(torch.tensor(text[known])[batch])), torch.tensor(labels[known])[batch]).backward()
    optimiser.step()
body.requires_grad_(False)
for layer in body.layers.layers:
    layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)

# The clients: 60 lower, 60 upper and 100 test rows of all sources, with names of their own.
draw, parts = np.random.default_rng(0), []
for client in range(CLIENTS):
    names, (own, sources) = draw.permutation(len(SOURCES)), windows(55, seed=10 + client)
    cut = [slice(0, 60), slice(60, 120), slice(120, 220)]
    parts.append([(own[part], names[sources[part]]) for part in cut])


def upper(body, head, rows):
    return F.cross_entropy(head(rows.features), rows.targets)


def lower(body, head, rows):
    return upper(body, head, rows) + 0.01 * sum((w**2).sum() for w in head.parameters())


def metrics(body, head, rows):
    return {"test_accuracy": (head(rows.features).argmax(1) == rows.targets).float().mean()}


def accuracy(method, rounds, lower_is="local"):
    """The mean accuracy of the clients on their own test rows."""
    head = nn.Linear(WIDTH, len(SOURCES))
    nn.init.zeros_(head.weight)
    problem = TorchProblem(body, head, lower, upper, embed=lambda b, t: b(t), metrics=metrics, lower_is=lower_is)
    run = fb.train(
        problem, fb.clients_from(parts), method, stop={"rounds": rounds}, evaluate={"every": rounds // 2}
    )
    return run.history[-1]["test_accuracy"], problem


settings = dict(beta=0.3, tau=10, participation=1.0, upper={"name": "adam", "learning_rate": 0.01})
ours, problem = accuracy(fb.LocalLower(**settings), 60)
accuracies = {
    "LoRA and own heads": ours,
    "without the implicit part": accuracy(fb.LocalLower(implicit=False, **settings), 60)[0],
    "frozen, own heads": accuracy(fb.LocalLower(**settings | dict(upper=None, alpha=1e-9)), 60)[0],
    "LoRA and one head": accuracy(fb.FedSOBA(beta=0.3, participation=1.0, upper=settings["upper"]), 60, "global")[
        0
    ],
}
print(
    f"{problem.size_x:,} numbers are sent up and down in a round, of {sum(p.numel() for p in body.parameters()):,}"
)
tell("mean accuracy of clients on their own test rows", accuracies)
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars(axes, "Own names for four sources: accuracy", accuracies)
figure.savefig(out / "torch_lora.png", dpi=90)
