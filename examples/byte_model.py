"""A transformer over bytes, and windows of bytes from packages of Python's library, for the two examples of text.

The task is to tell from 48 bytes of source code which package they come from. Nothing is downloaded.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn

SOURCES = ("encodings", "html", "asyncio", "email")
LENGTH, WIDTH = 48, 32


def windows(count, seed):
    """So many windows of each source, as an array of bytes, and the numbers of their sources."""
    draw, found, labels = np.random.default_rng(seed), [], []
    for label, name in enumerate(SOURCES):
        (folder,) = importlib.util.find_spec(name).submodule_search_locations
        text = np.frombuffer(b"".join(f.read_bytes() for f in sorted(Path(folder).glob("*.py"))), np.uint8)
        begin = draw.integers(0, len(text) - LENGTH, count)
        found.append(text[begin[:, None] + np.arange(LENGTH)])
        labels.append(np.full(count, label))
    order = draw.permutation(count * len(SOURCES))
    return np.concatenate(found)[order].astype(np.int64), np.concatenate(labels)[order]


class ByteTransformer(nn.Module):
    """From bytes to 32 numbers: two layers of attention, and a mean over the positions."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, text):
        return torch.tanh(self.layers(self.bytes(text) + self.places).mean(1))
