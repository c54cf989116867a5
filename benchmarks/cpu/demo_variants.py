"""Verdicts of the demo's plan on other data and with another seed.

    python benchmarks/cpu/demo_variants.py --json benchmarks/results/demo_variants.json

A variant is the plan of `forerun init --preset demo` on other text that is installed with Python
and forerun, or with another seed of the search. For each variant the script prints the verdicts and
writes: the verdict over width in muP and in the control (the standard parametrization) with their
intervals, both coordinate checks, and the processor seconds of the whole process tree, including
Ray's workers.

A variant takes about 330 processor seconds; all variants take about half an hour of two cores.
Variants in the file are not run again unless the plan has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import measure_command
from result_files import describe_machine, write_result

STDLIB = "stdlib"
WITHOUT_PACKAGES = ("--exclude", "site-packages", "--exclude", "dist-packages")
PYTHON = ("--suffix", ".py")
VARIANTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "the demo's": (STDLIB, (*PYTHON, *WITHOUT_PACKAGES), ()),
    "search seed 1": (STDLIB, (*PYTHON, *WITHOUT_PACKAGES), ("search.seed=1",)),
    "without tests": (STDLIB, (*PYTHON, *WITHOUT_PACKAGES, "--exclude", "test"), ()),
    "tests alone": ("stdlib/test", PYTHON, ()),
    "numpy": ("numpy", PYTHON, ()),
    "scipy": ("scipy", PYTHON, ()),
    "sympy": ("sympy", PYTHON, ()),
    "networkx": ("networkx", PYTHON, ()),
    "torch": ("torch", PYTHON, ()),
    "torch's C++ headers": ("torch/include", ("--suffix", ".h"), ()),
}
"""Variants by name: the text, options of `forerun tokenize`, and plan values that replace those of
the preset."""
VERSIONS = ("forerun", "torch", "numpy", "scipy", "sympy", "networkx")
"""Packages whose versions are recorded."""
FORERUN = (sys.executable, "-m", "forerun")


def find_text_folder(text: str) -> Path:
    """Return the folder of a variant's text, in the standard library or in an installed package."""
    name, _, subfolder = text.partition("/")
    if name == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"]) / subfolder
    package = importlib.util.find_spec(name)
    assert package is not None and package.submodule_search_locations, name
    return Path(next(iter(package.submodule_search_locations))) / subfolder


def list_commands(name: str) -> dict[str, list[str]]:
    """Return the arguments of forerun for each step of a variant, to be run in its folder."""
    text, options, values = VARIANTS[name]
    plan_options = [part for value in values for part in ("--set", value)]
    study = ["plan.toml", "--study", "study", *plan_options]
    return {
        "tokenize": ["tokenize", str(find_text_folder(text)), "--out", "corpus", *options],
        "init": ["init", "--preset", "demo", "--data", "corpus"],
        "check": ["check", *study],
        "transfer": ["transfer", *study],
    }


def read_answer(folder: Path, line: list[str]) -> Any:
    """Run a command with --json and return its answer, whatever its verdict."""
    process = subprocess.run(
        [*FORERUN, *line, "--json"], cwd=folder, stdout=subprocess.PIPE, check=False
    )
    return json.loads(process.stdout)


def run_variant(name: str, folder: Path) -> dict[str, Any]:
    """Run one variant and return its row."""
    cpu_seconds, lines = {}, list_commands(name)
    for verb, line in lines.items():
        # Exit codes 3 and 4 are verdicts, not failures: the shell replaces them by 0, because
        # `measure_command` raises an error for any other code.
        shell = f"cd {shlex.quote(str(folder))} && {shlex.join([*FORERUN, *line])}; code=$?"
        shell += "; [ $code = 0 ] || [ $code = 3 ] || [ $code = 4 ]"
        cost = measure_command(
            ["sh", "-c", shell], {"OMP_NUM_THREADS": "1"}, folder / f"{verb}.log"
        )
        cpu_seconds[verb] = round(cost.cpu_seconds, 1)
    checks, transfer = read_answer(folder, lines["check"]), read_answer(folder, lines["transfer"])
    test = next(test for test in transfer["tests"] if test["axis"] == "width")
    over_width, control = test["verdict"], test["verdict"]["control"]
    manifest = json.loads((folder / "corpus" / "manifest.json").read_text())
    return {
        "plan_sha256": hash_plan(folder),
        "text": " ".join([VARIANTS[name][0], *VARIANTS[name][1], *VARIANTS[name][2]]),
        "vocab_size": manifest["vocab_size"],
        "coordinates": {key: check["outcome"] for key, check in checks["coordinates"].items()},
        "mup": {
            key: over_width[key]
            for key in ("outcome", "regret_nats", "drift_octaves_per_doubling", "noise_nats")
        },
        "control": {
            key: control[key] for key in ("outcome", "regret_nats", "drift_octaves_per_doubling")
        },
        "num_runs": len(test["runs"]),  # with the control's runs
        "cpu_seconds": cpu_seconds,
    }


def hash_plan(folder: Path) -> str:
    """Return the sha256 of the plan in a folder."""
    return hashlib.sha256((folder / "plan.toml").read_bytes()).hexdigest()


def hash_preset_plan() -> str:
    """Return the sha256 of the plan that the preset writes now."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            [*FORERUN, *list_commands("numpy")["init"]],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return hash_plan(Path(folder))


def count_outcomes(variants: dict[str, Any]) -> dict[str, Any]:
    """Return how often each verdict occurred, for muP and for the control."""
    arms = {
        arm: [variant[arm]["outcome"] for variant in variants.values()]
        for arm in ("mup", "control")
    }
    return {
        arm: {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        for arm, outcomes in arms.items()
    }


def main() -> None:
    """Run the variants that the file lacks, and write the result after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, required=True, help="Result file; variants in it are not run again."
    )
    parser.add_argument(
        "--only", choices=list(VARIANTS), action="append", help="Run only these variants."
    )
    options = parser.parse_args()
    earlier = json.loads(options.json.read_text())["variants"] if options.json.exists() else {}
    plan_sha256 = hash_preset_plan()
    variants = {name: row for name, row in earlier.items() if row["plan_sha256"] == plan_sha256}
    for name in options.only or VARIANTS:
        if name in variants:
            continue
        with TemporaryDirectory() as folder:
            row = variants[name] = run_variant(name, Path(folder))
        print(
            f"{name}: muP {row['mup']['outcome']}, control {row['control']['outcome']}", flush=True
        )
        result = {
            "command": (
                "python benchmarks/cpu/demo_variants.py"
                " --json benchmarks/results/demo_variants.json"
            ),
            "machine": describe_machine(),
            "versions": {package: importlib.metadata.version(package) for package in VERSIONS},
            "outcomes": count_outcomes(variants),
            "variants": variants,
        }
        write_result(options.json, result)


if __name__ == "__main__":
    main()
