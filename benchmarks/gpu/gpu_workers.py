"""Trial-steps per second of 1, 2 and 4 workers on one GPU, with time slicing and with MPS.

    python benchmarks/gpu/gpu_workers.py --models 1M,10M --json build/gpu/gpu_workers.json

It is a part of `make gpu`.

Each process trains one trial in the fastest mode of `gpu.py`: compiled, recorded as CUDA graphs,
with the fused loss, bfloat16. Of four that have all begun, one trains, then two, then four; the
others wait. Before, one process alone compiles: the others take its kernels from torch's own cache
on disk.

MPS (NVIDIA's Multi-Process Service) is started for one set of processes with pipes and logs in a
temporary folder, and told to quit after it, whatever happened but SIGKILL; nothing of the card is
set. A program that cannot reach the service goes on without it and does not say so, so figures
count only where the service names a server. Where there is no `nvidia-cuda-mps-control`, where it
does not start, or where a process fails under it, the reason is the finding, and MPS is not tried
again: what hangs takes minutes.

Needs, resumes and ends as `gpu.py`.
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

from gpu import ALL, Settings, Steps, attempted, begun, main, processes

NUMBERS = (1, 2, 4)
TURNS = "in turns"
CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
ORDER_SECONDS = 20.0
"""That the service may take to start, or to carry out an order."""
QUIT = "quit -t 10"
"""Servers that have not ended by then are forced to."""
MOST_SAID = 600


class MpsError(Exception):
    """What the service did not do here."""


def by_mps(measured: Callable[[Mapping[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """What processes with such an environment give, or why MPS is not to be had: `refused`."""
    with tempfile.TemporaryDirectory() as name:
        places = {variable: f"{name}/{variable}" for variable in PLACES}
        for place in places.values():
            Path(place).mkdir()
        started, found = False, dict[str, Any]()
        try:
            ordered(name, places, "-d")
            started = True
            found = measured(places)
            if not any(
                line.strip().isdigit()
                for line in ordered(name, places, order="get_server_list").splitlines()
            ):
                raise MpsError("no process reached the service: they ran without it")
        except (MpsError, RuntimeError) as error:
            found = {"refused": f"{error}"[:MOST_SAID]}
        finally:  # also where a signal came before the start had ended
            try:
                ordered(name, places, order=QUIT)
            except MpsError as error:
                found |= {"not_quit": f"{error}"[:MOST_SAID]} if started else {}
    return found


def ordered(folder: str, places: Mapping[str, str], *options: str, order: str = "") -> str:
    """What the control program says to an option or an order.

    Raises:
        MpsError: there is no such program, or it failed.
    """
    if (control := shutil.which(CONTROL)) is None:
        raise MpsError(f"{CONTROL} is not on PATH")
    what = f"{CONTROL} {' '.join(options) or order}"
    # A file, for the service inherits it and would keep a pipe open.
    with (Path(folder) / "said").open("w+") as said:
        try:
            code = subprocess.run(
                [control, *options],
                input=order + "\n",
                stdout=said,
                stderr=said,
                text=True,
                check=False,
                env={**os.environ, **places},
                timeout=ORDER_SECONDS,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{what}: {error}") from error
        said.seek(0)
        text = said.read()
    if code:
        raise MpsError(f"{what}: exit code {code}: {text.strip() or 'it said nothing'}")
    return text


def refused(all_steps: list[Steps]) -> str:
    """Why MPS was not to be had before, in this call or an earlier one; empty: it was, or was not
    tried.
    """
    done = (step for steps in all_steps for step in steps.body.get("steps", {}).values())
    return next(
        (str(step["refused"]) for step in done if isinstance(step, dict) and "refused" in step), ""
    )


def workers(
    settings: Settings, folder: Path, file: dict[str, Any], save: Callable[[], None]
) -> list[Steps]:
    """All models and batches into the file; small ones first, for they have most to gain."""
    all_steps, corpora = begun(settings, folder, file, save)
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
            if why := refused(all_steps):
                ways["by MPS"] = partial(dict, refused=why)
            case = f"{batch} sequences"
            found = {
                way: steps.once(f"{case}, {way}", partial(attempted, ways[way])) or {}
                for way in ways
            }
            lines += [f"{steps.model}, {case}, {line}" for line in findings(found)]
    print("\n".join(lines), flush=True)
    return all_steps


def findings(found: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each way of sharing, rates over that of one process among waiting ones, without
    MPS.
    """
    lines = []
    for way, one in found.items():
        if "refused" in one:
            lines.append(f"{way}: left out: {one['refused'].splitlines()[0]}")
        elif len(rates := one.get("trial_steps_per_second", ())) > 1:
            single = found[TURNS].get("trial_steps_per_second", rates)[0]
            each = [
                f"{number}: {rate:.1f} ({rate / single:.2f})"
                for number, rate in zip(NUMBERS, rates, strict=False)
            ]
            lines.append(f"{way}: trial-steps a second (over one's) of processes {', '.join(each)}")
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as any error: MPS is told to quit
    sys.exit(main(sys.argv[1:], workers, __doc__))
