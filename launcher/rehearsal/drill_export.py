"""The export drill: the copy in the hands of another trainer, where that is installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from launcher.base import metrics
from launcher.exporters import proof
from launcher.exporters.fidelity import ExportError
from launcher.exporters.trainers import olmo_core
from launcher.exporters.writing import template
from launcher.rehearsal.drills_ranks import LOSS_NATS
from launcher.rehearsal.results import DrillResult, judged
from launcher.rehearsal.stage import Stage
from launcher.supervisor.attempt import Job
from launcher.supervisor.launch import LOG_FILE
from proxies.core.failures import crash_of, end_of
from proxies.core.redaction import LineRedactor
from proxies.external.log_file import RedactedLog

TRAINER = "olmo-core"
LIMIT_SECONDS = 300.0
RANK_FILE = "rank.py"
_NAME, _LIMIT = "export", "the losses of the embedded trainer's uninterrupted run, within {:g} nats at every step"


def export(stage: Stage) -> DrillResult:
    """The copy, exported to olmo-core, trains the embedded trainer's run."""
    limit_nats = LOSS_NATS[stage.decision.precision]
    limit = _LIMIT.format(limit_nats)
    out = stage.path(stage.fresh("export-olmo-core"))
    try:
        python = proof.interpreter(TRAINER)
        if python is None:
            return _skipped(limit, f"{TRAINER} is not installed", proof.installing(TRAINER))
        olmo_core.export(stage.decision, out)
    except (ExportError, proof.ProofError) as error:
        return _skipped(limit, str(error), "rehearse the trainer that this config is for by hand")
    code, said = _trained(python, out, stage)
    files = list(out.glob("outputs/*/metrics.jsonl"))
    rows = metrics.read(files[0].parent) if files else []
    theirs = {int(str(row["step"])): float(str(row["train_loss_nats"])) for row in rows if "train_loss_nats" in row}
    ours = stage.losses(stage.reference())
    worst = max((abs(ours[step] - theirs[step]) for step in ours if step in theirs), default=float("inf"))
    whole = code == 0 and set(theirs) == set(ours)
    told = f"{TRAINER} trained {len(theirs)} of {len(ours)} steps of the copy, losses within {worst:.1g} nats of ours"
    return judged(
        _NAME, whole and worst <= limit_nats, told if whole else f"{told}; exit {code}: {said}",
        seen={"trainer": TRAINER, "num_steps": len(theirs), "worst_apart_nats": worst if theirs else None},
        limit=limit, advice=f"`forerun verify` says what {TRAINER} makes of the export",
    )  # fmt: skip


def _skipped(limit: str, said: str, advice: str) -> DrillResult:
    return DrillResult(name=_NAME, outcome="skipped", said=said, seen={}, limit=limit, advice=advice, needed=False)


def _trained(python: Path, out: Path, stage: Stage) -> tuple[int, str]:
    """Exit status of the exported trainer on the copy, and what it said of its end; nothing of it is left running."""
    (out / RANK_FILE).write_text(template("rank_of_export.py"))
    ranks = ["--standalone", "--nproc-per-node", str(stage.decision.parallelism.num_ranks)]
    bare = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    told = {**bare, "FORERUN_DATA": str(stage.corpus.absolute()), "OLMO_SHARED_FS": "1"}
    with contextlib.closing(RedactedLog(out / LOG_FILE, LineRedactor())) as log:
        job = Job(
            [str(python), "-m", "torch.distributed.run", *ranks, RANK_FILE], log.fileno(), folder=out, environment=told
        )
        try:
            code = job.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return 124, f"no end within {LIMIT_SECONDS:g} s, and was killed"
        finally:  # also after Ctrl-C, which does not reach its ranks
            job.clear(remote=False)
    return code, crash_of(end_of(out / LOG_FILE, 0), step=None, exit_code=code).detail
