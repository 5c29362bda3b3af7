"""A real federation of three hospitals on this machine, and the same run as a simulation.

`fedbilevel federate --simulate-sites 3` starts a server and three sites on loopback, with NVIDIA FLARE and mutual
TLS between them. Each site is a process with the rows of one hospital, and only vectors leave it. The spec is
federation.toml, and the problem is in hospitals.py. Needs `pip install 'fedbilevel[flare]'`; takes about a minute.
"""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb
from hospitals import write_tables
from showing import folder

HERE = Path(__file__).parent
out = folder("federation").resolve()
write_tables(out / "tables")
tables = f"problem.folder={out / 'tables'}"

# The real federation: a server and three sites, each a process of its own.
command = [sys.executable, "-m", "fedbilevel", "federate", "federation.toml", "--simulate-sites", "3"]
command += ["--set", tables, "--out", str(out / "real"), "--overwrite", "--quiet"]
modules = os.pathsep.join([str(HERE), *filter(None, sys.path)])  # the sites need hospitals.py too
subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONPATH": modules}, check=True)
real = fb.load_run(out / "real")

# The same spec as a simulation in this process, client by client.
simulated = fb.run(fb.load_spec(HERE / "federation.toml", [tables]), out / "simulated", overwrite=True)

difference = float(np.abs(real.flat_x - np.asarray(simulated.x)).max())
sent = {step: account["bytes_up"] / 3000 for step, account in real.summary["ledger"].items()}
losses = [[record["upper_loss"] for record in run.history[1:]] for run in (real, simulated)]
rounds = [record["rounds"] for record in real.history[1:]]  # the first record is at y = 0
print(f"largest difference between the x of the federation and of the simulation: {difference:.1e}")
print(f"{rounds[-1]} rounds in {real.summary['seconds']:.0f} s, in which a site sent {sum(sent.values()):.1f} kB")
print(f"loss on the upper rows of the hospitals: {losses[0][0]:.4f} at first, {losses[0][-1]:.4f} at the end")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.plot(rounds, losses[0], label="three sites on NVIDIA FLARE")
left.plot(rounds, losses[1], "k.", label="simulation in one process")
left.set(xlabel="communication rounds", title="Loss on the upper rows of the hospitals")
left.legend(frameon=False)
right.bar_label(right.barh(list(sent), list(sent.values())), fmt="%.1f kB", padding=3)
right.set(title="What a site sent, by kind of round", xlim=(0, 1.25 * max(sent.values())), xticks=[])
right.invert_yaxis()
figure.savefig(out / "federation.png", dpi=90)
