"""What the commands print at the end of a run."""

from __future__ import annotations

from typing import Any

from ..algorithms import AggITD
from ..problems import HyperRepresentation
from ..report import ledger_table, metrics_table, outcome_table, text_curve
from ..run import Result
from ..spec import Spec
from .shared import out, say

# Table 2 of the paper: the rounds of FBO-AggITD to an accuracy of 90 %, by partition and number of upper steps.
PAPER_ROUNDS = {("shards", 1): 520, ("shards", 5): 305, ("iid", 1): 530, ("iid", 5): 195}

LEFT_OUT = 5  # the most clients that are told by name


def show(spec: Spec, result: Result) -> None:
    """Print what was run, how long it took, its accuracy and its ledger, and where its files are."""
    summary, accuracy = result.summary, result.summary["accuracy"]
    name = spec.to_mapping()["algorithm"]["name"]
    where = "" if spec.problem.makes_data else f", {spec.data.name} split by {spec.data.partition}"
    say(
        f"{name}, {summary.get('clients', spec.data.clients)} clients{where}, seed {spec.seed}: "
        f"{summary['iterations']:,} outer iterations, {summary['rounds']:,} rounds, "
        f"{summary['seconds']:.1f} s of training"
    )
    if accuracy["last"] is not None:
        say(
            f"test accuracy: {accuracy['last']:.2%} at the end, {accuracy['best']:.2%} at best, "
            f"{accuracy['mean']:.2%} in the mean of the last {accuracy['window']:,} rounds"
        )
        if "train_accuracy" in summary:
            trained = summary["train_accuracy"]
            say(f"training accuracy: {trained['last']:.2%} at the end, {trained['mean']:.2%} in the same mean")
        say(text_curve(result.history))
        out.print(outcome_table(summary))
        beside_the_paper(spec, summary)
    out.print(metrics_table(summary))
    if "privacy" in summary:
        spent = summary["privacy"]
        say(
            f"privacy, {spent['mode']}: epsilon = {spent['epsilon']:.3g} at delta = {spent['delta']:g} "
            f"for all data of one client (noise {spent['noise']:g}); see docs/privacy.md"
        )
    if "steps" in summary:
        found = summary["steps"]
        values = ", ".join(f"{name} = {value:.3g}" for name, value in found["values"].items())
        say(f"automatic steps, found in {found['rounds']} rounds, at the end: {values}")
    for note in summary.get("notes", ()):
        say(f"note: {note}")
    out.print(ledger_table(summary))
    left = summary.get("left_out", {})
    for client, why in list(left.items())[:LEFT_OUT]:
        say(f"left out: client {client}: {why}")
    if len(left) > LEFT_OUT:
        say(f"left out: {len(left) - LEFT_OUT} more clients; see left_out in summary.json")
    if not summary["iterations"]:
        say("no outer iteration was done: the limits of [stop] end the run before the first one; raise them")
    else:
        say(f"rounds per outer iteration: {summary['rounds'] / summary['iterations']:g}")
    if result.folder is not None:
        say(f"curve: {result.folder / 'curve.png'}    all files: {result.folder}/")


def beside_the_paper(spec: Spec, summary: dict[str, Any]) -> None:
    """Print the rounds to 90 % and those of the paper, if the paper has this set-up."""
    steps = getattr(spec.algorithm, "upper_steps", None)
    paper = PAPER_ROUNDS.get((spec.data.partition, steps)) if isinstance(steps, int) else None
    theirs = isinstance(spec.problem, HyperRepresentation) and isinstance(spec.algorithm, AggITD)
    if theirs and spec.data.name == "mnist" and spec.data.clients == 100 and paper is not None:
        ours = summary["rounds_to"]["0.90"]
        say(f"rounds to 90 %: ours {ours or 'not reached'}, the paper's {paper}")
