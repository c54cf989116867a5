"""Run all GPU benchmarks on one GPU within a time limit: `make gpu PYTHON=python3`.

    python benchmarks/gpu/gpu_all.py --out build/gpu --seconds 480

Repeat the command until it exits with 0. The parts run in this order; those that no GPU has run yet
come first:

1. the tests marked `gpu`
2. the embedded trainer and the proxy (`gpu_trainer.py`), and torchtitan where it is installed
3. several workers on the GPU, with time slicing and with MPS (`gpu_workers.py`)
4. rates and shares of the peak by mode, and a plain loop (`gpu_modes.py`)
5. transfer over widths 256 to 1,024 with muP and the standard parametrization (`gpu_transfer.py`)
6. Muon's transfer, muP at width 2,048, and the transfer with a published protocol

Each part writes a file in `--out` (parts may share one) and resumes from it. A part that succeeded
with this device, torch and source does not run again. No part starts with less than half a minute
left, and a part that has started runs on. So a call of 480 seconds takes at most nine minutes, and
two more if something hangs.

Exit codes: 0, all parts are done; 1, a part failed (the others still ran); 3, parts are left, run
the command again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_runs import ROOT, describe_device, load_results, write_result

MIN_SECONDS, MAX_SECONDS = 30.0, 240.0
"""Seconds that must be left to start a part, and time limit of a part in seconds. With a limit, a
part that hangs leaves time for the others."""
HERE = Path(__file__).parent
TRANSFER_ARGUMENTS = [
    HERE / "gpu_transfer.py",
    "--out",
    "{out}",
    "--seeds",
    "1",
    "--seconds",
    "{seconds}",
]
PARTS: dict[str, list[str | Path]] = {
    "tests": [
        HERE / "gpu_tests.py",
        "--outcomes",
        "{out}/gpu-tests.json",
        "--seconds",
        "{seconds}",
    ],
    "trainer": [HERE / "gpu_trainer.py", "--out", "{out}", "--seconds", "{seconds}"],
    "torchtitan": [
        HERE / "gpu_trainer.py",
        "--ways",
        "torchtitan",
        "--out",
        "{out}",
        "--seconds",
        "{seconds}",
    ],
    "workers": [
        HERE / "gpu_workers.py",
        "--models",
        "1M,10M",
        "--json",
        "{out}/gpu_workers.json",
        "--seconds",
        "{seconds}",
    ],
    "rates": [HERE / "gpu_modes.py", "--json", "{out}/gpu_modes.json", "--seconds", "{seconds}"],
    "transfer": [*TRANSFER_ARGUMENTS, "--conditions", "mup,sp"],
    "transfer of Muon": [*TRANSFER_ARGUMENTS, "--conditions", "muon"],
    "transfer to 2,048": [*TRANSFER_ARGUMENTS, "--conditions", "mup", "--widths", "2048"],
    "published transfer": [*TRANSFER_ARGUMENTS, "--conditions", "mup", "--protocol", "published"],
}
"""Python arguments of each part, with placeholders for the output folder and the time limit.

The parts run in this order.
"""


def main(arguments: list[str]) -> int:
    """Run the remaining parts in order and return the exit code (see the module's docstring)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the results.")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="No part starts after this time."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Run tiny models on a CPU and only collect the tests."
    )
    options = parser.parse_args(arguments)
    file = options.out / "gpu-core.json"
    content = load_results(file, describe_device(), "parts")
    deadline, failed = time.monotonic() + options.seconds, False
    for name, command in PARTS.items():
        seconds_left = deadline - time.monotonic()
        if content["parts"].get(name, {}).get("exit_code") == 0:
            continue
        if seconds_left < MIN_SECONDS:
            print(
                f"gpu: no time left for {name} and later parts; run the same command again",
                file=sys.stderr,
            )
            return 1 if failed else 3
        print(f"gpu: {name}", flush=True)
        words = [
            str(word).format(out=options.out, seconds=int(min(seconds_left, MAX_SECONDS)))
            for word in command
        ]
        if options.quick:
            words.append("--collect-only" if name == "tests" else "--quick")
        start = time.monotonic()
        code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
        content["parts"][name] = {"exit_code": code, "seconds": round(time.monotonic() - start, 1)}
        write_result(file, content)
        failed = failed or code not in (0, 3)
    done = [part["exit_code"] == 0 for part in content["parts"].values()]
    return 0 if all(done) else 1 if failed else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
