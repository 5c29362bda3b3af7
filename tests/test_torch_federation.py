"""A real federation of three processes: one site computes with JAX, and two with PyTorch.

benchmarks/torch_federation.py is the same on MNIST to 90 %, with a site that is killed.
"""

from __future__ import annotations

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import fedbilevel as fb

pytest.importorskip("torch")

from torch_federation import NAMES, run, spec_of


@pytest.mark.slow
def test_sites_of_jax_and_of_pytorch_train_together_and_agree_with_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    spec = spec_of(True, "stop.rounds=10", "algorithm.lower_steps=10", "problem.hidden=16")
    found, local = run(tmp_path, spec, None)
    assert local.starts == dict.fromkeys(["localhost", *NAMES], 1)
    expected = fb.run(spec, tmp_path / "alone")
    for one, other in ((found.x, expected.x), (found.y, expected.y)):
        for a, b in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert found.history[-1]["test_accuracy"] == pytest.approx(expected.history[-1]["test_accuracy"], abs=0.01)


def leaves(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
