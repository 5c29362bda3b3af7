"""`python -m fedbilevel.bench CASE SECONDS` measures one case and prints its row as JSON."""

from __future__ import annotations

import json
import sys

from ..runtime import prepare_runtime
from .cases import CASES
from .measure import measure
from .ours import profile

if __name__ == "__main__":
    prepare_runtime()
    case = CASES[sys.argv[1]]
    row = measure(case, float(sys.argv[2]))
    print(json.dumps(row | {"profile": profile(case, row["ours_s"])}))
