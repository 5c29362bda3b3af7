"""The rows of table 1: what an outer iteration costs, from the ledger of a run and from a trace of its rounds."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from ..federation import cohort_size
from ..spec import Spec
from .study import StudyRun
from .trace import loops, trace


def cost_row(run: StudyRun, spec: Spec, summary: dict[str, Any]) -> dict[str, Any]:
    """One row: the cost that was measured, and the paper's values. The summary is that of a run of the spec."""
    values = spec.to_mapping()["algorithm"]
    iterations = summary["iterations"]
    clients = iterations * cohort_size(values["participation"], spec.data.clients)
    accounts = summary["ledger"].values()
    traced = trace(spec, iterations)
    return {
        "algorithm": run.label,
        "N": values["N"],
        "T": values.get("T"),
        "rounds_per_iteration": summary["rounds"] / iterations,
        "paper": run.paper.get("rounds"),
        "formula": run.paper.get("formula"),
        "loops": len(loops([one.step for one in trace(_looping(run, spec), 1)[0]])),
        "paper_loops": run.paper.get("loops"),
        "bytes_up": sum(account["bytes_up"] for account in accounts) / clients,
        "bytes_down": sum(account["bytes_down"] for account in accounts) / clients,
        "gradient_samples": fmean(sum(one.gradients for one in rounds) for rounds in traced),
        "product_samples": fmean(sum(one.products for one in rounds) for rounds in traced),
        "paper_samples": run.paper.get("samples"),
    }


def _looping(run: StudyRun, spec: Spec) -> Spec:
    """The spec with N and T of at least 2, so that each of its loops is repeated."""
    values = spec.to_mapping()["algorithm"]
    longer = {f"algorithm.{name}": max(2, values[name]) for name in ("N", "T") if name in values}
    return replace(run, overrides={**run.overrides, **longer}).spec(spec.seed)
