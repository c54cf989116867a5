"""Training speed of 1, 2 and 4 workers on one GPU, with time slicing and with MPS.

    python benchmarks/gpu/gpu_workers.py --models 1M,10M --json build/gpu/gpu_workers.json

`make gpu` runs this script. It prints a line for each model and way of sharing, and writes the
trial-steps per second.

Each process trains one trial in the fastest mode of `gpu_modes.py`: compiled, recorded as CUDA
graphs, with the fused loss, in bfloat16. Four processes start. Then one of them trains, then two,
then four, while the others wait. Before that, one process alone compiles, and the others take its
kernels from torch's cache on disk.

MPS (NVIDIA's Multi-Process Service) is started for one set of processes, with pipes and logs in a
temporary folder, and always receives the command to quit afterward, except after SIGKILL. No
setting of the GPU changes. A program that cannot reach the service silently runs without it, so the
figures count only if the service names a server. If there is no `nvidia-cuda-mps-control`, if it
does not start, or if a process fails under it, the result has the reason, and MPS is not tried
again, because a service that hangs takes minutes.

Requirements, resuming and exit codes are those of `gpu_modes.py`.
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

from gpu_modes import ALL_ON, Settings, main, measure_processes, start_steps
from gpu_steps import Steps, run_step

NUMBERS = (1, 2, 4)
"""Numbers of workers that train together."""
TURNS = "in turns"
"""Name in the results of time slicing, in which the processes use the GPU in turns."""
CONTROL = "nvidia-cuda-mps-control"
"""Program that starts the service and sends commands to it."""
FOLDER_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
"""Environment variables that name the folders of the service."""
ORDER_SECONDS = 20.0
"""Time limit of the service for starting and for each command, in seconds."""
QUIT = "quit -t 10"
"""Command that ends the service; servers that are still up after 10 s are killed."""
MAX_MESSAGE_CHARS = 600
"""Characters kept of the reason why MPS failed."""


class MpsError(Exception):
    """MPS is missing, or it failed."""


def measure_with_mps(measure: Callable[[Mapping[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of processes that use MPS, or the reason why it failed as `refused`.

    Args:
        measure: Function of the service's environment variables that runs the processes.
    """
    with tempfile.TemporaryDirectory() as name:
        environment = {variable: f"{name}/{variable}" for variable in FOLDER_VARIABLES}
        for folder in environment.values():
            Path(folder).mkdir()
        started, result = False, dict[str, Any]()
        try:
            run_mps_control(name, environment, "-d")
            started = True
            result = measure(environment)
            servers = run_mps_control(name, environment, command_line="get_server_list")
            if not any(line.strip().isdigit() for line in servers.splitlines()):
                raise MpsError("no process reached the service: they ran without it")
        except (MpsError, RuntimeError) as error:
            result = {"refused": f"{error}"[:MAX_MESSAGE_CHARS]}
        finally:  # also if a signal arrives before the start has ended
            try:
                run_mps_control(name, environment, command_line=QUIT)
            except MpsError as error:
                result |= {"not_quit": f"{error}"[:MAX_MESSAGE_CHARS]} if started else {}
    return result


def run_mps_control(
    folder: str, environment: Mapping[str, str], *options: str, command_line: str = ""
) -> str:
    """Run the control program with options or a command and return its output.

    Args:
        folder: Folder for a temporary file.
        environment: Environment variables that name the folders of the service.
        options: Options of the control program.
        command_line: Command for the service, if there are no options.

    Raises:
        MpsError: There is no such program, or it failed.
    """
    if (control := shutil.which(CONTROL)) is None:
        raise MpsError(f"{CONTROL} is not on PATH")
    command = f"{CONTROL} {' '.join(options) or command_line}"
    # A file, because the service inherits it and would keep a pipe open.
    with (Path(folder) / "output").open("w+") as output:
        try:
            code = subprocess.run(
                [control, *options],
                input=command_line + "\n",
                stdout=output,
                stderr=output,
                text=True,
                check=False,
                env={**os.environ, **environment},
                timeout=ORDER_SECONDS,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{command}: {error}") from error
        output.seek(0)
        text = output.read()
    if code:
        raise MpsError(f"{command}: exit code {code}: {text.strip() or 'no output'}")
    return text


def find_refusal(all_steps: list[Steps]) -> str:
    """Return why MPS failed in this call or an earlier one; empty if it worked or was not tried."""
    done = (step for steps in all_steps for step in steps.body.get("steps", {}).values())
    return next(
        (str(step["refused"]) for step in done if isinstance(step, dict) and "refused" in step), ""
    )


def measure_workers(
    settings: Settings, folder: Path, content: dict[str, Any], save: Callable[[], None]
) -> list[Steps]:
    """Measure all models and batches, small ones first, because they gain most from sharing."""
    all_steps, corpora = start_steps(settings, folder, content, save)
    changes: dict[str, Any] = ALL_ON if settings.device == "cuda" else {"fused_loss": True}
    fastest = replace(settings.plain, **changes)
    numbers, lines = [number for number in NUMBERS if number <= settings.num_processes], []
    for batch in settings.batches:
        for steps in all_steps:
            run = partial(measure_processes, settings, steps.model, batch, corpora[steps.model])
            ways: dict[str, Callable[[], dict[str, Any]]] = {
                "alone": partial(run, [1], fastest),
                TURNS: partial(run, numbers, fastest),
                "by MPS": partial(measure_with_mps, partial(run, numbers, fastest)),
            }
            if refusal := find_refusal(all_steps):
                ways["by MPS"] = partial(dict, refused=refusal)
            case = f"{batch} sequences"
            results = {
                way: steps.measure_once(f"{case}, {way}", partial(run_step, ways[way])) or {}
                for way in ways
            }
            lines += [f"{steps.model}, {case}, {line}" for line in format_findings(results)]
    print("\n".join(lines), flush=True)
    return all_steps


def format_findings(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each way of sharing, with rates relative to one process without MPS."""
    lines = []
    for way, result in results.items():
        if "refused" in result:
            lines.append(f"{way}: left out: {result['refused'].splitlines()[0]}")
        elif len(rates := result.get("trial_steps_per_second", ())) > 1:
            single = results[TURNS].get("trial_steps_per_second", rates)[0]
            # With few processes in the settings, only the first numbers were measured.
            rate_texts = [
                f"{number}: {rate:.1f} ({rate / single:.2f})"
                for number, rate in zip(NUMBERS, rates, strict=False)
            ]
            lines.append(
                f"{way}: trial-steps per second, and ratio to one process, by number of processes: "
                f"{', '.join(rate_texts)}"
            )
    return lines


if __name__ == "__main__":
    # Raise an exception at SIGTERM, so that MPS is quit, and exit with the code that shells expect.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:], measure_workers, __doc__))
