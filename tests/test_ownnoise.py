"""Privacy of a site's own: noise from a secret that the server does not have, and a limit that it cannot move."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.local import Lower, LowerGradient, lower_gradient, lower_steps
from fedbilevel.data import ClientData, Part
from fedbilevel.engines import Call, ClientStates, Held
from fedbilevel.engines.flare import Flare, Site, pack, unpack
from fedbilevel.engines.flare.server import Delivery
from fedbilevel.federate import load_site
from fedbilevel.federate.sitefile import write_rows
from fedbilevel.layers import OwnNoise, SitePrivacy
from fedbilevel.layers._ownnoise import KEY, SPENT
from fedbilevel.privacy import ClientUploads, local_epsilon
from fedbilevel.problems import QuadraticTask
from fedbilevel.rng import Address, Kind

SIGMA, CLIP = 3.0, 0.5
QUIET = 1e-9
X, Y = np.ones(10, np.float32), np.ones(8, np.float32)


def call(place: int = 0, y: np.ndarray = Y, kind: Kind = Kind.ROUND, step: Any = lower_gradient) -> Call:
    held = {name: Held(0, jnp.asarray(value), ()) for name, value in (("x", X), ("y", y))}
    samples = {"zeta": fb.Sample("lower")}
    return Call(step=step, address=Address(3, kind, place), clients=(0,), held=held, samples=samples)


def engine(task: QuadraticTask, folder: Path, client: int = 0, **settings: Any) -> OwnNoise:
    loop = fb.Loop(task.problem, fb.ListedClients([task.clients.data[client]]))
    folder.mkdir(exist_ok=True)
    return OwnNoise(loop, SitePrivacy(**{"noise": SIGMA, "clip": CLIP} | settings), folder)


def sent(own: OwnNoise, call: Call) -> np.ndarray:
    (replies,) = own.replies(call)
    assert isinstance(replies.reply, LowerGradient)
    return np.asarray(replies.reply.q)[0]


def test_a_contribution_is_clipped_and_gets_noise_of_the_deviation_that_is_charged(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    quiet = sent(engine(quadratic, tmp_path / "quiet", noise=QUIET), call())
    assert np.linalg.norm(quiet) == pytest.approx(CLIP, rel=1e-3), "the gradient is longer than the bound"
    own = engine(quadratic, tmp_path / "noisy")
    noise = np.concatenate([sent(own, call(place)) - quiet for place in range(300)])
    assert noise.std() == pytest.approx(SIGMA * CLIP, rel=0.05)
    assert abs(noise.mean()) < 4 * SIGMA * CLIP / np.sqrt(noise.size)


def test_the_next_value_of_a_vector_is_clipped_by_its_difference(quadratic: QuadraticTask, tmp_path: Path) -> None:
    asked = dataclasses.replace(
        call(step=lower_steps),
        arrays={"q": Y, "beta": np.float32(0.1)},
        constants={"shared": False},
        samples={"zeta": fb.Samples("lower", 3, 2)},
    )
    (replies,) = engine(quadratic, tmp_path, noise=QUIET, clip={"y": 1e-3}).replies(asked)
    assert isinstance(replies.reply, Lower)
    assert np.linalg.norm(np.asarray(replies.reply.y)[0] - Y) == pytest.approx(1e-3, rel=1e-2)


def test_the_same_request_gets_the_same_bits_also_after_a_crash_and_is_counted_once(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    first = engine(quadratic, tmp_path)
    answers = [sent(first, call(place)).tolist() for place in range(3)]
    again = engine(quadratic, tmp_path)
    assert [sent(again, call(place)).tolist() for place in range(3)] == answers
    assert json.loads((tmp_path / SPENT).read_text())["uploads"] == 3
    assert stat.S_IMODE((tmp_path / KEY).stat().st_mode) == 0o600


def test_where_anything_differs_the_noise_is_another_one(quadratic: QuadraticTask, tmp_path: Path) -> None:
    """Equal noise under different contributions would let their difference be seen."""
    quiet, own = engine(quadratic, tmp_path / "quiet", noise=QUIET), engine(quadratic, tmp_path / "a")
    other_data, other_quiet = (
        engine(quadratic, tmp_path / f, 1, noise=n) for f, n in (("a", SIGMA), ("q", QUIET))
    )
    other_secret = engine(quadratic, tmp_path / "b")
    nearly = Y.copy()
    nearly[0] = np.nextafter(nearly[0], 2, dtype=np.float32)
    noises = [
        sent(own, call()) - sent(quiet, call()),
        sent(own, call(1)) - sent(quiet, call(1)),
        sent(own, call(y=nearly)) - sent(quiet, call(y=nearly)),
        sent(other_data, call()) - sent(other_quiet, call()),
        sent(other_secret, call()) - sent(quiet, call()),
    ]
    for i, one in enumerate(noises):
        assert all(np.abs(one - other).min() > 1e-4 for other in noises[:i])
    assert json.loads((tmp_path / "a" / SPENT).read_text())["uploads"] == 4, "both runs of a site are counted"


def test_probes_are_not_answered(quadratic: QuadraticTask, tmp_path: Path) -> None:
    with pytest.raises(fb.StepError, match="this site has \\[privacy\\] and answers no probe"):
        sent(engine(quadratic, tmp_path), call(kind=Kind.PROBE))


def test_beyond_its_limit_a_site_uploads_nothing(quadratic: QuadraticTask, tmp_path: Path) -> None:
    bound = 1.001 * local_epsilon(2, SIGMA, 1e-5)
    own = engine(quadratic, tmp_path, limit=bound)
    kept = [sent(own, call(place)).tolist() for place in range(2)]
    for attempt in (own, engine(quadratic, tmp_path, limit=bound)):
        with pytest.raises(fb.StepError, match=r"this site uploads no more: epsilon would be .*, its limit is"):
            sent(attempt, call(2))
    assert sent(own, call(1)).tolist() == kept[1], "what has left may leave again"
    with pytest.raises(fb.StepError, match="this site uploads no more"):
        sent(engine(quadratic, tmp_path, noise=10.0, limit=bound), call(2))
    sent(engine(quadratic, tmp_path, noise=10.0, limit=1.05 * bound), call(2))


@pytest.mark.parametrize("changed", [{"noise": 2 * SIGMA}, {"clip": 2e3}])
def test_changing_sigma_or_the_bound_on_the_same_request_does_not_show_the_contribution(
    quadratic: QuadraticTask, tmp_path: Path, changed: dict[str, float]
) -> None:
    """With equal ξ, two uploads c + σ C ξ and c + 2 σ C ξ would be two equations for c and ξ."""
    first: dict[str, Any] = {"noise": SIGMA, "clip": 1e3}  # a bound that clips nothing
    one, other = (sent(engine(quadratic, tmp_path / "a", **both), call()) for both in (first, first | changed))
    truth = sent(engine(quadratic, tmp_path / "q", noise=QUIET, clip=1e3), call())
    assert np.abs(2 * one - other - truth).max() > 0.1 * SIGMA * 1e3


def test_a_key_that_others_can_read_is_refused(quadratic: QuadraticTask, tmp_path: Path) -> None:
    engine(quadratic, tmp_path)
    (tmp_path / KEY).chmod(0o644)
    with pytest.raises(fb.SettingsError, match=rf"{KEY} is a secret that others can read: its mode is 644"):
        engine(quadratic, tmp_path)


@pytest.mark.parametrize(("lost", "kept"), [(KEY, SPENT), (SPENT, KEY)])
def test_a_site_that_lost_its_secret_or_its_account_does_not_start(
    quadratic: QuadraticTask, tmp_path: Path, lost: str, kept: str
) -> None:
    """Without its account a site would begin to count at zero."""
    sent(engine(quadratic, tmp_path), call())
    (tmp_path / lost).unlink()
    with pytest.raises(fb.SettingsError, match=rf"restore .*{lost}, or delete both"):
        engine(quadratic, tmp_path)
    assert not (tmp_path / lost).exists(), "nothing was made in its place"


def test_an_account_of_nothing_is_no_reason_to_refuse(quadratic: QuadraticTask, tmp_path: Path) -> None:
    """The account is made before the secret, and the power may fail in between."""
    engine(quadratic, tmp_path)
    (tmp_path / KEY).unlink()
    sent(engine(quadratic, tmp_path), call())


def test_an_upload_is_on_disk_before_it_is_sent(
    quadratic: QuadraticTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, and after its renaming the folder, are written down by the system."""
    own, synced = engine(quadratic, tmp_path), list[bool]()
    real = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    sent(own, call())
    assert synced == [False, True]


@pytest.mark.parametrize(("file", "content"), [(KEY, "short"), (SPENT, "{"), (SPENT, '{"uploads": "many"}')])
def test_damaged_files_are_named(quadratic: QuadraticTask, tmp_path: Path, file: str, content: str) -> None:
    engine(quadratic, tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(fb.SettingsError, match=file):
        engine(quadratic, tmp_path)


# ------------------------------------------------------------------------------------------------ in a federation


def federation(
    task: QuadraticTask,
    folder: Path,
    noises: list[float | None],
    asked: float | None,
    accountant: fb.Accountant | None = None,
) -> fb.Federation:
    """Sites in this process, with noise of their own; the run has local privacy if `asked`."""
    sites = {}
    for i, noise in enumerate(noises):
        own = folder / str(i)
        own.mkdir(parents=True)

        def make(problem: Any, clients: Any, states: ClientStates, noise: float | None, own: Path) -> fb.Engine:
            loop = fb.Loop(problem, clients, states=states)
            return loop if noise is None else OwnNoise(loop, SitePrivacy(noise=noise, clip=CLIP), own)

        made = partial(make, noise=noise, own=own)
        sites[str(i)] = Site(task.problem, task.clients.data[i], noise=noise, engine=made)

    def deliver(requests: Any, timeout: float, /) -> Delivery:
        return Delivery({name: sites[name].answer(request) for name, request in requests.items()}, {})

    flare = Flare(task.problem, list(sites), deliver, noise=asked)
    if asked is None:
        return fb.Federation(flare, seed=3)
    privacy = fb.Privacy(mode="local", noise=asked, clip=CLIP)
    assert fb.stacked(flare, privacy=privacy) is flare, "the sites add the noise, and nobody else"
    return fb.Federation(flare, seed=3, accountant=accountant or fb.Accountant(privacy))


def ask(fed: fb.Federation) -> np.ndarray:
    fed.hold(x=jnp.asarray(X), y=jnp.asarray(Y))
    return np.asarray(fed.round(lower_gradient, zeta=fb.Sample("lower")).q)


def test_the_server_adds_no_noise_of_its_own_and_books_epsilon(quadratic: QuadraticTask, tmp_path: Path) -> None:
    quiet = ask(federation(quadratic, tmp_path / "quiet", [QUIET] * 3, None))
    accountant = fb.Accountant(fb.Privacy(mode="local", noise=SIGMA))
    fed = federation(quadratic, tmp_path / "noisy", [SIGMA] * 3, SIGMA, accountant)
    noise = np.concatenate([ask(fed) - quiet for _ in range(200)])
    assert noise.std() == pytest.approx(SIGMA * CLIP / np.sqrt(3), rel=0.08)
    assert accountant.releases == {ClientUploads(i): 200 for i in range(3)}
    assert accountant.epsilon(3) == local_epsilon(200, SIGMA, 1e-5)


def test_a_site_that_adds_less_than_the_run_promises_takes_no_part(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    fed = federation(quadratic, tmp_path, [SIGMA, None, 2.0, 2 * SIGMA], SIGMA)
    ask(fed)
    engine: Any = fed.engine
    assert sorted(engine.refused) == ["1", "2"]
    assert "the run promises local privacy with noise 3.0, this site adds none" in engine.refused["1"]
    assert "this site adds 2.0; set it in [privacy] of the site's TOML" in engine.refused["2"]


class Failing:
    """An engine whose steps raise what is not known before they are run."""

    def __init__(self, engine: fb.Engine, error: Exception) -> None:
        self.problem, self.clients, self.capabilities = engine.problem, engine.clients, engine.capabilities
        self._error = error

    def replies(self, call: Call) -> Any:
        raise self._error

    def close(self) -> None:
        pass


def asked(site: Site) -> list[dict[str, Any]]:
    """The headers of a site's answers to a hello and to a step."""
    hello = {"kind": "hello", "round": 0, "session": "s", "run": "r", "sizes": [10, 8], "noise": SIGMA}
    step = {"kind": "step", "round": 1, "session": "s", "step": lower_gradient.address, "address": ["round", 0]}
    step |= {"clock": 0, "settled": 0, "kept": None, "client": 0, "held": {"x": 1, "y": 1}, "constants": {}}
    step |= {"samples": {"zeta": {"kind": "sample", "part": "lower", "size": None}}, "keys": {"zeta": "00" * 16}}
    requests = pack(hello, {}), pack(step, {"held.x": X, "held.y": Y})
    return [dict(unpack(site.answer(request)).header) for request in requests]


@pytest.mark.parametrize("error", [ValueError("row 3 is 0.125"), fb.StepError("row 3 is 0.125")])
def test_neither_a_row_count_nor_the_text_of_an_exception_leaves_a_private_site(
    quadratic: QuadraticTask, tmp_path: Path, error: Exception
) -> None:
    """Both are functions of the data without noise. The site's own audit file has the text."""
    privacy = SitePrivacy(noise=SIGMA, clip=CLIP)

    def make(problem: Any, clients: Any, states: ClientStates) -> fb.Engine:
        return OwnNoise(Failing(fb.Loop(problem, clients, states=states), error), privacy, tmp_path)

    audit = tmp_path / "audit.jsonl"
    site = Site(quadratic.problem, quadratic.clients.data[0], noise=SIGMA, engine=make, audit=audit)
    welcome, answer = asked(site)
    assert welcome["kind"] == "welcome" and welcome["rows"] is None
    assert answer["kind"] == "error" and "0.125" not in answer["reason"]
    assert "row 3 is 0.125" in audit.read_text()


def test_a_private_site_still_says_that_its_budget_is_used_up(quadratic: QuadraticTask, tmp_path: Path) -> None:
    """This depends on the number of requests only."""
    privacy = SitePrivacy(noise=SIGMA, clip=CLIP, limit=1e-3)

    def make(problem: Any, clients: Any, states: ClientStates) -> fb.Engine:
        return OwnNoise(fb.Loop(problem, clients, states=states), privacy, tmp_path)

    _, answer = asked(Site(quadratic.problem, quadratic.clients.data[0], noise=SIGMA, engine=make))
    assert "this site uploads no more" in answer["reason"]


def test_a_server_takes_part_with_sites_that_do_not_tell_their_rows_but_cannot_weigh_them(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    fed = federation(quadratic, tmp_path, [SIGMA, SIGMA], SIGMA)
    ask(fed)
    assert fed.engine.clients.size(0) == (0, 0)
    weighing = fb.Federation(fed.engine, weighting="samples")
    with pytest.raises(fb.SettingsError, match="client 0 does not tell how many rows it has"):
        ask(weighing)


def test_a_sites_toml_has_the_section(tmp_path: Path) -> None:
    part = Part(np.ones((3, 2), np.float32), np.zeros(3, np.int32))
    write_rows(tmp_path / "rows.npz", ClientData(part, part))
    problem = '[problem]\nname = "hyper-representation"\nhidden = 3\nshape = [2, 1, 1]\nclasses = 2\n'
    file = tmp_path / "site.toml"
    file.write_text(f'[data]\nnpz = "rows.npz"\n{problem}[privacy]\nnoise = 2.0\nlimit = 8.0\n')
    loaded = load_site(file)
    assert loaded.privacy == SitePrivacy(noise=2.0, limit=8.0)
    loaded.site()
    assert (tmp_path / KEY).exists()
    cases = {"noise = -1.0": "privacy.noise = -1.0", "": "privacy.noise", "nois = 1.0": "privacy.nois"}
    for wrong, why in cases.items():
        file.write_text(f'[data]\nnpz = "rows.npz"\n{problem}[privacy]\n{wrong}\n')
        with pytest.raises(fb.SettingsError, match=why):
            load_site(file)
