"""All that one lent GPU is asked, part by part, until the time is up: `make gpu PYTHON=python3`,
call after call.

    python benchmarks/gpu/gpu_core.py --out build/gpu --seconds 480

In order, what no GPU has run yet first: the tests marked `gpu`; the embedded trainer beside the
proxy (`gpu_trainer.py`), and torchtitan where it is installed; several workers on the GPU, by turns
and by MPS (`gpu_workers.py`); rates and shares of the peak by mode, beside a plain loop (`gpu.py`);
a transfer over widths 256 to 1,024 by muP and the standard parametrization (`gpu_transfer.py`).
Then what is worth more time: Muon's transfer; muP at width 2,048; the transfer of a published
protocol. Each has its file in `--out`, which it may share with another part, and goes on from it; a
part that has ended well on this device, torch and source is not begun again. Parts begin while half
a minute is left; what is under way then ends: a call of 480 seconds takes at most nine minutes, and
two more where something hangs.

Exit codes: 0, all is done; 1, a part failed (others were still begun); 3, parts are left: run it
again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_runs import ROOT, machine, resumed, write

LEAST_SECONDS, MOST_SECONDS = 30.0, 240.0
"""Of a part: with less it is not begun, and after so many it begins nothing more, for what hangs
must leave time."""
HERE = Path(__file__).parent
TRANSFER = [HERE / "gpu_transfer.py", "--out", "{out}", "--seeds", "1", "--seconds", "{seconds}"]
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
    "rates": [HERE / "gpu.py", "--json", "{out}/gpu.json", "--seconds", "{seconds}"],
    "transfer": [*TRANSFER, "--conditions", "mup,sp"],
    "transfer of Muon": [*TRANSFER, "--conditions", "muon"],
    "transfer to 2,048": [*TRANSFER, "--conditions", "mup", "--widths", "2048"],
    "published transfer": [*TRANSFER, "--conditions", "mup", "--protocol", "published"],
}
"""By name, the arguments of a Python: where its files go and after how many seconds it begins
nothing more."""


def main(arguments: list[str]) -> int:
    """Begin what is left, in order; see above for the exit codes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the files.")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="After which no further part is begun."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Tiny, on a CPU, tests named alone: for the tests."
    )
    asked = parser.parse_args(arguments)
    file = asked.out / "gpu-core.json"
    content = resumed(file, machine(), "parts")
    until, failed = time.monotonic() + asked.seconds, False
    for name, command in PARTS.items():
        left = until - time.monotonic()
        if content["parts"].get(name, {}).get("exit_code") == 0:
            continue
        if left < LEAST_SECONDS:
            print(
                f"gpu: {name} and what follows it is left: run the same command again",
                file=sys.stderr,
            )
            return 1 if failed else 3
        print(f"gpu: {name}", flush=True)
        words = [
            str(word).format(out=asked.out, seconds=int(min(left, MOST_SECONDS)))
            for word in command
        ]
        if asked.quick:
            words.append("--collect-only" if name == "tests" else "--quick")
        began = time.monotonic()
        code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
        content["parts"][name] = {"exit_code": code, "seconds": round(time.monotonic() - began, 1)}
        write(file, content)
        failed = failed or code not in (0, 3)
    done = [part["exit_code"] == 0 for part in content["parts"].values()]
    return 0 if all(done) else 1 if failed else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
