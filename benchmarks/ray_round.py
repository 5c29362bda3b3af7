"""What a round on Ray costs beside the same round of the simulation, at the size of the paper's MNIST network.

20 clients return x and y (157,000 and 2,010 floats) and take both down.

    python benchmarks/ray_round.py
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.engines import Engine
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Problem
from fedbilevel.steps import X, Y, client_step
from loopback import stay_on_loopback

P, Q, CLIENTS = 157_000, 2_010, 20


class Both(NamedTuple):
    x: X
    y: Y


@client_step
def echo(c: Oracle, u: X, v: Y) -> Both:
    """Hardly any compute: what is left is the round itself."""
    return Both(c.x + u, c.y + v)


def problem() -> Problem:
    return Problem(jnp.zeros(P), jnp.zeros(Q), lambda x, y, b: jnp.sum(y), lambda x, y, b: jnp.sum(x))


def clients() -> fb.ListedClients:
    return fb.clients_from([(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))] * CLIENTS)


def seconds_of(engine: Engine, rounds: int) -> list[float]:
    """Seconds of each round, sorted; the first three, which compile, are left out."""
    fed = fb.Federation(engine)
    x, y = jnp.ones(P), jnp.ones(Q)
    fed.hold(x=x, y=y)
    seconds = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        fed.round(echo, u=x, v=y).x.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    stay_on_loopback()
    import ray_round  # under a name that actors can import
    from fedbilevel.engines.ray import Ray

    engine = Ray(problem(), clients(), actors=options.actors, devices=1)
    spread = ray_round.seconds_of(engine, options.rounds)
    alone = ray_round.seconds_of(fb.Simulation(problem(), clients(), devices=1), options.rounds)
    for name, at in {"median": 0.5, "fastest tenth": 0.1}.items():  # the latter says more on a busy machine
        ours, theirs = (float(np.quantile(seconds, at)) for seconds in (spread, alone))
        print(f"{name}: simulation {theirs:.4f} s, ray {ours:.4f} s, overhead {ours - theirs:.4f} s")


if __name__ == "__main__":
    main()
