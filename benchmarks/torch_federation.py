"""A real federation of three processes on MNIST to 90 %: one site computes with JAX, and two with PyTorch.

    python benchmarks/torch_federation.py [--small]

The preset `sites` (non-i.i.d. MNIST) with all sites in every round. The TOML of two sites names the problem of
torch_site.py in place of the library's. After some rounds the process of one of them is killed; it is started
again, and the run goes on from its last checkpoint. `--small` takes the digits of scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

import fedbilevel as fb
from fedbilevel.federate import LoopbackFederation, simulated_sites
from fedbilevel.spec import Spec

NAMES = ["jax-site", "torch-site-1", "torch-site-2"]
VICTIM = "torch-site-1"


def spec_of(small: bool, *stop: str) -> Spec:
    """The preset for three sites, of MNIST or of the digits of scikit-learn, with an end of its own."""
    own = ["data.name=digits"] if small else []
    return fb.load_spec("sites", [*own, *stop, "evaluate.every=2", "evaluate.checkpoint_every=2"])


def mixed_sites(spec: Spec, folder: Path) -> dict[str, Path]:
    """The TOML files of three sites; two of them have PyTorch."""
    files = simulated_sites(spec, folder, NAMES)
    shape = spec.data.dataset.shape
    for name in NAMES[1:]:
        own = tomllib.loads(files[name].read_text())
        theirs = own["problem"]
        mine = {"python": "torch_site:make", "inputs": shape[0] * shape[1] * shape[2], "hidden": theirs["hidden"]}
        own["problem"] = mine | {"decay": theirs["decay"], "smoothing": theirs["smoothing"]}
        files[name].write_text(tomli_w.dumps(own))
    return files


def run(folder: Path, spec: Spec, kill_after: int | None) -> tuple[fb.Result, LoopbackFederation]:
    """Run to the end. A site is killed after so many rounds, and comes back."""
    from fedbilevel.federate.submit import Kit, Submission

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the sites find torch_site.py
    with LoopbackFederation(folder, mixed_sites(spec, folder / "sites")) as local:
        audit, over = local.site_file(VICTIM).parent / "audit.jsonl", threading.Event()

        def kill() -> None:
            while not over.wait(0.2):
                lines = audit.read_text().splitlines() if audit.exists() else []
                if sum('"what": "step"' in line for line in lines) >= (kill_after or 0):
                    os.kill(json.loads(lines[-1])["pid"], signal.SIGKILL)  # the process that computes for the job
                    print(f"killed {VICTIM} after {kill_after} of its steps", flush=True)
                    return

        watcher = threading.Thread(target=kill, daemon=True)
        if kill_after is not None:
            watcher.start()
        submitted: Any = Submission(Kit(local.admin_kit), NAMES, patience=300.0, restarts=3, between=local.revive)
        try:
            return submitted.run(spec, folder / "run", resume=False, overwrite=False), local
        finally:
            over.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--kill-after", type=int, default=40, help="steps of the site before it; 0: it is not killed"
    )
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result, local = run(Path(place), spec_of(given.small, "stop.accuracy=0.9"), given.kill_after or None)
        last = result.history[-1]
        print(f"{last['test_accuracy']:.4f} after {last['rounds']} rounds, {last['iteration']} outer iterations")
        print(f"starts of sites: {local.starts}; {time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
