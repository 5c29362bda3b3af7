"""A thousand rounds with clients of PyTorch: one and two of its threads, one and two devices of JAX.

    python benchmarks/torch_rounds.py [--rounds 1000] [--limit 300]

Every run is a process of its own, in which the server computes with JAX and four clients with PyTorch: SimFBO with
two local steps on 32 rows of a network of 784, 200 and 10, and an evaluation every 50 rounds. A run in which no
round ends for so many seconds is ended, and said to hang; on a busy machine a run may take long without hanging.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time


def run(rounds: int, threads: int) -> None:
    """The run of one process."""
    import numpy as np
    import torch

    import fedbilevel as fb
    from torch_site import make

    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)

    def rows() -> tuple[np.ndarray, np.ndarray]:
        return rng.random((64, 784), np.float32), rng.integers(0, 10, 64)

    clients = fb.clients_from([(rows(), rows()) for _ in range(4)])
    method = fb.SimFBO(alpha=0.01, beta=0.01, tau=2, batch_zeta=32, batch_xi=32, participation=1.0)
    start = time.monotonic()
    result = fb.train(make(), clients, method, stop={"rounds": rounds}, evaluate={"every": 50})
    taken = time.monotonic() - start
    print(
        f"{result.summary['rounds']} rounds in {taken:.0f} s, {time.process_time():.0f} of the processor",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads is not None:
        return run(given.rounds, given.threads)
    for threads in (1, 2):
        for devices in (1, 2):
            command = [sys.executable, __file__, "--rounds", str(given.rounds), "--threads", str(threads)]
            environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
            said, hangs = "nothing", False
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                while not hangs:
                    ready = select.select([process.stdout], [], [], given.limit)[0]
                    line = process.stdout.readline() if ready else ""
                    if ready and not line:
                        break
                    hangs, said = not ready, line.strip() or said
                process.kill() if hangs else process.wait()
            said = f"HANGS after {said}" if hangs else said
            print(f"{threads} of PyTorch's threads, {devices} of JAX's devices: {said}", flush=True)


if __name__ == "__main__":
    main()
