"""The algorithms: one paper, one file. To add one, write its file and add its line here."""

from .aggitd import AggITD

ALGORITHMS = {"fbo-aggitd": AggITD}

__all__ = ["ALGORITHMS", "AggITD"]
