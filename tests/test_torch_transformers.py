"""A text classifier of Hugging Face, made from a config: its body or adapters as x, and its classifier as y."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedbilevel.torch import TorchProblem  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tiny() -> Any:
    """A BERT of two layers with three classes. Nothing is downloaded."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config).eval()


def rows(count: int, seed: int) -> tuple[Any, np.ndarray]:
    """Token ids with a mask, as a tokenizer gives them, and labels that depend on them."""
    ids = np.random.default_rng(seed).integers(1, 50, (count, 10))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}, ids[:, 0] % 3


def embed(body: Any, inputs: Any) -> Any:
    return body(**inputs).pooler_output


def upper(body: Any, head: Any, b: Any) -> Any:
    return F.cross_entropy(head(b.features), b.targets)


def lower(body: Any, head: Any, b: Any) -> Any:
    return upper(body, head, b) + 0.01 * sum((p**2).sum() for p in head.parameters())


def problem(model: Any) -> TorchProblem:
    return TorchProblem(model.bert, model.classifier, lower, upper, embed=embed)


@pytest.fixture(scope="module")
def clients() -> fb.ListedClients:
    return fb.clients_from([(rows(8, i), rows(7, 10 + i)) for i in range(2)])


@pytest.mark.slow
def test_the_derivatives_of_a_classifier_are_those_of_its_losses(clients: fb.ListedClients) -> None:
    report = fb.check(problem(tiny()), clients, client=0, directions=2)
    assert report.ok, str(report)


@pytest.mark.slow
def test_weights_of_a_folder_are_loaded_trained_and_saved_again(clients: fb.ListedClients, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "given")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "given", local_files_only=True)
    result = fb.train(
        problem(model.eval()), clients, fb.FedSOBA(alpha=0.1, beta=0.1, participation=1.0), stop={"iterations": 2}
    )
    model.bert, model.classifier = result.x, result.y
    model.save_pretrained(tmp_path / "trained")
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "trained", local_files_only=True)
    for a, b in zip(again.bert.parameters(), result.x.parameters(), strict=True):
        assert torch.equal(a, b)


class LoRA(nn.Module):  # type: ignore[misc]
    """A frozen layer plus a product of two thin matrices."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(2, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: Any) -> Any:
        return self.layer(x) + x @ self.down.T @ self.up.T


@pytest.mark.slow
def test_only_the_adapters_are_x_if_the_rest_is_frozen(clients: fb.ListedClients) -> None:
    model = tiny()
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = LoRA(layer.attention.self.query)
    made = problem(model)
    assert made.size_x == 2 * (2 * 16 + 16 * 2) and made.constants_digest is not None
    result = fb.train(made, clients, fb.FedSOBA(alpha=0.5, beta=0.5, participation=1.0), stop={"iterations": 2})
    queries = [module.encoder.layer[0].attention.self.query for module in (result.x, model.bert)]
    assert torch.equal(queries[0].layer.weight, queries[1].layer.weight)
    assert not torch.equal(queries[0].up, queries[1].up)
