"""The spec of a run: TOML in, frozen and checked dataclasses out, and back.

Six sections and a seed. `problem` and `algorithm` carry a `name` that chooses the class whose fields the other
keys are. Everything is checked before a run makes its folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field

from .aggregate import RULES, Rule
from .algorithms import ALGORITHMS, Algorithm
from .algorithms.graphs import Network
from .data import GENERATED, DataSettings
from .engines import AttackSettings, Engine, Loop, Simulation
from .errors import SettingsError, UnknownName
from .federation import Weighting
from .policies import Policies
from .privacy import Privacy
from .problem import Over, Task
from .problems import PROBLEMS, ProblemSettings
from .record import Plan
from .settings import Count, Positive, about, from_mapping, meanings, settings, suggestion, to_mapping


@settings
class FederationSettings:
    """How clients are run, and how their replies are put together."""

    engine: Annotated[
        Literal["simulation", "loop", "ray"],
        about("simulation: a cohort at once; loop: client by client, to debug; ray: simulation on a cluster"),
    ] = "simulation"
    weighting: Annotated[Weighting, about("mean over clients: uniform, or by their number of samples")] = "uniform"
    min_replies: Annotated[
        Count | Annotated[float, Field(gt=0, le=1)],
        about("a round with fewer valid replies ends the run: a number, or a share of the clients asked"),
    ] = 1
    deadline: Annotated[
        Positive | None, about("seconds after which a reply counts for nothing; left out: all are waited for")
    ] = None
    retries: Annotated[
        Count | None, about("times that who did not answer well is asked again in a round; left out: none")
    ] = None
    oversample: Annotated[
        Positive | None, about("share of clients asked beyond the cohort, the first replies count; left out: none")
    ] = None
    strikes: Annotated[
        Count | None, about("bad replies in a row after which a client is left out for a while; left out: 3")
    ] = None
    left_out: Annotated[Count | None, about("rounds for which such a client is left out; left out: 50")] = None
    over: Annotated[
        Over | None,
        about("simulation: vmap (clients batched) or map (in turn); left out: what suits the problem"),
    ] = None
    memory_limit: Annotated[
        Count, about("simulation: MiB for a cohort's data and work; a larger one goes in chunks")
    ] = 1024
    devices: Annotated[Count | None, about("simulation: devices to spread clients over; left out: all")] = None
    actors: Annotated[Count | None, about("ray: processes to spread clients over; left out: 2")] = None
    address: Annotated[
        str | None, about("ray: host:port of a cluster's head, or local; left out: $RAY_ADDRESS, or local")
    ] = None
    aggregator: Annotated[
        Literal["mean", "median", "trimmed-mean", "geometric-median", "centred-clipping", "norm-bound"] | None,
        about("what puts the replies of a round together, each channel alike; left out: mean"),
    ] = None
    trim: Annotated[
        Annotated[float, Field(ge=0, lt=0.5)] | None,
        about("trimmed-mean: the share cut at each end; left out: 0.25"),
    ] = None
    radius: Annotated[
        Positive | None, about("centred-clipping, norm-bound: the radius; left out: the median of the cohort's")
    ] = None
    rule_iterations: Annotated[
        Count | None, about("centred-clipping, geometric-median: iterations; left out: 3, at most 100")
    ] = None
    tolerance: Annotated[
        Positive | None, about("geometric-median: the relative move that ends its iteration; left out: 1e-4")
    ] = None

    def build(self, task: Task) -> Engine:
        if self.engine == "loop":
            return Loop(task.problem, task.clients)
        compute: dict[str, Any] = dict(over=self.over, memory_limit=self.memory_limit, devices=self.devices)
        try:
            if self.engine == "ray":
                from .engines.ray import Ray  # an extra, imported only when used

                return Ray(task.problem, task.clients, actors=self.actors or 2, address=self.address, **compute)
            return Simulation(task.problem, task.clients, **compute)
        except SettingsError as error:
            raise SettingsError(f"federation.{error}") from None

    def policies(self) -> Policies:
        """What the federation puts up with."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Policies)}
        return Policies(**{name: value for name, value in given.items() if value is not None})

    def rule(self) -> Rule | None:
        """The aggregator with its parameters; None is the mean."""
        if self.aggregator is None or self.aggregator == "mean":
            return None
        given = {
            "share": self.trim,
            "radius": self.radius,
            "iterations": self.rule_iterations,
            "tolerance": self.tolerance,
        }
        cls = RULES[self.aggregator]
        own = {f.name: given[f.name] for f in dataclasses.fields(cls) if given[f.name] is not None}
        made: Rule = cls(**own)
        return made


@settings
class EvaluateSettings:
    """When a run is measured and saved."""

    every: Annotated[Count, about("outer iterations between two evaluations")] = 1
    clients: Annotated[Count, about("clients on whose data upper_loss and lower_loss are probed")] = 10
    checkpoint_every: Annotated[Count, about("outer iterations between two checkpoints")] = 10


@settings
class StopSettings:
    """When a run ends: at the first of these that is reached. An iteration that would exceed it is not begun."""

    rounds: Annotated[Count | None, about("communication rounds")] = None
    iterations: Annotated[Count | None, about("outer iterations")] = None
    seconds: Annotated[Positive | None, about("seconds of training, evaluation not counted")] = None
    accuracy: Annotated[Annotated[float, Field(gt=0, le=1)] | None, about("test accuracy, as a share of 1")] = None


SECTIONS: dict[str, type[Any]] = {
    "data": DataSettings,
    "federation": FederationSettings,
    "attack": AttackSettings,
    "privacy": Privacy,
    "evaluate": EvaluateSettings,
    "stop": StopSettings,
}
NAMED: dict[str, Mapping[str, type[Any]]] = {"problem": PROBLEMS, "algorithm": ALGORITHMS}
ORDER = ("problem", "data", "algorithm", "federation", "attack", "privacy", "evaluate", "stop")


@dataclass(frozen=True)
class Spec:
    """Everything that decides a run."""

    problem: ProblemSettings
    data: DataSettings
    algorithm: Algorithm
    federation: FederationSettings
    attack: AttackSettings
    privacy: Privacy
    evaluate: EvaluateSettings
    stop: StopSettings
    seed: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """The resolved spec as TOML values; `parse` is the way back."""
        made: dict[str, Any] = {"seed": self.seed}
        for section in ORDER:
            value = getattr(self, section)
            name = {"name": _name_of(NAMED[section], value)} if section in NAMED else {}
            made[section] = name | to_mapping(value)
        return {section: values for section, values in made.items() if values != {}}  # keeps older digests

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_mapping())

    @property
    def digest(self) -> str:
        """Names the trajectory: two specs with the same digest differ at most in when they stop."""
        values = {k: v for k, v in self.to_mapping().items() if k != "stop"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def plan(self) -> Plan:
        """What a run folder has to know of this spec."""
        return Plan(self.to_mapping(), self.digest, self.evaluate.every)

    def task(self) -> Task:
        """Load the data and build the problem."""
        return self.problem.task(self.data, self.seed)

    def engine(self, task: Task) -> Engine:
        """What runs the clients, liars among them if the spec says so."""
        classes = None if self.problem.makes_data else self.data.classes
        clients = self.attack.wrap_clients(task.clients, classes, self.seed)
        return self.attack.wrap(self.federation.build(task._replace(clients=clients)), self.seed)


def load_spec(source: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Spec:
    """A spec from a TOML file (or the name of one that comes with the library; the demo's when left out).

    `overrides` are {"algorithm.N": 5} or ["algorithm.N=5"], as `--set` takes them.
    """
    raw = _read(source)
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    changes = dict(pairs)
    for key in sorted(changes, key=lambda k: not k.endswith(".name")):
        _override(raw, key, changes[key])
    return parse(raw)


def parse(raw: Mapping[str, Any]) -> Spec:
    """Check parsed TOML and build the spec; errors name field, value and remedy."""
    for key in raw:
        if key not in (*ORDER, "seed"):
            raise SettingsError(f"{key} is not a section; {suggestion(key, [*ORDER, 'seed'])}")
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise SettingsError(f"seed = {seed!r} is wrong: use a whole number from 0 to {2**32 - 1}")
    made: dict[str, Any] = {}
    for section in ORDER:
        values = raw.get(section, {})
        if not isinstance(values, Mapping):
            raise SettingsError(f"{section} = {values!r} is wrong: it is a section, as in [{section}]")
        made[section] = _section(section, values)
    spec = Spec(**made, seed=seed)
    if spec.problem.makes_data:
        spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, name=GENERATED))
    _check(spec)
    return spec


def describe(spec: Spec) -> str:
    """The spec as TOML with the meaning of every field beside it, unset ones as comments."""
    values = {section: dict[str, Any]() for section in ORDER} | spec.to_mapping()
    lines = [f"seed = {spec.seed}  # the root of all randomness"]
    for section in ORDER:
        cls = type(getattr(spec, section))
        lines += ["", f"# {(cls.__doc__ or '').strip().splitlines()[0]}", f"[{section}]"]
        if section in NAMED:
            lines.append(f"name = {_toml(values[section]['name'])}  # one of: {', '.join(NAMED[section])}")
        for field, meaning in meanings(cls).items():
            if field in values[section]:
                lines.append(f"{field} = {_toml(values[section][field])}  # {meaning}")
            elif not field.startswith("_") and field in {f.name for f in dataclasses.fields(cls)}:
                lines.append(f"# {field} =   # {meaning}")
    return "\n".join(lines) + "\n"


def _section(section: str, values: Mapping[str, Any]) -> Any:
    if section not in NAMED:
        return from_mapping(SECTIONS[section], values, section)
    table = NAMED[section]
    name = values.get("name", next(iter(table)))
    if not isinstance(name, str) or name not in table:
        raise UnknownName(f"{section}.name =", name, table)
    return from_mapping(table[name], {k: v for k, v in values.items() if k != "name"}, section)


def _check(spec: Spec) -> None:
    """What only several sections together can tell."""
    if spec.data.name == GENERATED and not spec.problem.makes_data:
        raise SettingsError(
            "data.name = 'generated' is wrong: this problem needs a data set; use mnist, or digits (embedded)"
        )
    spec.data.check()
    try:
        spec.algorithm.check(spec.data.clients)
    except SettingsError as error:
        raise SettingsError(f"algorithm.{error}") from None
    if spec.federation.min_replies > spec.data.clients:
        raise SettingsError(
            f"federation.min_replies = {spec.federation.min_replies} is wrong: "
            f"there are {spec.data.clients} clients"
        )
    try:
        spec.privacy.check(spec.federation.weighting, spec.federation.rule())
    except SettingsError as error:
        raise SettingsError(f"federation.{error}") from None
    if isinstance(spec.algorithm, Network):
        _check_without_server(spec)
    if all(value is None for value in dataclasses.astuple(spec.stop)):
        raise SettingsError("stop has no limit; set stop.rounds, stop.iterations, stop.seconds or stop.accuracy")


def _check_without_server(spec: Spec) -> None:
    """Clients that mix with their neighbours have nobody who could put replies together in another way."""
    for field, value in {
        "federation.aggregator": None if spec.federation.aggregator == "mean" else spec.federation.aggregator,
        "attack.kind": None if spec.attack.kind == "label-flip" else spec.attack.kind,
        "privacy.mode": spec.privacy.mode,
    }.items():
        if value is not None:
            raise SettingsError(
                f"{field} = {value!r} is wrong: the algorithm has no server; leave it out, or use fbo-aggitd"
            )


def _read(source: str | Path | None) -> dict[str, Any]:
    name = "demo" if source is None else str(source)
    packaged = resources.files("fedbilevel") / "specs" / f"{name}.toml"
    try:
        text = packaged.read_text() if packaged.is_file() else Path(name).read_text()
        return tomllib.loads(text)
    except OSError as error:
        raise SettingsError(
            f"spec {name} cannot be read: {error.strerror}; give a TOML file, 'demo', 'paper' or 'sites'"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"spec {name} is not TOML: {error}") from None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {text} is wrong: write key=value, as in --set algorithm.N=5")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), None if value.strip().lower() == "none" else value.strip()


def _override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one key; None takes it out. Another `name` drops the keys that belong to the old one."""
    *path, last = key.split(".")
    target = raw
    for part in path:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise SettingsError(f"{key} is not a setting: {part} is not a section")
    if last == "name" and path and path[0] in NAMED and target.get("name") != value:
        target.clear()
    if value is None:
        target.pop(last, None)
    else:
        target[last] = value


def _name_of(table: Mapping[str, type[Any]], value: Any) -> str:
    return next(name for name, cls in table.items() if type(value) is cls)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_toml(v)}' for name, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
