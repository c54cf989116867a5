"""The process that writes a run's metrics into TensorBoard's event files while they grow; `mirrors` starts it.

What was written of the run before, by an earlier launch, is written anew: an event file cannot be added to, and two of
one run would show every step twice.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from launcher.dashboards.event_writer import EventWriter
from launcher.dashboards.mirror_rows import Row, follow


def write(run_dir: Path, log_dir: Path, digest: str) -> tuple[Path, int]:
    """Follow a run until standard input ends; returns the file and the number of rows in it.

    Raises:
        OSError: the metrics cannot be read, or `log_dir` cannot be written.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    mark = f"forerun-{digest[:16]}"
    older = list(log_dir.glob(f"events.out.tfevents.*.{mark}"))
    path = log_dir / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.{mark}"
    writer = EventWriter(path)
    for file in older:
        file.unlink(missing_ok=True)

    def tell(row: Row) -> None:
        if row.goes_back:
            writer.forget_from(row.step + 1)
        writer.scalars(row.step, row.columns)

    num_rows = follow(run_dir, tell, writer.flush)
    writer.close()
    return path, num_rows


def main() -> NoReturn:
    """Do what the first line of stdin orders; answer in one line."""
    order = json.loads(sys.stdin.buffer.readline())
    try:
        path, num_rows = write(Path(order["follow"]), Path(order["log_dir"]), order["digest"])
        answer = {"path": str(path), "num_rows": num_rows}
    except OSError as error:
        answer = {"problem": f"{error.filename or order['log_dir']}: {error.strerror}"}
    print(json.dumps(answer), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
