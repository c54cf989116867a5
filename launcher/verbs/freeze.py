"""Verbs from the decision to the main run: freeze, launch, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from launcher.gates import GateError
from launcher.verbs.options import answer, folder_of, frozen_argument, json_option, study_argument
from launcher.verbs.problems import OptionProblems
from proxies import canon
from proxies.canon import Json

if TYPE_CHECKING:
    from launcher.frozen import Decision, ParameterGroup
    from launcher.gates import Gate
    from sweeps.ledger import Ledger

GATES = ("coordinates", "transfer", "fit", "data", "ladder_tuned")
MOST_REASON = 2000
"""Characters: a reason is shown in one piece wherever the config is."""


class CannotTellError(ValueError):
    """A gate could not be decided, and nobody accepted that."""


@click.command()
@study_argument
@click.option("--accept", "accepts", multiple=True, type=click.Choice(GATES), help="Freeze although this gate failed.")
@click.option("--reason", default="", help="Why; recorded, and shown wherever the config is.")
@json_option
def freeze(study_dir: Path, accepts: tuple[str, ...], reason: str, as_json: bool) -> None:
    """Write the frozen launch config of STUDY. Exit 3 if a gate failed, 4 if one cannot tell, unless accepted."""
    from launcher.assembly import unfit
    from launcher.evidence import decision_of, gather
    from launcher.frozen_folder import write_frozen
    from launcher.opening import as_begun, open_ledger, recorded_study
    from launcher.report import write_report
    from launcher.report_body import accepted, report_body
    from sweeps.ledger import Ledger
    from sweeps.redaction import secret_in

    if bool(accepts) != bool(reason.strip()):
        raise click.UsageError("--accept GATE and --reason TEXT go together")
    if len(reason) > MOST_REASON:
        raise click.UsageError(f"--reason: {len(reason)} characters, at most {MOST_REASON} are kept: name a document")
    if said := secret_in(reason):
        raise click.UsageError(f"--reason holds what looks like {said}: it is kept, and shown wherever the config is")
    Ledger.read(study_dir)  # refuses a folder that holds no study, before anything is written
    study = recorded_study(study_dir)
    with open_ledger(study) as ledger:
        study = as_begun(study, ledger)
        found = gather(study, ledger)
        decision = decision_of(study, found)
        layout = _proven_layout(decision)
        _check_accepts(found.gates, accepts)
        given = {**accepted(ledger, found.gates), **dict.fromkeys(accepts, reason.strip())}
        _refuse(found.gates, given, study_dir)
        _record(ledger, found.gates, accepts, reason.strip())
        body = report_body(study, ledger, found)
        evidence: dict[str, Json] = {key: body[key] for key in ("gates", "accepted", "spend", "ledger_head")}
        evidence["run_ids"] = cast(list[Json], sorted(ledger.results()))
        evidence["transfer"], evidence["fit"] = body["transfer"], body["fit"]
        attested = {"evidence": evidence, "layout": layout, "environment": _environment()}
        path = write_frozen(study_dir / "frozen", decision, attested)
        write_report(study_dir, body)
    lines = [f"frozen {decision.digest}", f"  {path}", *_decision_lines(decision)]
    lines += [f"  gate {gate} accepted: {why}" for gate, why in given.items()]
    wanted = unfit(decision)  # then another trainer is
    lines += [
        f"next: forerun {f'export {path.parent} --to torchtitan' if wanted else f'launch {path.parent} --steps 20'}"
    ]
    answer(as_json, {"digest": decision.digest, "path": str(path), "accepted": given}, "\n".join(lines))


def _proven_layout(decision: Decision) -> dict[str, Json]:
    """What rank 0 holds under the decision's degrees, the real shape sharded over a fake group of all ranks.

    Raises:
        NoParallelismError: the degrees do not divide the shape or the batch, or torch refuses to shard it so.
    """
    from launcher.estimates.dry_shard import dry_shard
    from launcher.estimates.layout import layout_of
    from launcher.estimates.parallelism import NoParallelismError

    layout = layout_of(decision)
    if problems := layout.problems(decision.shape, decision.batch_tokens):
        raise NoParallelismError(problems)
    found = dry_shard(decision.shape, layout)
    return {"num_ranks": found.num_ranks, "local_parameters": [*found.local_parameters]}


def _environment() -> dict[str, Json]:
    """Where the config was frozen, in versions."""
    import importlib.metadata
    import platform

    names = ("forerun", "torch", "numpy", "scipy", "optuna", "ray", "mup")
    versions: dict[str, Json] = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), "machine": platform.machine(), "versions": versions}


def _check_accepts(gates: tuple[Gate, ...], accepts: tuple[str, ...]) -> None:
    passed = {gate.name for gate in gates if gate.outcome == "passed"}
    if idle := [name for name in accepts if name in passed]:
        raise click.UsageError(f"--accept {', '.join(idle)}: passed, there is nothing to accept")


def _record(ledger: Ledger, gates: tuple[Gate, ...], accepts: tuple[str, ...], reason: str) -> None:
    """Record that someone accepts what these gates found; of that alone, not of what they may find later."""
    by_name = {gate.name: gate for gate in gates}
    for name in dict.fromkeys(accepts):
        gate = by_name[name]
        body = {"gate": name, "outcome": gate.outcome, "found": gate.reason, "reason": reason}
        ledger.append("accepted", f"{name}/{len(ledger.records('accepted'))}", body)


def _refuse(gates: tuple[Gate, ...], given: dict[str, Json], study_dir: Path) -> None:
    closed = [gate for gate in gates if gate.outcome != "passed" and gate.name not in given]
    if not closed:
        return
    lines = [f"gate {gate.name} {gate.outcome.replace('_', ' ')}: {gate.reason}" for gate in closed]
    accept = " ".join(f"--accept {gate.name}" for gate in closed)
    lines.append(f"mend it, or freeze all the same: forerun freeze {study_dir} {accept} --reason TEXT")
    failed = any(gate.outcome == "failed" for gate in closed)
    raise (GateError if failed else CannotTellError)("\n".join(lines))


def _start(group: ParameterGroup) -> str:
    return {"gain": "1", "bias": "0"}.get(group.kind[-4:], f"std {group.init_std:.4g}")


def _decision_lines(decision: Decision) -> list[str]:
    shape, schedule, predicted = decision.shape, decision.learning_rate.schedule, decision.predicted
    return [
        f"  width {shape.width}, {shape.num_layers} layers",
        (
            f"  {schedule.num_steps} steps of {decision.batch_tokens} tokens, {schedule.kind}, "
            f"warmup {schedule.warmup_steps} steps, clip {decision.clip_norm}"
        ),
        *(f"  {g.kind}: lr {g.learning_rate:.4g}, init {_start(g)}" for g in decision.groups),
        (
            f"  expected loss {predicted.loss_nats:.4f} nats [{predicted.low_nats:.4f}, {predicted.high_nats:.4f}] "
            f"at level {predicted.level:g}"
        ),
    ]


@click.command()
@frozen_argument
@click.option("--data", "data_dir", type=click.Path(path_type=Path), help="Corpus folder; default: the study's.")
@click.option("--out", "out_dir", type=click.Path(path_type=Path), help="Run folder; default: run/ beside the config.")
@click.option("--steps", "stop_after", type=click.IntRange(min=1), help="Save and stop after this step of the run.")
@click.option("--dry-run", is_flag=True, help="Print the exact launch line and stop.")
@json_option
def launch(
    frozen: Path, data_dir: Path | None, out_dir: Path | None, stop_after: int | None, dry_run: bool, as_json: bool
) -> None:
    """Train a FROZEN config with the embedded trainer under torchrun; resumes from its newest good checkpoint."""
    from launcher.assembly import unfit
    from launcher.attestations import attest
    from launcher.launch import launch as start
    from launcher.launch import launch_line
    from launcher.launch_file import read_launch
    from launcher.opening import recorded_study

    decision = read_launch(frozen)
    folder = folder_of(frozen)
    corpus = data_dir or recorded_study(folder.resolve().parents[1]).corpus
    if corpus is None:
        raise click.UsageError("the study has no corpus: name one with --data")
    out = out_dir or folder / "run"
    line = launch_line(frozen, corpus, out, stop_after)
    if dry_run:
        if problems := unfit(decision):
            raise OptionProblems(problems)
        answer(as_json, {"line": line}, line)
        return
    outcome = start(frozen, corpus, out, stop_after)
    body = cast(dict[str, Json], canon.to_json(outcome))
    attest(folder, "launch", decision.digest, {"outcome": body, "line": line, "parity": _parity(out)})
    loss = outcome.validation_loss_nats
    text = f"{outcome.event} at step {outcome.step} of {decision.learning_rate.schedule.num_steps}"
    text += f", validation loss {loss:.4f} nats" if loss is not None else ""
    text += f" after {outcome.num_restarts} restarts" if outcome.num_restarts else ""
    text += f": {outcome.reason}" if outcome.reason else ""
    answer(as_json, {**body, "out": str(out)}, text)
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)


def _parity(run_dir: Path) -> Json:
    """What the ranks found in their live optimizer groups; None if they did not come so far."""
    path = run_dir / "parity.json"
    return canon.parse(path.read_bytes()) if path.exists() else None


@click.command()
@study_argument
@json_option
def report(study_dir: Path, as_json: bool) -> None:
    """Write report.html and report.json of STUDY, as far as it has come; works while a driver runs."""
    from launcher.report import write_report
    from launcher.report_body import recorded_body

    body = recorded_body(study_dir)
    write_report(study_dir, body)
    answer(as_json, body, f"wrote {study_dir / 'report.html'} and {study_dir / 'report.json'}")
