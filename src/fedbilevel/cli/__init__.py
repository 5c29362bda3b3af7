"""The command line, `fedbilevel`.

Each module has the functions of a group of commands, and this one collects them. An error that this library
raises on purpose is printed as one line on the standard error. The exit code is then 2 for wrong settings and 1
for a failure that happens later.
"""

from __future__ import annotations

import logging
import sys

import typer

from ..errors import FedBilevelError
from ..runtime import prepare_runtime
from .advise import diagnose_command
from .after import compare_command, export_command, show_command, watch_command
from .bench import bench_command
from .data import data_app
from .federation import audit_command, federate_command, server_command, site_command
from .leaderboard import leaderboard_command
from .new import new_command
from .runs import check_command, run_command
from .shared import err
from .studies import reproduce_command, theory_command, tune_command

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated bilevel optimisation.")
# `fedbilevel --help` lists the commands in this order.
app.command("new")(new_command)
app.command("run")(run_command)
app.command("show")(show_command)
app.command("watch")(watch_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("site")(site_command)
app.command("server")(server_command)
app.command("audit")(audit_command)
app.command("federate")(federate_command)
app.command("check")(check_command)
app.command("diagnose")(diagnose_command)
app.command("reproduce")(reproduce_command)
app.command("leaderboard")(leaderboard_command)
app.command("tune")(tune_command)
app.command("theory")(theory_command)
app.command("bench")(bench_command)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command line, and turn an error of this library into one line and an exit code."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    prepare_runtime()
    try:
        app()
    except FedBilevelError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
