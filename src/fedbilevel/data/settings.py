"""The `data` section of a run's spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..errors import UnknownName
from ..settings import Count, Positive, about, settings
from .catalogue import DATASETS
from .clients import Clients
from .dataset import Dataset
from .loading import load
from .partition import KINDS, Drawn, Partition, PartitionedClients, drawn_clients, partition

GENERATED = "generated"


@settings
class DataSettings:
    """Which data, and how they are split across clients."""

    name: Annotated[
        str,
        about("mnist, fashion-mnist, cifar10, or digits (embedded); generated: the problem makes its own"),
    ] = "mnist"
    clients: Annotated[Count, about("registered clients")] = 100
    partition: Annotated[
        str, about("iid, shards (by label, as in the paper), dirichlet; or drawn, for any number of clients")
    ] = "shards"
    alpha: Annotated[Positive, about("dirichlet, drawn: the smaller, the less alike the clients")] = 0.5
    shards_per_client: Annotated[Count, about("shards: how many a client gets")] = 2
    rows_per_client: Annotated[int, Field(ge=2), about("drawn: how many rows a client draws from the table")] = 100
    train_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        about("share of a client's rows for the lower loss; default: 0.5 for iid, else 0.8"),
    ] = None

    def split(self, seed: int) -> tuple[Dataset, Partition | Drawn]:
        """The data set, fetched if need be, and which rows go to which client."""
        dataset = load(self.name)
        parts = partition(
            self.partition,
            dataset.train_targets,
            self.clients,
            seed=seed,
            alpha=self.alpha,
            shards_per_client=self.shards_per_client,
            rows_per_client=self.rows_per_client,
            train_share=self.train_share,
        )
        return dataset, parts

    def load(self, seed: int) -> tuple[Dataset, Clients]:
        """The data set and its clients."""
        dataset, parts = self.split(seed)
        if isinstance(parts, Drawn):
            return dataset, drawn_clients(dataset, parts)
        return dataset, PartitionedClients(dataset, parts)

    def check(self) -> None:
        """Raise if a name is not known."""
        if self.name != GENERATED and self.name not in DATASETS:
            raise UnknownName("data.name =", self.name, [*DATASETS, GENERATED])
        if self.partition not in KINDS:
            raise UnknownName("data.partition =", self.partition, KINDS)
