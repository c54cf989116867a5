"""Steps of the GPU benchmarks: each is measured once, written to a file, and not repeated.

A step is one measurement, such as the speed of one mode of a model. A script that is killed or runs
out of time resumes with the steps that its file lacks.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_runs import write_result


@dataclass(kw_only=True)
class Steps:
    """Results of one model, step by step, from this call and earlier ones."""

    model: str
    body: dict[str, Any]
    """The model's part of the file: `steps` by name, and the `seconds` that they took."""
    deadline: float
    """Time on `time.monotonic()` after which no step starts."""
    save: Callable[[], None]
    """Function that writes the file."""
    finished: bool = True
    """Whether no step was left out after the deadline."""
    failures: list[str] = field(default_factory=list)
    """A line for each requested step that failed, in this call or an earlier one."""

    def measure_once(
        self, name: str, measure_step: Callable[[], Any], *, needed: bool = False
    ) -> Any:
        """Return a step's result as JSON, and measure it unless the file has it.

        A step that is not `needed` returns None after the deadline.
        """
        done = self.body.setdefault("steps", {})
        if name not in done:
            if not needed and time.monotonic() > self.deadline:
                self.finished = False
                return None
            start = time.monotonic()
            done[name] = measure_step()
            self.body["seconds"] = self.body.get("seconds", 0.0) + time.monotonic() - start
            self.save()
            print(f"measured: {self.model}, {name}", flush=True)
        if isinstance(done[name], dict) and "error" in done[name]:
            self.failures.append(
                f"{self.model}, {name}: FAILED: {done[name]['error'].splitlines()[0]}"
            )
        return done[name]


def report_exit_code(all_steps: Sequence[Steps]) -> int:
    """Print the failures and return 1 if there are any, 3 if steps are left, else 0."""
    failures = [line for steps in all_steps for line in steps.failures]
    if failures:
        print("\n".join(failures), flush=True)
        return 1
    if all(steps.finished for steps in all_steps):
        return 0
    print("not finished within --seconds: run the same command again to resume", file=sys.stderr)
    return 3


def run_step(measure_step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a measurement, or its error, and free the device's memory."""
    import torch

    try:
        return measure_step()
    except Exception as error:  # the other steps still run
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def open_results(
    path: Path | None, machine: dict[str, Any], models: Sequence[str]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the content of a result file, and a function that writes it.

    Steps of these models are dropped if they were measured on another machine.

    Args:
        path: The file; None for results that are only printed.
        machine: Description of this machine (`gpu_runs.describe_device`).
        models: Names of the models that this call measures.
    """
    content = json.loads(path.read_text()) if path and path.exists() else {"models": {}}
    for model in models:
        if content["models"].get(model, {}).get("machine") != machine:
            content["models"][model] = {"machine": machine}

    def save() -> None:
        if path:
            write_result(path, content)

    return content, save
