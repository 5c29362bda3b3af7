"""A method in a package of its own, `examples/momentum`, on every engine and through every way into the library.

It uploads directions called x, y and v, keeps an Optax state at the server and an average at each client. The
package is installed beside the library (see the Makefile), and the library does not know of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedbilevel_momentum import MomentumSOBA

import fedbilevel as fb
from fedbilevel.federate import LoopbackFederation, simulated_sites
from loopback import loopback_only

EXAMPLE = Path(__file__).parent.parent / "examples" / "momentum" / "run.toml"
ONE_DEVICE = "federation.engine.devices=1"


def history(result: fb.Result) -> list[dict[str, Any]]:
    """The history without what a clock decides."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in result.history]


def norms(result: fb.Result) -> np.ndarray:
    return np.asarray([record["hypergradient_norm"] for record in result.history])


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> fb.Result:
    """The run of the example's spec on the simulation, without an interruption."""
    spec = fb.load_spec(EXAMPLE, [ONE_DEVICE])
    return fb.run(spec, tmp_path_factory.mktemp("example") / "run")


def test_the_method_is_found_by_its_entry_point_and_described_like_a_built_in_one() -> None:
    spec = fb.load_spec(EXAMPLE)
    assert isinstance(spec.algorithm, MomentumSOBA)
    by_class = fb.load_spec(
        EXAMPLE, {"algorithm.name": "python", "algorithm.class": "fedbilevel_momentum:MomentumSOBA"}
    )
    assert isinstance(by_class.algorithm, MomentumSOBA)
    with pytest.raises(fb.SettingsError, match=r"algorithm.rhoo is not a setting; did you mean rho\?"):
        fb.load_spec(EXAMPLE, ["algorithm.rhoo=1.0"])


def test_the_method_descends_to_the_closed_form(simulated: fb.Result) -> None:
    assert norms(simulated)[-1] < 0.5 * norms(simulated)[0]
    assert simulated.summary["rounds"] == 60 and simulated.summary["iterations"] == 60
    p, q = 10, 8
    account = simulated.summary["ledger"]["directions"]
    assert account["bytes_up"] == 60 * 4 * 4 * (p + 2 * q), "what a client keeps is billed nowhere"


def test_train_takes_the_same_objects_and_gives_the_same_numbers(simulated: fb.Result) -> None:
    task = fb.Quadratic(noise=0.5).make(clients=8, seed=0)
    engine = fb.Simulation(task.problem, task.clients, devices=1)
    method = MomentumSOBA(alpha=0.02, participation=4, batch=4)
    result = fb.train(
        task.problem,
        task.clients,
        method,
        engine=engine,
        stop={"rounds": 60},
        evaluate={"every": 5},
        measure=task.measure,
    )
    assert history(result) == history(simulated)
    np.testing.assert_array_equal(result.x, simulated.x)
    assert result.folder is None


def test_the_loop_agrees_with_the_simulation(simulated: fb.Result, tmp_path: Path) -> None:
    looped = fb.run(fb.load_spec(EXAMPLE, ["federation.engine=loop"]), tmp_path / "run")
    np.testing.assert_allclose(looped.x, simulated.x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norms(looped), norms(simulated), rtol=1e-4)


def test_a_run_that_ends_and_goes_on_has_the_same_bits_with_the_clients_states(
    simulated: fb.Result, tmp_path: Path
) -> None:
    first = fb.run(fb.load_spec(EXAMPLE, [ONE_DEVICE, "stop.rounds=25"]), tmp_path / "run")
    assert first.summary["rounds"] == 25 and list((tmp_path / "run" / "clients").iterdir())
    resumed = fb.run(fb.load_spec(EXAMPLE, [ONE_DEVICE]), tmp_path / "run", resume=True)
    assert history(resumed) == history(simulated)
    np.testing.assert_array_equal(resumed.x, simulated.x)


def test_a_run_without_the_clients_states_is_refused_by_name(tmp_path: Path) -> None:
    fb.run(fb.load_spec(EXAMPLE, [ONE_DEVICE, "stop.rounds=25"]), tmp_path / "run")
    for file in (tmp_path / "run" / "clients").iterdir():
        file.unlink()
    with pytest.raises(fb.CheckpointError, match=r"the state of client \d+ .* cannot be read"):
        fb.run(fb.load_spec(EXAMPLE, [ONE_DEVICE]), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_killed_process_is_resumed_with_the_same_bits(simulated: fb.Result, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fedbilevel", "run", str(EXAMPLE), "--set", ONE_DEVICE, "--out", str(out)]
    killed = subprocess.Popen([*command, "--quiet"])
    limit = time.monotonic() + 120
    while not (out / "checkpoint.safetensors").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    resumed = fb.run(fb.load_spec(EXAMPLE, [ONE_DEVICE]), out, resume=True)
    assert history(resumed) == history(simulated)


def test_a_method_without_a_check_of_its_own_is_refused_a_cohort_that_cannot_be() -> None:
    for participation in (0, 0.0, 10**6):
        with pytest.raises(fb.SettingsError, match=r"^algorithm\.participation = .* is wrong"):
            fb.load_spec(EXAMPLE, {"algorithm.participation": participation})


@pytest.mark.parametrize(
    "sets",
    [
        ["federation.aggregator=median"],
        ["privacy.mode=central", "privacy.clip=5.0", "privacy.noise=1e-7"],
        ["privacy.mode=local", "privacy.clip=5.0", "privacy.noise=1e-7"],
    ],
    ids=["median", "central", "local"],
)
@pytest.mark.slow
def test_directions_go_through_rules_and_noise_as_they_are(sets: list[str], tmp_path: Path) -> None:
    """A direction called x is clipped as it is: were it taken for the next x, nothing would be left of it.

    There is next to no noise, because the noise of two engines differs as soon as a bit of what they add up does.
    """
    secret = fb.Secret(bytes(range(32)))
    engines = [[ONE_DEVICE], ["federation.engine=loop"]]
    specs = [fb.load_spec(EXAMPLE, [*sets, *engine]) for engine in engines]
    runs = [fb.run(spec, tmp_path / str(i), secret=secret) for i, spec in enumerate(specs)]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-4, atol=1e-5)
    assert norms(runs[0])[-1] < 0.7 * norms(runs[0])[0]


@pytest.mark.slow
@pytest.mark.usefixtures("namespace")
def test_one_actor_of_ray_is_the_simulation_bit_for_bit(simulated: fb.Result, tmp_path: Path) -> None:
    sets = ["--set", "federation.engine.name=ray", "--set", "federation.engine.actors=1"]
    sets += ["--set", ONE_DEVICE]
    command = [sys.executable, "-m", "fedbilevel", "run", str(EXAMPLE), *sets, "--out", str(tmp_path / "run")]
    subprocess.run(loopback_only(*command, "--quiet"), check=True, timeout=300)
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    found = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    assert found == history(simulated)


@pytest.mark.slow
def test_a_real_federation_is_the_loop_bit_for_bit_also_when_a_site_is_killed(tmp_path: Path) -> None:
    """Three sites keep their averages in files of their own; one of them is killed in the middle of the run."""
    from fedbilevel.federate.commands import federated
    from fedbilevel.federate.submit import Kit, Submission

    sets = ["algorithm.participation=1.0", "stop.rounds=50", "evaluate.every=1", "federation.min_replies=3"]
    spec = federated(str(EXAMPLE), sets, 3)
    names = ["site-1", "site-2", "site-3"]
    files = simulated_sites(spec, tmp_path / "sites", names)
    killed: list[int] = []
    with LoopbackFederation(tmp_path / "work", files) as local:

        def kill_once(progress: fb.Progress) -> None:
            if progress.iteration >= 10 and not killed:
                killed.append(progress.iteration)
                asked = (files["site-2"].parent / "audit.jsonl").read_text().splitlines()
                os.kill(json.loads(asked[-1])["pid"], signal.SIGKILL)  # the process of the job, at its work

        submission = Submission(Kit(local.admin_kit), names, patience=300.0, between=local.revive)
        result = submission.run(spec, tmp_path / "run", resume=False, overwrite=False, observers=[kill_once])
    looped = fb.run(fb.load_spec(EXAMPLE, [*sets, "data.clients=3", "federation.engine=loop"]), tmp_path / "loop")
    assert killed and len(json.loads((tmp_path / "run" / "federation.json").read_text())["jobs"]) > 1
    np.testing.assert_array_equal(result.x, looped.x)
    np.testing.assert_array_equal(norms(result), norms(looped))
    assert "forgotten" not in result.summary
    assert list((tmp_path / "sites" / "site-1" / "states").glob("*/*.safetensors"))
