"""Attacks on the noise of privacy: by those who know the spec, the run folder and all messages of a run.

Each attack succeeded to about 1e-6 when noise was a function of the seed, the round and the field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fakes import Watching
from fedbilevel import rng
from fedbilevel.data import ListedClients
from fedbilevel.engines import Call, Engine, Replies
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
