"""What the tests share: small problems that compile quickly, and a cache of compiled programs."""

# ruff: noqa: E402  (the environment is set before JAX is imported)
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

# Before JAX is imported: compiled programs are kept for all tests, workers and the processes they start, and for
# the next checkout on this machine. They are about 60 MB, and compiling them is half of the work of a first run.
# The small ones are kept, too: most are single operations of a shape that many tests and processes have.
PROGRAMS = user_cache_path("fedbilevel") / "programs-of-tests"
STATE = Path(__file__).parent.parent / ".pytest_cache" / "state"  # the tests have a secret of their own
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
os.environ.setdefault("FEDBILEVEL_STATE", str(STATE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The matrices of tests are small. The threads of OpenBLAS, of which NumPy and SciPy have a set each, wait for the
# next product by counting, which took a tenth of the processor time of the tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Ray gives its workers the lowest share of a busy machine, and a test that waits for them holds up its worker.
os.environ.setdefault("RAY_worker_niceness", "0")

# Programs of tests are compiled with less optimisation, which takes XLA about a third of the processor time, since
# most of them run only a few times. Processes that tests start inherit it, so that results of two processes can be
# compared bit for bit. Users compile with XLA's own settings, and rounding differs between the two in the last
# digits. So `make test` runs some files with an empty XLA_FLAGS (see the Makefile), and other files can be run so.
QUICK = ("backend_optimization_level=0", "cpu_use_fusion_emitters=false", "cpu_parallel_codegen_split_count=1")
os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in QUICK))

import jax
import pytest
from hypothesis import settings

from commands import Command, Outcome
from fedbilevel import cli
from fedbilevel.data import DataSettings
from fedbilevel.problem import Task
from fedbilevel.problems import HyperRepresentation, Quadratic, QuadraticTask
from loopback import can_unshare
from sharing import share

settings.register_profile("same every time", derandomize=True, deadline=None)
settings.load_profile("same every time")
share()

# These files take longest and come first, so that the workers end together.
NAMES = ["flare", "ray", "example", "doors", "matrix", "studies", "torch_federation", "run", "many", "readme"]
NAMES += ["dropout", "single", "storage", "engines", "blame", "scale", "distributed", "theory", "tune"]
LONGEST = [f"test_{name}.py" for name in NAMES]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Collect garbage rarely: JAX and thousands of tests are many objects, and it took up to a tenth of a run."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def quadratic() -> QuadraticTask:
    """Twenty strongly heterogeneous clients with exact gradients."""
    return Quadratic(heterogeneity=3.0).make(clients=20, seed=0)


@pytest.fixture(scope="session")
def digits() -> Task:
    """A small hyper-representation task on the embedded digits, twenty clients of unequal size."""
    return HyperRepresentation(hidden=12).task(DataSettings(name="digits", clients=20, partition="dirichlet"), 0)


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """What XLA compiled meanwhile, one entry a program."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def compilations() -> Callable[[], AbstractContextManager[list[str]]]:
    """`with compilations() as seen:` lists the programs that XLA compiles in the block."""
    return _compilations


@pytest.fixture(scope="session")
def namespace() -> None:
    """A network namespace with nothing but loopback can be made, as Ray listens on every address that it finds.

    Without one the tests of Ray are skipped on a developer's machine. In CI they fail, so that it cannot leave
    them out without a word.
    """
    if not can_unshare():
        told = "Ray's tests need Linux namespaces: unshare -r -n and ip"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(told)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("run", ...)` is `fedbilevel run ...` in this process."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedbilevel", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), *capsys.readouterr())

    return call
