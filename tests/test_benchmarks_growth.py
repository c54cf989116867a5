"""The benchmark of the driver's cost counts outcomes, blocks and bounds as it says, on a search of some trials."""

import json
import math
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import growth
growth.BLOCKS = ((4, 8), (8, 14), (900, 1000))
looks = [(n, 0.01 * n, 0.002 * n, 0.001 * n) for n in range(1, 101)]
print(json.dumps({{
    "driven": growth.driven("random", 14, Path(sys.argv[1])),
    "block": growth.block(looks, 10, 60),
    "ratio": growth.ratio([0.0, 0.7, 1.4]),
    "bound": growth.bound_row("tpe", 30, 2, 0.0),
}}))
"""


def test_costs_are_of_the_trials_they_are_told_of(tmp_path):
    program = [sys.executable, "-c", PROGRAM, tmp_path / "study"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    driven = said["driven"]
    assert (driven["outcomes"], [(b["from"], b["to"]) for b in driven["blocks"]]) == (14, [(4, 8), (8, 14)])
    assert all(0 < b["suggestion_cpu_ms"] < b["cpu_ms"] for b in driven["blocks"])
    assert 50 < driven["peak_rss_mb"] < 300
    block = said["block"]
    assert (round(block["wall_ms"], 6), round(block["cpu_ms"], 6), block["to"] - block["from"]) == (10, 2, 50)
    assert math.isclose(said["ratio"]["ratio"], math.exp(0.7))
    assert said["ratio"]["low"] < said["ratio"]["ratio"] < said["ratio"]["high"]
    assert said["bound"]["best"]["ratio"] == 1.0, "30 trials are below the bound"
