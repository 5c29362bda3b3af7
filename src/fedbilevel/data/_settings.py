"""The `data` section of a run's spec."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from ..errors import SettingsError, UnknownName
from ..names import PYTHON
from ..settings import Count, Positive, about, settings
from ._cache import fetch
from ._catalogue import DATASETS, Entry, find
from ._clients import Clients
from ._dataset import Dataset, normalised_by_half
from ._loading import load, load_function
from ._partition import KINDS, Drawn, Partition, PartitionedClients, drawn_clients, own_tests, partition

GENERATED = "generated"


@settings
class DataSettings:
    """Which data are used, and how they are split across clients."""

    name: Annotated[
        str,
        about(
            "mnist, fashion-mnist, cifar10, digits (embedded), or one that an installed package adds; "
            "python: data.function makes it; generated: the problem makes its own"
        ),
    ] = "mnist"
    function: Annotated[str | None, about("python: the function that returns a Dataset, as module:function")] = (
        None
    )
    clients: Annotated[Count, about("registered clients")] = 100
    partition: Annotated[
        str,
        about(
            "iid, shards (by label, as in the paper), classes (a few for each client), dirichlet; or drawn, for "
            "any number of clients"
        ),
    ] = "shards"
    alpha: Annotated[Positive, about("dirichlet, drawn: a smaller alpha makes clients less alike")] = 0.5
    shards_per_client: Annotated[Count, about("shards: how many shards a client gets")] = 2
    classes_per_client: Annotated[Count, about("classes: how many classes a client has")] = 2
    rows_per_client: Annotated[int, Field(ge=2), about("drawn: how many rows a client draws from the table")] = 100
    train_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        about("share of a client's rows for the lower loss; default: 0.5 for iid, else 0.8"),
    ] = None
    parts: Annotated[
        Literal["apart", "same"],
        about("apart: a row is for the lower or for the upper loss; same: both losses have all rows of a client"),
    ] = "apart"
    normalisation: Annotated[
        Literal["usual", "half"],
        about("pixels by the mean and deviation of the data set, or (half) by 0.5 and 0.5 in every channel"),
    ] = "usual"

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, fetched if necessary. It is loaded only once, so that a function is not called again."""
        self.check()
        if self.name == PYTHON and self.function is not None:
            made = load_function(self.function)
        else:
            made = load(self.name)
        return made if self.normalisation == "usual" else normalised_by_half(made)

    @property
    def classes(self) -> int:
        """The number of classes. An entry of the table has it; for a function the data set is loaded."""
        if self.name != PYTHON and isinstance(found := find(self.name), Entry):
            return found.classes
        return self.dataset.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image. An entry of the table has it; for a function the data set is loaded."""
        if self.name != PYTHON and isinstance(found := find(self.name), Entry):
            return found.shape
        return self.dataset.shape

    def fetch(self) -> None:
        """Put the files of the data set into the cache, if it has files that are not there."""
        if self.name not in (GENERATED, PYTHON):
            fetch(self.name)

    def split(self, seed: int) -> tuple[Dataset, Partition | Drawn]:
        """The data set, and which rows go to which client."""
        parts = partition(
            self.partition,
            self.dataset.train_targets,
            self.clients,
            seed=seed,
            alpha=self.alpha,
            shards_per_client=self.shards_per_client,
            rows_per_client=self.rows_per_client,
            classes_per_client=self.classes_per_client,
            train_share=self.train_share,
        )
        if self.parts == "same":
            if isinstance(parts, Drawn):
                raise SettingsError(
                    "data.parts = 'same' is wrong: clients of the partition drawn have rows apart; use another one"
                )
            parts = parts.joined()
        return self.dataset, parts

    def load(self, seed: int, own_test: bool = False) -> tuple[Dataset, Clients]:
        """The data set and its clients. With `own_test` every client has test rows with labels like its own."""
        dataset, parts = self.split(seed)
        if isinstance(parts, Drawn):
            if own_test:
                raise SettingsError(
                    "data.partition = 'drawn' is wrong: its clients have no test rows of their own; use classes, "
                    "shards, dirichlet or iid"
                )
            return dataset, drawn_clients(dataset, parts)
        if not own_test:
            return dataset, PartitionedClients(dataset, parts)
        labels = [dataset.train_targets[parts.rows(client)] for client in range(parts.clients)]
        return dataset, PartitionedClients(dataset, parts, own_tests(dataset.test_targets, labels, seed))

    def check(self) -> None:
        """Raise if a name is not known, or if the name and the function do not go together."""
        if self.name == PYTHON:
            if self.function is None:
                raise SettingsError(
                    "data.function is missing, and data.name is 'python'; "
                    "set it to module:function, as in my_data:load"
                )
        elif self.name != GENERATED:
            if self.name not in DATASETS:
                raise UnknownName("data.name =", self.name, [*DATASETS, GENERATED, PYTHON])
            if self.function is not None:
                raise SettingsError(
                    f"data.function = {self.function!r} is wrong: data.name is {self.name!r}; "
                    "set data.name to 'python', or remove the function"
                )
        if self.partition not in KINDS:
            raise UnknownName("data.partition =", self.partition, KINDS)
