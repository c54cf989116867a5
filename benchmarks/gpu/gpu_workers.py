"""Trial-steps per second of 1, 2 and 4 workers on one GPU, with time slicing and with MPS.

    python benchmarks/gpu/gpu_workers.py --models 1M,10M --json build/gpu/gpu_workers.json

It is a part of `make gpu`.

Each process trains one trial in the fastest mode of `gpu.py`: compiled, recorded as CUDA graphs,
with the fused loss, in bfloat16. Four processes start. Then one of them trains, then two, then
four, while the others wait. Before that, one process alone compiles, and the others take its
kernels from torch's cache on disk.

MPS (NVIDIA's Multi-Process Service) is started for one set of processes, with pipes and logs in a
temporary folder, and is always told to quit afterward, except after SIGKILL. No setting of the GPU
changes. A program that cannot reach the service silently runs without it, so the figures count only
if the service names a server. If there is no `nvidia-cuda-mps-control`, if it does not start, or if
a process fails under it, the result has the reason, and MPS is not tried again, because a service
that hangs takes minutes.

Requirements, resuming and exit codes are those of `gpu.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu import ALL, Settings, Steps, attempt, main, processes, start_steps

NUMBERS = (1, 2, 4)
TURNS = "in turns"
CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
ORDER_SECONDS = 20.0
"""Time limit of the service for starting and for each command, in seconds."""
QUIT = "quit -t 10"
"""Command that ends the service; servers that are still up after 10 s are killed."""
MAX_MESSAGE_CHARS = 600


class MpsError(Exception):
    """MPS is missing, or it failed."""


def by_mps(measure_processes: Callable[[Mapping[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of processes that use MPS, or the reason why it failed as `refused`."""
    with tempfile.TemporaryDirectory() as name:
        places = {variable: f"{name}/{variable}" for variable in PLACES}
        for place in places.values():
            Path(place).mkdir()
        started, result = False, dict[str, Any]()
        try:
            control_mps(name, places, "-d")
            started = True
            result = measure_processes(places)
            if not any(
                line.strip().isdigit()
                for line in control_mps(name, places, order="get_server_list").splitlines()
            ):
                raise MpsError("no process reached the service: they ran without it")
        except (MpsError, RuntimeError) as error:
            result = {"refused": f"{error}"[:MAX_MESSAGE_CHARS]}
        finally:  # also where a signal came before the start had ended
            try:
                control_mps(name, places, order=QUIT)
            except MpsError as error:
                result |= {"not_quit": f"{error}"[:MAX_MESSAGE_CHARS]} if started else {}
    return result


def control_mps(folder: str, places: Mapping[str, str], *options: str, order: str = "") -> str:
    """Run the control program with options or a command and return its output.

    Raises:
        MpsError: There is no such program, or it failed.
    """
    if (control := shutil.which(CONTROL)) is None:
        raise MpsError(f"{CONTROL} is not on PATH")
    command = f"{CONTROL} {' '.join(options) or order}"
    # A file, because the service inherits it and would keep a pipe open.
    with (Path(folder) / "said").open("w+") as output:
        try:
            code = subprocess.run(
                [control, *options],
                input=order + "\n",
                stdout=output,
                stderr=output,
                text=True,
                check=False,
                env={**os.environ, **places},
                timeout=ORDER_SECONDS,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{command}: {error}") from error
        output.seek(0)
        text = output.read()
    if code:
        raise MpsError(f"{command}: exit code {code}: {text.strip() or 'it said nothing'}")
    return text


def find_refusal(all_steps: list[Steps]) -> str:
    """Return why MPS failed in this call or an earlier one; empty if it worked or was not tried."""
    done = (step for steps in all_steps for step in steps.body.get("steps", {}).values())
    return next(
        (str(step["refused"]) for step in done if isinstance(step, dict) and "refused" in step), ""
    )


def workers(
    settings: Settings, folder: Path, file: dict[str, Any], save: Callable[[], None]
) -> list[Steps]:
    """Measure all models and batches, small ones first, because they gain most."""
    all_steps, corpora = start_steps(settings, folder, file, save)
    changes: dict[str, Any] = ALL if settings.device == "cuda" else {"fused_loss": True}
    fastest = replace(settings.plain, **changes)
    numbers, lines = [number for number in NUMBERS if number <= settings.num_processes], []
    for batch in settings.batches:
        for steps in all_steps:
            run = partial(processes, settings, steps.model, batch, corpora[steps.model])
            ways: dict[str, Callable[[], dict[str, Any]]] = {
                "alone": partial(run, [1], fastest),
                TURNS: partial(run, numbers, fastest),
                "by MPS": partial(by_mps, partial(run, numbers, fastest)),
            }
            if why := find_refusal(all_steps):
                ways["by MPS"] = partial(dict, refused=why)
            case = f"{batch} sequences"
            results = {
                way: steps.once(f"{case}, {way}", partial(attempt, ways[way])) or {} for way in ways
            }
            lines += [f"{steps.model}, {case}, {line}" for line in findings(results)]
    print("\n".join(lines), flush=True)
    return all_steps


def findings(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each way of sharing, with rates relative to one process without MPS."""
    lines = []
    for way, result in results.items():
        if "refused" in result:
            lines.append(f"{way}: left out: {result['refused'].splitlines()[0]}")
        elif len(rates := result.get("trial_steps_per_second", ())) > 1:
            single = results[TURNS].get("trial_steps_per_second", rates)[0]
            each = [
                f"{number}: {rate:.1f} ({rate / single:.2f})"
                for number, rate in zip(NUMBERS, rates, strict=False)
            ]
            lines.append(f"{way}: trial-steps a second (over one's) of processes {', '.join(each)}")
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as any error: MPS is told to quit
    sys.exit(main(sys.argv[1:], workers, __doc__))
