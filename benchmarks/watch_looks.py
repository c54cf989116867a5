"""What a look of the watch costs: the first at a long log, later ones at the lines that came since, and memory.

    python benchmarks/watch_looks.py --lines 100000 --ranks 8

A log like the embedded trainer's is made up: 9 numbers and the time of each rank a line.
Told in seconds of this process's CPU, as JSON: the first reading; a reading after 10 more lines; the same by a reader
that begins anew, which is what a look without memory costs; the judgement; and the bytes a line that are kept.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "launcher"))

from planted_watch import decision
from process_tree import machine

from launcher.watch.judge import judge
from launcher.watch.logs.keys import Keys
from launcher.watch.logs.readings import Readings
from launcher.watch.logs.sources import source_of

NUM_MORE = 10


def write(path: Path, first: int, last: int, num_ranks: int) -> None:
    """Append lines."""
    rng = random.Random(first)
    with path.open("a") as file:
        for step in range(first, last + 1):
            row = {
                "step": step, "train_loss_nats": 2 + 3 / step**0.5 + rng.gauss(0, 0.01), "grad_norm": 1 + rng.random(),
                "lr": 1e-3, "clip_norm": 1.0, "tokens": step * 256, "tokens_per_second": 1e4 + rng.random(),
                "seconds": 0.0256, "mfu": 0.4,
                "rank_seconds": [0.02 + 0.001 * rng.random() for _ in range(num_ranks)],
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


def reader(path: Path, num_steps: int) -> Readings:
    """One that has read nothing."""
    keys = Keys({})
    return Readings(source_of(str(path), keys), keys, "ab" * 32, num_steps)


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    asked = parser.parse_args(arguments)
    num_steps = asked.lines + 1000
    decided, seconds = decision(num_steps), {}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, 1, asked.lines, asked.ranks)

        def timed(name: str, follower: Readings) -> None:
            began = time.process_time()
            found = follower.read()
            seconds[name] = time.process_time() - began
            assert found.columns.step >= asked.lines
            began = time.process_time()
            judge(decided, found.columns, now=time.time())
            seconds["judgement"] = time.process_time() - began

        following = reader(path, num_steps)
        timed("first_reading", following)
        write(path, asked.lines + 1, asked.lines + NUM_MORE, asked.ranks)
        timed("later_reading", following)
        timed("anew", reader(path, num_steps))
        del following
        tracemalloc.start()
        following = reader(path, num_steps)
        following.read()
        kept, most = tracemalloc.get_traced_memory()
    body = {
        "num_lines": asked.lines, "num_ranks": asked.ranks, "seconds": seconds,
        "later_over_anew": seconds["later_reading"] / seconds["anew"], "kept_bytes_a_line": kept / asked.lines,
        "most_bytes_a_line": most / asked.lines, "machine": machine(),
    }  # fmt: skip
    print(json.dumps(body, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
