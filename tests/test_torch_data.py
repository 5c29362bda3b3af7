"""Rows from PyTorch: tensors, Datasets, Subsets and DataLoaders as the data of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedbilevel as fb

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset  # noqa: E402

INPUTS, LABELS = torch.arange(24.0).reshape(8, 3), torch.arange(8)


class Dicts(Dataset):  # type: ignore[misc]
    """Rows that are dicts with a label beside them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return {"a": INPUTS[i], "b": int(i)}, LABELS[i]


class Noisy(Dicts):
    """Rows with a random transform."""

    def __getitem__(self, i: int) -> Any:
        return torch.rand(3), LABELS[i]


class Endless(IterableDataset):  # type: ignore[misc]
    """Rows without numbers."""

    def __iter__(self) -> Any:
        yield INPUTS[0], LABELS[0]


class Ragged(Dicts):
    """Rows of different lengths."""

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(i + 1), LABELS[i]


def padded(batch: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True), torch.stack(
        [b for _, b in batch]
    )


WHOLE = TensorDataset(INPUTS, LABELS)
GIVEN: dict[str, Any] = {
    "tensors": (INPUTS, LABELS),
    "a TensorDataset": WHOLE,
    "a Subset": Subset(WHOLE, range(8)),
    "a DataLoader that shuffles": DataLoader(WHOLE, batch_size=3, shuffle=True, drop_last=True),
}


@pytest.mark.parametrize("name", GIVEN)
def test_rows_are_read_whole_and_in_their_order(name: str) -> None:
    part = fb.clients_from([(GIVEN[name], GIVEN[name])]).load(0).lower
    assert isinstance(part.inputs, np.ndarray)
    np.testing.assert_array_equal(part.inputs, INPUTS.numpy())
    np.testing.assert_array_equal(part.targets, LABELS.numpy())


def test_a_subset_has_its_own_rows_and_dicts_stay_dicts() -> None:
    part = fb.clients_from([(Subset(Dicts(), [5, 2]), Dicts())]).load(0).lower
    np.testing.assert_array_equal(part.inputs["a"], INPUTS[[5, 2]].numpy())
    np.testing.assert_array_equal(part.inputs["b"], [5, 2])
    np.testing.assert_array_equal(part.targets, [5, 2])


def test_rows_of_different_lengths_are_put_together_by_the_loaders_own_function() -> None:
    part = fb.clients_from([(DataLoader(Ragged(), collate_fn=padded, batch_size=2), WHOLE)]).load(0).lower
    assert part.inputs.shape == (8, 8)


WRONG: dict[str, tuple[Any, str]] = {
    "an IterableDataset": (Endless(), "client 0, lower: an IterableDataset, whose rows have no numbers"),
    "its loader": (DataLoader(Endless()), "an IterableDataset"),
    "augmentation": (Noisy(), "row 0 of the Noisy differs when it is read again; .*random transform"),
    "ragged rows": (Ragged(), "the rows of the Ragged cannot be put together: .*collate_fn"),
    "bfloat16": (
        (INPUTS.bfloat16(), LABELS),
        r"a tensor of torch.bfloat16, which NumPy does not have; call \.float",
    ),
    "a sampler": (
        DataLoader(WHOLE, sampler=torch.utils.data.SubsetRandomSampler([1, 2])),
        "a DataLoader with a SubsetRandomSampler; give a Subset",
    ),
    "no rows": (Subset(WHOLE, []), "a Subset without rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_refused_by_its_name(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(fb.SettingsError, match=message):
        fb.clients_from([(given, WHOLE)])
