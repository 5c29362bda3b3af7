"""Data mixtures: which domains help a target domain? A weight for each domain is judged by rows of the target.

    min_x 1/m Σ_i CE_i(y*(x); rows of the target domain)
    subject to  y*(x) = argmin_y 1/m Σ_i K softmax(x)_{k(i)} CE_i(y; rows of client i) + decay/2 ||y||²

Every client has rows of one of K domains, which are made from one data set of images: as they are, turned by a
right angle, upside down, inverted, and noise, whose labels are random. Every client also has a few checked rows of
the target domain. x has K numbers, so that a few rows are enough. Where every domain helps, weights buy nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from .. import rng
from ..batch import Batch
from ..data import ClientData, DataSettings, ListedClients
from ..problem import Finding, Problem, Task, task_with_test
from ..settings import about, settings
from ._checked import CERTAIN, CheckedRows, Rows, part, principal_components

Domain = Literal["upright", "turned", "upside-down", "inverted", "noise"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
Pixels = npt.NDArray[np.float32]


def changed(images: Pixels, domain: Domain) -> Pixels:
    """Images of rows x height x width x colours as the domain shows them."""
    if domain == "turned":
        return np.rot90(images, axes=(1, 2))
    if domain == "upside-down":
        return images[:, ::-1, ::-1]
    return images.min() + images.max() - images if domain == "inverted" else images


@settings
class Mixtures(CheckedRows):
    """Data mixtures: a weight for each domain is x, a classifier y."""

    target: Annotated[Domain, about("the domain of the checked rows and of the test rows")] = "turned"
    start: Annotated[
        Literal["equal", "target"],
        about("equal: all domains alike; target: the clients of the target domain alone, which is a control"),
    ] = "equal"

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Give every client a domain, in turn, and show its rows as the domain does."""
        dataset, dealt = data.dataset, self.deal(data, seed)
        domains = [DOMAINS[client % len(DOMAINS)] for client in range(data.clients)]
        turn: Any = principal_components(dataset, self.components) if self.components else lambda rows: rows

        def shown(pixels: Any, domain: Domain) -> Any:
            """The inputs of rows of pixels, as a domain shows them."""
            images = np.asarray(pixels).reshape(-1, *dataset.shape)
            return turn(changed(images, domain).reshape(len(images), -1))

        clients, valid = list[ClientData](), list[Rows]()
        for client, domain in enumerate(domains):
            own = dealt.numbers[client]
            labels = dataset.train_targets[own]
            if domain == "noise":
                drawn = rng.generator(seed, "labels of noise", client).integers(dealt.classes, size=len(labels))
                labels = drawn.astype(np.int32)
            unchecked = Rows(shown(dataset.train_inputs[own], domain), labels)
            right = Rows(
                shown(dataset.train_inputs[dealt.further[client]], self.target),
                dataset.train_targets[dealt.further[client]],
            )
            checked = right.of(slice(0, self.checked))
            valid.append(right.of(slice(self.checked, None)))
            clients.append(self._client(unchecked, checked, np.int32(DOMAINS.index(domain))))
        columns = dict(domain=np.int32(0), weighs=np.float32(0))
        test = part(Rows(shown(dataset.test_inputs, self.target), dataset.test_targets), **columns)
        others = (
            part(Rows(*(np.concatenate(a) for a in zip(*valid, strict=True))), **columns) if self.valid else None
        )
        learner = self.learner(dealt.test.inputs.shape[1], dealt.shape, dealt.classes, seed)

        def losses(y: Any, batch: Batch) -> Array:
            return learner.losses(y, batch.inputs["features"], batch.targets)

        def lower(x: Any, y: Any, batch: Batch) -> Array:
            weights = jnp.where(batch.inputs["weighs"] > 0, self.weight(x)[batch.inputs["domain"]], 1.0)
            return batch.mean(weights * losses(y, batch)) + self.penalty(y)

        alone = jnp.where(jnp.arange(len(DOMAINS)) == DOMAINS.index(self.target), CERTAIN, -CERTAIN)
        problem = Problem(
            x=jnp.zeros(len(DOMAINS)) if self.start == "equal" else alone,
            y=learner.start,
            lower=lower,
            upper=lambda x, y, batch: batch.mean(losses(y, batch)),
            metrics=lambda x, y, batch: learner.metrics(y, batch.inputs["features"], batch),
            predict=lambda x, y, inputs: learner.scores(y, inputs["features"]),
        )
        made = task_with_test(problem, ListedClients(clients), test, others)

        def measure(x: Array, y: Array) -> Mapping[str, Any]:
            told = {
                f"weight_{name}": float(w) for name, w in zip(DOMAINS, np.asarray(self.weight(x)), strict=True)
            }
            return {**made.measure(x, y), **told}

        def finding(x: Array, y: Array) -> Finding:
            return Finding("domain", "weight", np.asarray(self.weight(x)).tolist(), names=DOMAINS)

        return made._replace(measure=measure, finding=finding)

    def weight(self, x: Array) -> Array:
        """The weights of the domains, whose mean is one."""
        return x.size * jax.nn.softmax(x)

    def _client(self, unchecked: Rows, checked: Rows, domain: Any) -> ClientData:
        judging = part(checked, domain=domain, weighs=np.float32(0))
        if self.train_on == "checked":
            return ClientData(judging, judging)
        if self.train_on == "unchecked":
            return ClientData(part(unchecked, domain=domain, weighs=np.float32(1)), judging)
        both = unchecked.and_those_of(checked)
        first = np.arange(len(both.labels)) < len(unchecked.labels)
        return ClientData(part(both, domain=domain, weighs=first.astype(np.float32)), judging)
