"""A site's own policy: what it refuses whatever the server asks, and what its audit file says about it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import ClientData
from fedbilevel.engines.flare import Flare, Site, SitePolicy, pack, unpack, verify_audit
from fedbilevel.engines.flare.server import Delivery
from fedbilevel.federate import load_site
from fedbilevel.federate.sitefile import write_rows
from fedbilevel.problems import QuadraticTask
from fedbilevel.settings import from_mapping

STEP = "fedbilevel.algorithms.local:lower_gradient"
Make = Callable[..., Site]


@pytest.fixture
def own(quadratic: QuadraticTask) -> ClientData:
    return quadratic.clients.load(3)


@pytest.fixture
def make(quadratic: QuadraticTask, own: ClientData, tmp_path: Path) -> Make:
    def made(**policy: Any) -> Site:
        rules = from_mapping(SitePolicy, policy, "policy")
        return Site(quadratic.problem, own, policy=rules, folder=tmp_path, audit=tmp_path / "audit.jsonl")

    return made


def hello(site: Site, **more: Any) -> dict[str, Any]:
    header = {"kind": "hello", "round": 0, "session": "s", "run": "run7", "sizes": [10, 8], "spec": "abc", **more}
    return dict(unpack(site.answer(pack(header, {}))).header)


def step(site: Site, number: int = 1, sample: Any = None, **more: Any) -> dict[str, Any]:
    header: dict[str, Any] = {
        **{"kind": "step", "round": number, "session": "s", "step": STEP, "address": ["round", number]},
        **{"clock": number, "settled": 0, "kept": None, "client": 0, "held": {"x": 1, "y": 1}, "constants": {}},
        "keys": {"zeta": bytes(range(16)).hex()},
        "samples": {"zeta": {"kind": "sample", "part": "lower", "size": None} if sample is None else sample},
        **more,
    }
    vectors = {"held.x": np.ones(10, np.float32), "held.y": np.ones(8, np.float32)}
    return dict(unpack(site.answer(pack(header, vectors))).header)


def refusal(reply: dict[str, Any]) -> str:
    assert reply["kind"] == "error", reply
    return str(reply["reason"])


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------ what is refused


def test_without_a_policy_everything_is_answered_that_the_modules_allow(make: Make) -> None:
    site = make()
    assert hello(site)["kind"] == "welcome"
    assert step(site, sample={"kind": "sample", "part": "lower", "size": 1})["kind"] == "reply"


@pytest.mark.parametrize("pattern", ["lower_gradient", STEP, "fedbilevel.algorithms.local:*", "lower_*"])
def test_a_policy_names_the_steps(make: Make, pattern: str) -> None:
    allowing, other = make(steps=["losses", pattern]), make(steps=["losses", "fedbilevel.algorithms.fednest:*"])
    assert hello(allowing)["kind"] == hello(other)["kind"] == "welcome"
    assert step(allowing)["kind"] == "reply"
    assert "the policy of this site does not allow fedbilevel.algorithms.local:lower_gradient" in refusal(
        step(other)
    )


@pytest.mark.parametrize(
    "sample",
    [
        {"kind": "sample", "part": "lower", "size": 1},
        {"kind": "sample", "part": "lower", "size": 2},
        {"kind": "samples", "part": "lower", "size": 1, "count": 5},
        {"kind": "epochs", "part": "lower", "size": 1, "epochs": 1},
        {"kind": "sample", "part": "upper", "size": 2},
    ],
    ids=str,
)
def test_a_batch_that_is_too_small_is_refused_however_it_is_described(make: Make, sample: Any) -> None:
    site = make(smallest_batch=3)
    hello(site)
    assert "policy.smallest_batch is 3" in refusal(step(site, sample=sample))


@pytest.mark.parametrize("size", [-1, 0, True, 3.0, float("nan")])
def test_a_batch_of_no_size_is_refused_before_the_policy_is_asked(make: Make, size: Any) -> None:
    site = make(smallest_batch=3)
    hello(site)
    why = refusal(step(site, sample={"kind": "sample", "part": "lower", "size": size}))
    assert "not a whole number" in why or "not finite" in why


def test_the_last_batch_of_a_pass_counts_and_so_does_a_part_with_few_rows(make: Make, own: ClientData) -> None:
    rows = own.lower.rows
    site = make(smallest_batch=rows)
    hello(site)
    assert step(site)["kind"] == "reply", "all rows"
    assert step(site, 2, {"kind": "sample", "part": "lower", "size": rows + 5})["kind"] == "reply"
    assert "smallest_batch" in refusal(
        step(site, 3, {"kind": "epochs", "part": "lower", "size": rows - 1, "epochs": 1})
    )
    few = make(smallest_batch=rows + 1)
    hello(few)
    assert "policy.smallest_batch" in refusal(step(few)), "all rows are too few"


@pytest.mark.parametrize("how", ["constants", "array", "row"])
def test_rows_cannot_be_named_in_another_way_than_by_a_sample(make: Make, how: str) -> None:
    site = make(smallest_batch=3)
    hello(site)
    header: dict[str, Any] = {
        **{"kind": "step", "round": 1, "session": "s", "step": STEP, "address": ["round", 1], "clock": 1},
        "keys": {},
        **{"settled": 0, "kept": None, "client": 0, "held": {"x": 1, "y": 1}, "samples": {}},
        "constants": {"zeta": 5} if how == "constants" else {},
    }
    vectors: dict[str, Any] = {"held.x": np.ones(10, np.float32), "held.y": np.ones(8, np.float32)}
    if how != "constants":
        vectors[f"{how}.zeta"] = np.asarray([[5], [1]], np.int32)
    reply = dict(unpack(site.answer(pack(header, vectors))).header)
    assert "zeta of lower_gradient is drawn by the site" in refusal(reply)


def test_a_run_whose_spec_is_not_named_is_refused_at_its_hello(make: Make) -> None:
    site = make(specs=["0123456789abcdef", "fedcba9876543210"])
    assert "does not allow the spec 'abc'; add it to policy.specs" in refusal(hello(site))
    assert "does not allow the spec None" in refusal(hello(site, spec=None))
    assert "say hello first" in refusal(step(site))
    assert hello(site, spec="fedcba9876543210")["kind"] == "welcome"


def test_nothing_is_answered_after_the_end(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.datetime.now().astimezone()
    today, hour = now.date(), datetime.timedelta(hours=1)
    for until in (now + hour, (now + hour).replace(tzinfo=None), today + datetime.timedelta(days=1)):
        assert hello(make(until=until))["kind"] == "welcome"
    for until in (now - hour, (now - hour).replace(tzinfo=None), today - datetime.timedelta(days=1)):
        assert "policy.until has passed" in refusal(hello(make(until=until)))
    site = make(until=now + hour)
    hello(site)
    monkeypatch.setattr("fedbilevel.engines.flare._policy.clock", lambda: (now + 2 * hour).timestamp())
    assert "policy.until has passed" in refusal(step(site))


def test_requests_are_counted_by_the_hour_and_in_all_also_over_restarts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = [1_000_000.0]
    monkeypatch.setattr("fedbilevel.engines.flare._policy.clock", lambda: time[0])
    rules: dict[str, Any] = dict(requests_per_hour=2, requests_in_all=3)
    first = make(**rules)
    hello(first)
    answers = [step(first, 1), step(first, 1), step(first, 1)]
    assert [a["kind"] for a in answers] == ["reply"] * 3, "a repeated request is answered from memory"
    second = make(**rules)
    hello(second)
    assert step(second, 2, address=["probe", 2])["kind"] == "reply"
    assert "policy.requests_per_hour is 2" in refusal(step(second, 3))
    time[0] += 3601
    assert step(second, 4)["kind"] == "reply"
    time[0] += 3601
    assert "policy.requests_in_all is 3" in refusal(step(make_ready(make, rules), 5))


def make_ready(make: Make, rules: dict[str, Any]) -> Site:
    site = make(**rules)
    hello(site)
    return site


def test_a_damaged_count_is_an_error_and_not_a_new_beginning(make: Make, tmp_path: Path) -> None:
    site = make_ready(make, {"requests_in_all": 3})
    step(site, 1)
    (tmp_path / "policy.json").write_text("{")
    assert "policy.json is damaged" in refusal(step(site, 2))


# ------------------------------------------------------------------------------------------------ what is written


def test_the_audit_has_hellos_steps_and_refusals_with_their_caller(make: Make, tmp_path: Path) -> None:
    site = make(smallest_batch=3)
    hello(site)
    step(site, 1)
    step(site, 2, {"kind": "sample", "part": "lower", "size": 1})
    site.note("site-2", "this site answers the server only")
    begin, greeted, done, small, stranger = audited(tmp_path)
    assert [e["what"] for e in (begin, greeted, done, small, stranger)] == [
        *("begin", "hello", "step", "refused", "refused")
    ]
    assert (greeted["caller"], greeted["run"], greeted["spec"]) == ("server", "run7", "abc")
    assert (done["round"], done["step"], done["samples"]["zeta"]["size"]) == ("round 1", "lower_gradient", None)
    assert small["step"] == STEP and "smallest_batch" in small["reason"] and small["number"] == 2
    assert stranger["caller"] == "site-2" and verify_audit(tmp_path / "audit.jsonl").broken is None


def test_a_step_that_cannot_be_written_down_is_not_run(make: Make, tmp_path: Path) -> None:
    site = make()
    hello(site)
    (tmp_path / "audit.jsonl").unlink()
    (tmp_path / "audit.jsonl").mkdir()
    assert "IsADirectoryError" in refusal(step(site))


def test_a_header_of_a_million_letters_makes_no_such_line(make: Make, tmp_path: Path) -> None:
    site = make()
    hello(site, run="7" * 10**6)
    assert hello(site, noise=[["x" * 10**5]], spec="x" * 10**5)["kind"] == "error"
    hello(site)
    assert len(refusal(step(site, step="x" * 10**6))) < 2000
    step(
        site, 2, constants={"x" * 10**5: 1}, samples={"x" * 10**5: {"kind": "sample", "part": "lower", "size": 1}}
    )
    assert max(map(len, (tmp_path / "audit.jsonl").read_text().splitlines())) < 2000


def test_a_refusal_reaches_the_servers_books(make: Make, quadratic: QuadraticTask) -> None:
    site = make(specs=["0123456789abcdef"], smallest_batch=10**6)

    def deliver(requests: Any, timeout: float, /) -> Delivery:
        return Delivery({name: site.answer(request) for name, request in requests.items()}, {})

    with pytest.raises(fb.StepError, match=r"a: the policy of this site does not allow the spec 'fff'"):
        Flare(quadratic.problem, ["a"], deliver, spec="fff")
    engine = Flare(quadratic.problem, ["a"], deliver, spec="0123456789abcdef")
    fed = fb.Federation(engine, seed=3)
    fed.hold(x=jnp.ones(10), y=jnp.ones(8))
    with pytest.raises(fb.TooFewReplies, match=r"policy.smallest_batch is 1000000"):
        fed.round(lower_gradient, zeta=fb.Sample("lower"))


# ------------------------------------------------------------------------------------------------ the site's TOML


def test_the_section_policy_of_a_sites_toml(tmp_path: Path, own: ClientData) -> None:
    write_rows(tmp_path / "rows.npz", own)
    policy = (
        'steps = ["lower_*", "losses"]\nsmallest_batch = 32\nrequests_per_hour = 600\nrequests_in_all = 50000\n'
        'until = 2027-06-30\nspecs = ["0123456789abcdef"]\n'
    )

    def load(text: str) -> Any:
        file = tmp_path / "site.toml"
        file.write_text(f'[data]\nnpz = "rows.npz"\n[problem]\nname = "quadratic"\n[policy]\n{text}')
        return load_site(file)

    made = load(policy)
    assert made.policy == SitePolicy(
        steps=("lower_*", "losses"),
        smallest_batch=32,
        requests_per_hour=600,
        requests_in_all=50_000,
        until=datetime.date(2027, 6, 30),
        specs=("0123456789abcdef",),
    )
    assert "does not allow the spec" in refusal(hello(made.site()))
    for wrong, message in (
        ("smallest_batch = 0", r"^policy.smallest_batch = 0 is wrong"),
        ("steps = 'all'", r"^policy.steps = 'all' is wrong"),
        ("smallest = 3", r"^policy.smallest is not a setting; did you mean smallest_batch"),
        ("until = 'tomorrow'", r"^policy.until = 'tomorrow' is wrong"),
    ):
        with pytest.raises(fb.SettingsError, match=message):
            load(wrong)
