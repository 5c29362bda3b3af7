"""Data: what clients hold, the data sets, and how their rows are dealt to clients."""

from ._cache import cache_folder, fetch
from ._catalogue import DATASETS, Entry, files_of
from ._clients import (
    ClientData,
    Clients,
    ClientSize,
    LazyClients,
    ListedClients,
    Part,
    clients_from,
    lower_only,
    part_from,
    test_rows,
)
from ._dataset import Dataset
from ._describe import dataset_table, draw_labels, label_counts, label_table
from ._loading import load, load_function
from ._partition import KINDS, Drawn, Partition, PartitionedClients, drawn_clients, partition
from ._settings import GENERATED, DataSettings

__all__ = [
    "DATASETS",
    "GENERATED",
    "KINDS",
    "ClientData",
    "ClientSize",
    "Clients",
    "DataSettings",
    "Dataset",
    "Drawn",
    "Entry",
    "LazyClients",
    "ListedClients",
    "Part",
    "Partition",
    "PartitionedClients",
    "cache_folder",
    "clients_from",
    "dataset_table",
    "draw_labels",
    "drawn_clients",
    "fetch",
    "files_of",
    "label_counts",
    "label_table",
    "load",
    "load_function",
    "lower_only",
    "part_from",
    "partition",
    "test_rows",
]
