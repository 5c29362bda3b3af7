"""The simulation spread over a Ray cluster: the extra `fedbilevel[ray]`.

The cohort is cut into contiguous parts, one for each actor. An actor is a long-lived process with its own
`Simulation`, or a `Loop` if JAX cannot trace the problem. All parts have the same size, because the last one is
filled up with its last client, so nothing compiles twice. Replies come back stacked in the order of the cohort.
The federation checks each client's reply as with any engine, and adds the parts in a fixed order: with one actor
the numbers equal those of `Simulation` bit for bit.

Each version of a held vector is put into Ray's object store once, and goes from there to each node once. A step is
pure and an actor has only data, so an actor or a node that dies is replaced and asked again, and the numbers do
not change. For the same reason the clients' states stay with the driver. They are sent to the actor with the part
and come back with the replies, so an actor that dies takes no client's state with it.
"""

from ._actor import Answer, Part, Worker, answer
from ._driver import Ray, check_found, message_bytes
from ._extra import ray

__all__ = ["Answer", "Part", "Ray", "Worker", "answer", "check_found", "message_bytes", "ray"]
