"""Conclusions of the demo's plan on other data and seeds.

    python benchmarks/cpu/demo_variants.py --json benchmarks/results/demo_variants.json

A variant is the plan of `forerun init --preset demo` on other text that is installed with Python
and forerun, or with another seed of the search. For each variant the results have the verdict over
width in muP and in the control (the standard parametrization) with their intervals, both coordinate
checks, and the processor seconds of the whole process tree, including Ray's workers. Variants in
the file are not run again unless the plan has changed. A variant takes about 330 processor seconds.
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

from process_tree import machine, measure_command

STDLIB = "stdlib"
INSTALLED = ("--exclude", "site-packages", "--exclude", "dist-packages")
PYTHON = ("--suffix", ".py")
VARIANTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "the demo's": (STDLIB, (*PYTHON, *INSTALLED), ()),
    "search seed 1": (STDLIB, (*PYTHON, *INSTALLED), ("search.seed=1",)),
    "without tests": (STDLIB, (*PYTHON, *INSTALLED, "--exclude", "test"), ()),
    "tests alone": ("stdlib/test", PYTHON, ()),
    "numpy": ("numpy", PYTHON, ()),
    "scipy": ("scipy", PYTHON, ()),
    "sympy": ("sympy", PYTHON, ()),
    "networkx": ("networkx", PYTHON, ()),
    "torch": ("torch", PYTHON, ()),
    "torch's C++ headers": ("torch/include", ("--suffix", ".h"), ()),
}
"""Text, options of `forerun tokenize`, and values of the plan in place of the preset's."""
VERSIONS = ("forerun", "torch", "numpy", "scipy", "sympy", "networkx")
FORERUN = (sys.executable, "-m", "launcher")


def folder_of(text: str) -> Path:
    """Where a variant's text lies: the standard library, or a package that forerun's installation
    brings.
    """
    name, _, below = text.partition("/")
    if name == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"]) / below
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations, name
    return Path(next(iter(found.submodule_search_locations))) / below


def commands(name: str) -> dict[str, list[str]]:
    """The lines of a variant, in its folder."""
    text, options, values = VARIANTS[name]
    changed = [part for value in values for part in ("--set", value)]
    study = ["plan.toml", "--study", "study", *changed]
    return {
        "tokenize": ["tokenize", str(folder_of(text)), "--out", "corpus", *options],
        "init": ["init", "--preset", "demo", "--data", "corpus"],
        "check": ["check", *study],
        "transfer": ["transfer", *study],
    }


def asked(folder: Path, line: list[str]) -> Any:
    """The answer of a command as JSON, whatever its verdict."""
    done = subprocess.run(
        [*FORERUN, *line, "--json"], cwd=folder, stdout=subprocess.PIPE, check=False
    )
    return json.loads(done.stdout)


def variant(name: str, folder: Path) -> dict[str, Any]:
    """Run one, and what it found."""
    cpu_seconds, lines = {}, commands(name)
    for verb, line in lines.items():
        # A verdict is an exit code, and no failure here.
        shell = f"cd {shlex.quote(str(folder))} && {shlex.join([*FORERUN, *line])}; code=$?"
        shell += "; [ $code = 0 ] || [ $code = 3 ] || [ $code = 4 ]"
        cost = measure_command(
            ["sh", "-c", shell], {"OMP_NUM_THREADS": "1"}, folder / f"{verb}.log"
        )
        cpu_seconds[verb] = round(cost.cpu_seconds, 1)
    checks, transfer = asked(folder, lines["check"]), asked(folder, lines["transfer"])
    test = next(test for test in transfer["tests"] if test["axis"] == "width")
    over_width, control = test["verdict"], test["verdict"]["control"]
    manifest = json.loads((folder / "corpus" / "manifest.json").read_text())
    return {
        "plan_sha256": plan_sha256(folder),
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
        "num_runs": len(test["runs"]),  # those of the control among them
        "cpu_seconds": cpu_seconds,
    }


def plan_sha256(folder: Path) -> str:
    """Of what the preset writes."""
    return hashlib.sha256((folder / "plan.toml").read_bytes()).hexdigest()


def preset_sha256() -> str:
    """Of what it writes now."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            [*FORERUN, *commands("numpy")["init"]],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return plan_sha256(Path(folder))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """How often each verdict came out, by arm."""
    arms = {arm: [one[arm]["outcome"] for one in found.values()] for arm in ("mup", "control")}
    return {
        arm: {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        for arm, outcomes in arms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, required=True, help="Where the findings go, and what is there already."
    )
    parser.add_argument("--only", choices=list(VARIANTS), action="append", help="Some variants.")
    options = parser.parse_args()
    body = json.loads(options.json.read_text()) if options.json.exists() else {"variants": {}}
    now = preset_sha256()
    found = {name: one for name, one in body["variants"].items() if one["plan_sha256"] == now}
    for name in options.only or VARIANTS:
        if name in found:
            continue
        with TemporaryDirectory() as folder:
            found[name] = variant(name, Path(folder))
        one = found[name]
        print(
            f"{name}: muP {one['mup']['outcome']}, control {one['control']['outcome']}", flush=True
        )
        body = {
            "command": (
                "python benchmarks/cpu/demo_variants.py"
                " --json benchmarks/results/demo_variants.json"
            ),
            "machine": machine(),
            "versions": {package: importlib.metadata.version(package) for package in VERSIONS},
            "outcomes": summary(found),
            "variants": found,
        }
        options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
