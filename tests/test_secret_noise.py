"""Attacks on the noise of privacy: by those who know the spec, the run folder and all messages of a run.

Each attack succeeded to about 1e-6 when noise was a function of the seed, the round and the field.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fakes import Watching
from fedbilevel import rng
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import ListedClients
from fedbilevel.engines import Call, Engine, Replies
from fedbilevel.engines.flare import Flare, Site, unpack
from fedbilevel.engines.flare.server import Delivery
from fedbilevel.privacy import Books, CohortUploads, Entry, Secret, machine_secret
from fedbilevel.privacy._secret import standard_normal
from fedbilevel.problems import QuadraticTask
from fedbilevel.steps import present

SIGMA, CLIP, SEED, CLIENTS = 4.0, 0.5, 7, 5
PRIVACY = {"mode": "central", "noise": SIGMA, "clip": CLIP}
METHOD = fb.LFedNest(lower_epochs=1, alpha=0.01, beta=0.01, participation=1.0)


class Listening(Watching):
    """Also keeps the contributions of each call, which only their clients know."""

    def __init__(self, engine: Engine, absent: int | None = None) -> None:
        super().__init__(engine)
        self.given: list[dict[str, np.ndarray]] = []
        self._absent = absent

    def replies(self, call: Call) -> Iterator[Replies]:
        for replies in super().replies(call):
            keep = [i for i, client in enumerate(replies.clients) if client != self._absent]
            before = {name: np.asarray(value) for name, value in call.before.items()}
            rows = {n: np.asarray(getattr(replies.reply, n))[keep] for n in present(replies.reply)}
            self.given.append({n: a - before.get(n, 0.0) for n, a in rows.items()})
            reply = replies.reply._replace(**{n: jnp.asarray(a) for n, a in rows.items()})
            yield dataclasses.replace(replies, clients=tuple(replies.clients[i] for i in keep), reply=reply)


def listened(task: QuadraticTask, absent: int | None = None, **more: Any) -> Listening:
    """A private run, and what a hostile client of it and the others have seen and sent."""
    clients = ListedClients(task.clients.data[:CLIENTS])
    engine = Listening(fb.Simulation(task.problem, clients, devices=1), absent)
    options: dict[str, Any] = {"stop": {"iterations": 2}, "privacy": PRIVACY, "seed": SEED, **more}
    fb.train(task.problem, clients, METHOD, engine=engine, **options)
    return engine


def clipped(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows * np.minimum(1, CLIP / norms))


def released(engine: Listening) -> np.ndarray:
    """The q that the first round released: the server sends it to every client with the second round."""
    return np.asarray(engine.calls[1].arrays["q"])


def test_who_knows_the_seed_cannot_take_the_noise_away(quadratic: QuadraticTask) -> None:
    engine = listened(quadratic)
    truth = clipped(engine.given[0]["q"]).sum(0)
    guess = SIGMA * CLIP * rng.generator(SEED, "privacy", 0, "q").standard_normal(truth.shape, np.float32)
    found = CLIENTS * released(engine) - guess
    assert np.abs(found - truth).max() > 0.1 * SIGMA * CLIP


def test_two_runs_with_one_seed_do_not_show_the_client_that_only_one_of_them_has(
    quadratic: QuadraticTask,
) -> None:
    whole, without = listened(quadratic), listened(quadratic, absent=2)
    difference = CLIENTS * (released(whole) - released(without))
    assert np.abs(difference - clipped(whole.given[0]["q"])[2]).max() > 0.1 * SIGMA * CLIP


def test_a_round_that_is_repeated_with_fewer_clients_has_other_noise(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    """A job that failed goes on from its checkpoint with the sites that are left."""
    out = tmp_path / "run"
    stopped: dict[str, Any] = {"out": out, "evaluate": {"checkpoint_every": 1}}
    whole = listened(quadratic, stop={"iterations": 1}, **stopped)
    first = released(whole)
    for name in ("checkpoint.safetensors", "checkpoint.1.safetensors", "checkpoint.2.safetensors"):
        (out / name).unlink(missing_ok=True)  # the server died before it could save
    without = listened(quadratic, absent=2, stop={"iterations": 1}, resume=True, **stopped)
    difference = CLIENTS * (first - released(without))
    assert np.abs(difference - clipped(whole.given[0]["q"])[2]).max() > 0.1 * SIGMA * CLIP


@pytest.mark.slow
def test_epsilon_never_falls_when_a_run_goes_back_to_an_older_checkpoint(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    often: dict[str, Any] = {"out": out, "evaluate": {"checkpoint_every": 100}}

    class Stop(Exception):
        pass

    def die(progress: fb.Progress) -> None:
        if progress.iteration == 3:
            raise Stop

    with pytest.raises(Stop):
        listened(quadratic, stop={"iterations": 5}, observers=[die], **often)
    spent = [json.loads(line)["epsilon"] for line in (out / "history.jsonl").read_text().splitlines()]
    seen: list[float] = []
    listened(
        quadratic,
        absent=2,
        stop={"iterations": 1},
        resume=True,
        observers=[lambda progress: seen.append(progress.record["epsilon"])],
        **often,
    )
    assert seen[0] > spent[-1] > 0, "the first three iterations were released, and then another one"


@pytest.mark.slow
def test_a_job_with_an_older_folder_counts_what_the_server_has_released(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    """The folder is pulled from the server now and then. When the server dies, the last releases are not in it."""
    out, older, books = tmp_path / "run", tmp_path / "older", tmp_path / "server" / "books.jsonl"
    spent: list[float] = []

    def pull(progress: fb.Progress) -> None:
        spent.append(progress.record["epsilon"])
        if progress.iteration == 1:
            shutil.copytree(out, older)

    options: dict[str, Any] = {"books": [books], "evaluate": {"checkpoint_every": 1}}
    listened(quadratic, stop={"iterations": 3}, out=out, observers=[pull], **options)
    assert spent == sorted(spent)
    stop = {"iterations": 2}
    listened(quadratic, absent=2, stop=stop, out=older, resume=True, observers=[pull], **options)
    assert spent[3] > spent[2], "three iterations were released, and then another one"
    assert (older / "privacy.jsonl").read_bytes() == books.read_bytes()


@pytest.mark.slow
def test_who_knows_the_seed_cannot_guess_the_cohorts(quadratic: QuadraticTask) -> None:
    """Amplification by sampling holds only against those who do not know who was asked."""
    count, rounds, size = quadratic.clients.count, 20, 5
    method = dataclasses.replace(METHOD, participation=size)
    engine = Watching(fb.Simulation(quadratic.problem, quadratic.clients, devices=1))
    stop = {"iterations": rounds}
    fb.train(quadratic.problem, quadratic.clients, method, engine=engine, stop=stop, privacy=PRIVACY, seed=SEED)
    asked = {call.address.place: call.clients for call in engine.calls}
    drawn = [place for place, call in enumerate(engine.calls) if call.step.name == "lower_gradient"]
    guess = {p: rng.generator(SEED, "cohort", p).choice(count, size, replace=False) for p in drawn}
    assert len(drawn) == rounds
    assert not any(tuple(sorted(guess[place])) == asked[place] for place in drawn)


def test_a_measurement_of_clients_is_refused_in_a_private_federation(quadratic: QuadraticTask) -> None:
    @fb.settings
    class Curious:
        """Looks at the clients' gradients without noise."""

        needs_server: ClassVar[bool] = True

        def init(self, problem: Any, clients: int) -> Any:
            return fb.LFedNest().init(problem, clients)

        def step(self, fed: fb.Federation, state: Any) -> Any:
            fed.hold(x=state.x, y=state.y)
            fed.probe(lower_gradient, zeta=fb.Sample("lower"))
            return state

    for mode in ("central", "local"):
        with pytest.raises(fb.SettingsError, match="lower_gradient is a measurement of clients"):
            fb.train(
                quadratic.problem,
                quadratic.clients,
                Curious(),
                stop={"iterations": 1},
                privacy=PRIVACY | {"mode": mode},
            )


class Post:
    """Sites in this process, and all messages on their way."""

    def __init__(self, task: QuadraticTask) -> None:
        self.sites = {f"site-{i}": Site(task.problem, task.clients.data[i]) for i in range(3)}
        self.messages: list[bytes] = []

    def __call__(self, requests: Any, timeout: float, /) -> Delivery:
        replies = {name: self.sites[name].answer(request) for name, request in requests.items()}
        self.messages += [*requests.values(), *replies.values()]
        return Delivery(replies, {})


def test_a_site_is_given_keys_of_its_own_draws_and_neither_the_seed_nor_the_secret(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    """And neither has the run folder, nor what is written about the run."""
    secret, seed = Secret(bytes(range(1, 33))), 987654321
    post = Post(quadratic)
    engine = Flare(quadratic.problem, list(post.sites), post)
    clients = ListedClients(quadratic.clients.data[:3])
    options: dict[str, Any] = {"engine": engine, "stop": {"iterations": 2}, "privacy": PRIVACY, "seed": seed}
    fb.train(quadratic.problem, clients, METHOD, out=tmp_path / "run", secret=secret, **options)
    headers = [unpack(message).header for message in post.messages]
    steps = [header for header in headers if header["kind"] == "step"]
    assert any(header["keys"] for header in steps)
    known = {key for header in steps for key in header["keys"].values()}
    searched = {
        rng.key(seed, "round", place, name, client).hex()
        for place in range(10)
        for name in {name for header in steps for name in header["keys"]}
        for client in range(3)
    }
    assert not known & searched, "the keys are not those of the seed, which can be searched"
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    for raw in (secret.key, secret.root(seed)):
        for written in (raw, raw.hex().encode(), base64.b64encode(raw)):
            assert not any(written in content for content in [*post.messages, *files])
    assert not any(str(seed).encode() in message for message in post.messages)


def test_the_samples_of_a_public_run_are_the_same_at_sites_and_in_a_simulation(
    quadratic: QuadraticTask,
) -> None:
    post, clients = Post(quadratic), ListedClients(quadratic.clients.data[:3])
    options: dict[str, Any] = {"stop": {"iterations": 2}, "seed": SEED}
    method = dataclasses.replace(METHOD, batch_zeta=2, batch_zeta_local=1)
    engine = Flare(quadratic.problem, list(post.sites), post)
    there = fb.train(quadratic.problem, clients, method, engine=engine, **options)
    here = fb.train(quadratic.problem, clients, method, engine="loop", **options)
    np.testing.assert_array_equal(there.x, here.x)


# ---------------------------------------------------------------------------------------- the secret and the books


def test_noise_is_standard_normal_and_the_same_for_the_same_key() -> None:
    a, b = (standard_normal(key, (300, 701)) for key in (b"one", b"two"))
    np.testing.assert_array_equal(a, standard_normal(b"one", (300, 701)))
    sorted_, n = np.sort(a.ravel()), a.size
    expected = np.asarray([NormalDist().cdf(float(value)) for value in sorted_[:: n // 1000]])
    distance = np.abs(expected - np.arange(n)[:: n // 1000] / n).max()
    assert distance < 1.95 / np.sqrt(n), "the test of Kolmogorov and Smirnov, at a level of 0.001"
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(a.ravel()[1:], a.ravel()[:-1])[0, 1]) < 4 / np.sqrt(n)
    assert standard_normal(b"", ()).shape == () and standard_normal(b"", (0,)).size == 0


def test_the_secret_of_a_machine_is_made_once_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBILEVEL_STATE", str(tmp_path / "state"))
    first = machine_secret()
    assert machine_secret() == first and repr(first) == "Secret()"
    (file,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first.of_run("a").key != first.of_run("b").key != first.key
    file.chmod(0o640)
    with pytest.raises(fb.SettingsError, match=r"noise.key is a secret that others can read: its mode is 640"):
        machine_secret()
    file.chmod(0o600)
    file.write_text("00" * 31)
    with pytest.raises(fb.SettingsError, match=r"noise.key is not a secret of 256 bits"):
        machine_secret()


ENTRIES = [Entry(0, 4, (), 3, "a"), Entry(0, 4, (), 2, "b"), Entry(5, 4, (), 3, "c")]


def test_books_are_continued_and_a_repetition_is_booked_once(tmp_path: Path) -> None:
    file = tmp_path / "privacy.jsonl"
    books = Books([file])
    for entry in (*ENTRIES[:2], ENTRIES[1]):
        books.book(entry)
    again = Books([file])
    assert again.name == books.name and again.cohorts == {CohortUploads(4, 5): 1}
    for entry in ENTRIES:
        again.book(entry)
    assert again.cohorts == {CohortUploads(4, 5): 1, CohortUploads(4, 3): 1}
    with file.open("a") as stream:
        stream.write('{"drawn": 9, "coh')  # the power failed: nothing was released
    assert Books([file]).cohorts == again.cohorts


def test_books_of_another_process_are_the_same(tmp_path: Path) -> None:
    first = Books([tmp_path / "privacy.jsonl"], "run")
    for entry in ENTRIES:
        first.book(entry)
    other = Books(name="run", lines=json.loads(json.dumps(first.lines)))
    assert other.cohorts == first.cohorts
    other.book(ENTRIES[0])
    assert other.lines == Books([tmp_path / "privacy.jsonl"]).lines


def test_books_in_two_places_complete_each_other(tmp_path: Path) -> None:
    """A server keeps its own books, because the folder that it is sent with a job may be older."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    first = Books([one], "run")
    first.book(ENTRIES[0])
    second = Books([two], "run")
    for entry in ENTRIES:
        second.book(entry)
    both = Books([one, two])
    assert both.cohorts == second.cohorts == Books([one]).cohorts
    Books([tmp_path / "three.jsonl"], "another")
    with pytest.raises(fb.SettingsError, match="the books of different runs"):
        Books([one, tmp_path / "three.jsonl"])


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}\n", "[]\n", '{"run": "../x"}\n', '{"run": "a"}\n{}\n', '{"run": "a"}\n[1]\n', "\0\n"),
        '{"run": "a"}\n{"drawn": -1, "cohort": 1, "clients": [], "vectors": 1, "release": "a"}\n',
    ],
)
def test_damaged_books_are_named_and_not_taken_for_empty_ones(tmp_path: Path, content: str) -> None:
    file = tmp_path / "privacy.jsonl"
    file.write_text(content)
    with pytest.raises(fb.CheckpointError, match=r"privacy.jsonl is damaged .* it counts what was released"):
        Books([file])
    assert file.read_text() == content


def test_a_release_is_on_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books, synced = Books([tmp_path / "privacy.jsonl"]), list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    books.book(ENTRIES[0])
    assert len(synced) == 1
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(fb.StorageError, match="No space left on device; nothing was released"):
        books.book(ENTRIES[2])
    assert books.cohorts == {CohortUploads(4, 3): 1}
