"""The command line: `fedbilevel run`, `fedbilevel federate`, `fedbilevel data`, `fedbilevel check`, ....

Errors that this library raises on purpose are one line on the standard error; the exit code is 2 for wrong
settings and 1 for what went wrong later.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import data as data_room
from . import processes
from .algorithms import AggITD
from .check import check as check_problem
from .console import Bar, err, logger
from .engines import load_chaos
from .errors import DataUnavailable, FedBilevelError, SettingsError, UnknownName
from .federate import load_site
from .federate.commands import federated, join, kit_run, need_flare, simulate_run
from .problems import Quadratic
from .report import ledger_table, outcome_table, study_table, text_curve
from .run import Observer, Result, run
from .runtime import prepare_runtime
from .spec import Spec, describe, load_spec
from .studies import QUICK, Runs, load_study, reproduce, study_names, tune
from .studies.theory import run_theory, theory_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated bilevel optimisation.")
data_app = typer.Typer(no_args_is_help=True, help="Data sets: list, fetch, and see how they are split.")
app.add_typer(data_app, name="data")
out = Console()

JOBS = min(2, os.cpu_count() or 1)  # two at a time fill the cores where one waits for its sequential parts
PAPER_ROUNDS = {("shards", 1): 520, ("shards", 5): 305, ("iid", 1): 530, ("iid", 5): 195}  # table 2, FBO-AggITD

SpecFile = Annotated[
    str | None, typer.Argument(metavar="[SPEC.toml]", help="A spec; the demo's settings when left out.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")]


@app.command("run")
def run_command(
    spec: SpecFile = None,
    sets: Sets = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    log: Annotated[str | None, typer.Option(help="Also log to: tensorboard.")] = None,
    print_spec: Annotated[bool, typer.Option("--print-spec", help="Show every setting and end.")] = False,
    or_digits: Annotated[
        bool, typer.Option("--or-digits", help="Use the embedded digits if the data set cannot be fetched.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no tables.")] = False,
    chaos: Annotated[
        Path | None, typer.Option("--chaos", metavar="FILE", help="Faults on purpose, as this TOML says.")
    ] = None,
    on_divergence: Annotated[
        str, typer.Option(help="stop, or restart: go back and halve the step size that is likely to blame.")
    ] = "stop",
    distributed: Annotated[
        bool, typer.Option("--distributed", help="One of several processes of a run; see docs/scale.md.")
    ] = False,
) -> None:
    """Run a spec into a folder: history, summary, checkpoint and curve."""
    chosen = load_spec(spec, sets or [])
    if print_spec:
        sys.stdout.write(describe(chosen))
        return
    if folder is None:
        raise SettingsError("--out is missing; name a folder for the run, as in --out runs/first")
    if on_divergence not in ("stop", "restart"):
        raise SettingsError(f"--on-divergence {on_divergence} is wrong: use stop or restart")
    faults = None if chaos is None else load_chaos(chaos)
    if distributed:
        processes.join()
        quiet = quiet or not processes.is_first()
    if or_digits:
        chosen = _or_digits(chosen, spec, sets or [])
    with ExitStack() as stack:
        observers: list[Observer] = []
        if log and processes.is_first():
            observers.append(stack.enter_context(logger(log, folder)))
        if not quiet:
            observers.append(stack.enter_context(Bar()))
        options: dict[str, Any] = dict(resume=resume, overwrite=overwrite, on_divergence=on_divergence)
        try:
            result = run(chosen, folder, observers=observers, chaos=faults, **options)
        except KeyboardInterrupt:  # here, as Typer would end without a word
            stack.close()
            err.print("interrupted; the run goes on from its last checkpoint with --resume")
            raise typer.Exit(130) from None
    if not quiet:
        _show(chosen, result)


@app.command("site")
def site_command(
    site: Annotated[Path, typer.Argument(metavar="SITE.toml", help="The site's data and problem.")],
    kit: Annotated[Path | None, typer.Option("--kit", help="The site's kit, as provisioned.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Load everything once before joining.")] = True,
) -> None:
    """Take part in a federation with data of one's own; without --kit, only check that they load."""
    if check or kit is None:
        made = load_site(site)
        p, q = made.problem.size_x, made.problem.size_y
        _say(
            f"{made.data.lower.rows} lower and {made.data.upper.rows} upper rows; {p} parameters of x and {q} of y"
        )
        if made.privacy is not None:
            limit = "no limit" if made.privacy.limit is None else f"epsilon at most {made.privacy.limit:g}"
            _say(f"what leaves the site is clipped and has noise {made.privacy.noise:g}; {limit}")
    if kit is not None:
        join(site, kit)


@app.command("federate")
def federate_command(
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC.toml]", help="A spec; the preset `sites` when left out.")
    ] = None,
    sets: Sets = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder.")] = None,
    kit: Annotated[Path | None, typer.Option("--kit", help="The kit of an admin, as provisioned.")] = None,
    simulate: Annotated[
        int | None, typer.Option("--simulate-sites", min=1, help="Start a server and this many sites here.")
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="The registered sites, A,B,C; those that are up if left out.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep kits and logs of simulated sites here.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Failed jobs after which another goes on.")] = 5,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a site has for a step.")] = 600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no tables.")] = False,
) -> None:
    """Run a spec on a real federation: sites that keep their data, and send vectors."""
    need_flare()
    if folder is None:
        raise SettingsError("--out is missing; name a folder for the run, as in --out runs/first")
    if (kit is None) == (simulate is None):
        raise SettingsError("give either --kit DIR, of a federation that runs, or --simulate-sites N")
    names, build = sites.split(",") if sites else None, partial(federated, spec, sets or [])
    with ExitStack() as stack:
        observers: list[Observer] = [] if quiet else [stack.enter_context(Bar())]
        say = (lambda text: None) if quiet else (lambda text: err.print(text, markup=False, highlight=False))
        options: dict[str, Any] = dict(resume=resume, overwrite=overwrite, observers=observers)
        options |= dict(restarts=restarts, timeout=timeout, say=say)
        try:
            if simulate is not None:
                chosen = build(simulate)
                result = simulate_run(chosen, folder, work=work, **options)
            else:
                assert kit is not None
                chosen, result = kit_run(build, folder, kit, names, **options)
        except KeyboardInterrupt:
            stack.close()
            err.print("interrupted; the run goes on from its last checkpoint with --resume")
            raise typer.Exit(130) from None
    if not quiet:
        _show(chosen, result)


@app.command("check")
def check_command(spec: SpecFile = None, sets: Sets = None) -> None:
    """Compare every derivative of a spec's problem with finite differences."""
    task = load_spec(spec, sets or []).task()
    report = check_problem(task.problem, task.clients)
    out.print(report.table())
    raise typer.Exit(0 if report.ok else 1)


@app.command("reproduce")
def reproduce_command(
    names: Annotated[list[str], typer.Argument(help="Tables and figures, such as table2 figure3; or: all.")],
    folder: Annotated[Path, typer.Option("--out", help="Where tables, figures and report.html go.")] = Path(
        "results"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ... of every run.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A short version; what it writes says so.")] = False,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Run this share of the rounds.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = JOBS,
    runs: Annotated[Path, typer.Option(help="Where runs are kept, by the digest of their spec.")] = Path(
        "runs/studies"
    ),
) -> None:
    """Run what is missing of the paper's tables and figures, and set ours beside theirs."""
    chosen = [load_study(name) for name in (study_names() if "all" in names else names)]
    if quick or share < 1:
        chosen = [study.shortened(QUICK if quick else share) for study in chosen]
    for section in reproduce(chosen, seeds=seeds, out=folder, runs=Runs(runs), jobs=jobs, console=err):
        out.print(study_table(section.title, section.rows))
        _say(section.remarks)
    _say(f"report: {folder / 'report.html'}")


@app.command("tune")
def tune_command(
    grid: Annotated[
        list[str], typer.Option(metavar="KEY=V1;V2", help="One axis; KEY1,KEY2=A1,A2;B1,B2 for pairs.")
    ],
    spec: SpecFile = None,
    sets: Sets = None,
    folder: Annotated[Path, typer.Option("--out", help="Where runs, table and best.toml go.")] = Path("runs/tune"),
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = JOBS,
) -> None:
    """Run a grid of settings and write the best as a spec."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = tune(spec, sets or [], grid, seeds=seeds, out=folder, jobs=jobs, console=err)
    out.print(study_table("Grid, best first", rows))
    _say(f"best settings: {folder / 'best.toml'}")


@app.command("theory")
def theory_command(
    spec: SpecFile = None,
    sets: Sets = None,
    radius: Annotated[float, typer.Option(min=0.0, help="The ball in which M and sigma_2 are taken.")] = 10.0,
    iterations: Annotated[int, typer.Option("--K", min=1, help="Outer iterations K of Theorem 1.")] = 10_000,
    folder: Annotated[Path | None, typer.Option("--out", help="Also run the study of the bounds.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version of the study.")] = False,
) -> None:
    """Every constant of the paper for a quadratic problem; with --out, measured beside the bounds.

    The problem, N and λ are those of the spec; problem.name=quadratic is set unless the spec has it.
    """
    chosen = load_spec(spec, [*(sets or []), "problem.name=quadratic"] if spec is None else sets or [])
    if not isinstance(chosen.problem, Quadratic) or not isinstance(chosen.algorithm, AggITD):
        raise SettingsError("theory needs problem.name = 'quadratic' and algorithm.name = 'fbo-aggitd'")
    constants = chosen.problem.make(chosen.data.clients, chosen.seed).constants(radius)
    out.print(theory_table(constants, chosen.algorithm.N, chosen.algorithm.lam, K=iterations))
    if folder is not None:
        run_theory(folder, quick)
        _say(f"figures, theory.md and theory.json: {folder}/")


@app.command("bench")
def bench_command(
    cases: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="One case; may be given again.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every case: about ten minutes.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Show the names of the cases and end.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Where bench.json and bench.png go.")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time for a case's interleaved repeats.")] = 25.0,
) -> None:
    """One outer iteration beside its floor and beside PyTorch, measured in turn in one run."""
    from fedbilevel_bench import CASES, STANDARD, bench, profile_table, ratio_table

    if names:
        _say("\n".join(CASES))
        return
    chosen = list(CASES) if every else cases or [STANDARD]
    for name in chosen:
        if name not in CASES:
            raise UnknownName("case", name, CASES)
    rows = bench(chosen, folder, seconds, lambda row: out.print(profile_table(row)))
    out.print(ratio_table(rows))
    if rows[0]["torch_loop_s"] is None:
        _say("the PyTorch rivals were left out: they need the extra fedbilevel[bench], and a cohort of ten")
    if folder is not None:
        _say(f"bench.json and bench.png: {folder}/")


@data_app.command("list")
def data_list() -> None:
    """The data sets, and which are in the cache."""
    out.print(data_room.dataset_table())


@data_app.command("fetch")
def data_fetch(
    name: str, force: Annotated[bool, typer.Option("--force", help="Fetch again, whatever is there.")] = False
) -> None:
    """Fetch a data set into the cache and verify it."""
    folder = data_room.fetch(name, force=force)
    where = folder if data_room.files_of(name) else "embedded, nothing to fetch"
    _say(f"{name}: {where}")


@data_app.command("show")
def data_show(
    spec: SpecFile = None,
    sets: Sets = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw it, as PNG or SVG.")] = None,
) -> None:
    """How a spec splits its data across clients: a table, and a picture of the labels."""
    chosen = load_spec(spec, sets or [])
    settings = chosen.data
    if settings.name == data_room.GENERATED:
        raise SettingsError("data.name = 'generated' has no labels to show; choose a problem with a data set")
    dataset, parts = settings.split(chosen.seed)
    out.print(data_room.label_table(dataset.train_targets, parts, dataset.classes))
    if picture is not None:
        labels, kind = dataset.train_targets, settings.partition
        try:
            data_room.draw_labels(picture, labels, parts, dataset.classes, dataset=dataset.name, kind=kind)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--picture {picture} cannot be written: {error}") from None
        _say(f"picture: {picture}")


def main() -> None:
    """Entry point: one line and an exit code for an error that was foreseen."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    prepare_runtime()
    try:
        app()
    except FedBilevelError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def _or_digits(chosen: Spec, spec: str | None, sets: list[str]) -> Spec:
    """The same run on the embedded digits, if its data set cannot be had."""
    try:
        chosen.data.fetch()
    except DataUnavailable as error:
        err.print(f"{error}\nGoing on with the embedded digits.", markup=False, style="yellow")
        return load_spec(spec, [*sets, "data.name=digits"])
    return chosen


def _say(text: str) -> None:
    """A plain line; the terminal wraps it."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(spec: Spec, result: Result) -> None:
    """Plain numbers at the end: what was run, what it took, the ledger, where the files are."""
    summary, accuracy = result.summary, result.summary["accuracy"]
    name = spec.to_mapping()["algorithm"]["name"]
    where = "" if spec.problem.makes_data else f", {spec.data.name} split by {spec.data.partition}"
    _say(
        f"{name}, {spec.data.clients} clients{where}, seed {spec.seed}: "
        f"{summary['iterations']:,} outer iterations, {summary['rounds']:,} rounds, "
        f"{summary['seconds']:.1f} s of training"
    )
    if accuracy["last"] is not None:
        _say(
            f"test accuracy: {accuracy['last']:.2%} at the end, {accuracy['best']:.2%} at best, "
            f"{accuracy['mean_last_100']:.2%} in the mean of the last 100 evaluations"
        )
        _say(text_curve(result.history))
        out.print(outcome_table(summary))
        _beside_the_paper(spec, summary)
    if "privacy" in summary:
        spent = summary["privacy"]
        _say(
            f"privacy, {spent['mode']}: epsilon = {spent['epsilon']:.3g} at delta = {spent['delta']:g} "
            f"for all data of one client (noise {spent['noise']:g}); see docs/privacy.md"
        )
    out.print(ledger_table(summary))
    if summary["iterations"]:
        _say(f"rounds an outer iteration: {summary['rounds'] / summary['iterations']:g}")
    _say(f"curve: {result.folder / 'curve.png'}    all files: {result.folder}/")


def _beside_the_paper(spec: Spec, summary: dict[str, Any]) -> None:
    steps = getattr(spec.algorithm, "upper_steps", None)
    paper = PAPER_ROUNDS.get((spec.data.partition, steps)) if isinstance(steps, int) else None
    if spec.data.name == "mnist" and spec.data.clients == 100 and paper is not None:
        ours = summary["rounds_to"]["0.90"]
        _say(f"rounds to 90 %: ours {ours or 'not reached'}, the paper's {paper}")
