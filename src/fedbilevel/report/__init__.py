"""Tables and figures from the records of runs."""

from .figures import draw_curve
from .tables import ledger_table, outcome_table
from .terminal import text_curve

__all__ = ["draw_curve", "ledger_table", "outcome_table", "text_curve"]
