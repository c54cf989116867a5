"""The stages of a study: what is run, through which pool, until the ledger holds it. Each resumes
where it stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import cast

from launcher.base.talk import say
from launcher.calibration.procedure import calibrate, calibrated
from launcher.calibration.study_cost import planned_main_run
from launcher.experiments.ladder import stage_specs
from launcher.experiments.transferred_values import (
    SPEND,
    SPENT,
    SearchOutcome,
    Transferred,
    asked,
    searched,
    target_guess,
    transferred,
    verdicts_at,
)
from launcher.plan.study import PLAN_FILE, Study
from launcher.study.decide import fit_key, fitted, ladder_specs
from launcher.study.gates import (
    find_failed_check,
    find_failed_transfer,
    refuse_failed,
    transfer_gate,
)
from launcher.study.pools import start_pool
from launcher.study.progress import CHECK, FIT, Reporter
from launcher.study.search_runs import run_search
from launcher.study.winner_reruns import replay_search
from proxies.core import canon
from proxies.core.branches import own_flops
from proxies.core.errors import ExitCode, ForerunError
from proxies.core.notation import counted, format_main_run_share
from proxies.core.spec import RunResult, RunSpec
from proxies.external.metric_files import UNIT_KEYS, units_agree
from sweeps.run.budget import BudgetCaps, StudyBudget, record_driven, spent
from sweeps.run.driver import GRACE_SECONDS, drive
from sweeps.run.kinds import kinds_of, kinds_text
from sweeps.run.pool import Pool
from sweeps.search.source import RunSource, StaticSource
from sweeps.store.errors import BudgetSpent, ClusterUnfit, FolderRemoved, SweepError
from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.live import (
    DriverProgress,
    DriverState,
    RunningRun,
    StudyState,
    read_live,
    write_live,
)
from sweeps.store.lock import FileIdentity, born

LOOK_SECONDS = 1.0
"""Between two looks that `forerun status` can take."""


class Accounts:
    """Opened once there are devices to pay for."""

    def __init__(
        self, study_dir: Path, ledger: Ledger, caps: BudgetCaps, num_devices: Mapping[str, float]
    ) -> None:
        """Take over what a killed driver had spent, as its last look tells; then count our own
        devices, by kind.
        """
        self._study_dir, self._ledger = study_dir, ledger
        self._driver = len(ledger.records("driver")) - 1
        last = read_live(study_dir)
        if last is not None and last.driver < self._driver:
            record_driven(ledger, last.driver, last.stretch, last.seconds, last.by_kind)
        self.budget = StudyBudget(caps, ledger, num_devices=num_devices)
        self._stretch = 0
        self._looked = -LOOK_SECONDS

    def look(
        self,
        stage: str,
        running: tuple[RunningRun, ...],
        num_queued: int,
        left_seconds: float | None,
        state: Callable[[], StudyState],
    ) -> None:
        """Tell how things stand, about once a second at most."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        by_kind = self.budget.device_seconds
        write_live(
            self._study_dir,
            DriverState(
                driver=self._driver,
                pid=os.getpid(),
                born=born(os.getpid()),
                host=socket.gethostname(),
                stage=stage,
                stretch=self._stretch,
                seconds=self.budget.seconds,
                device_seconds=sum(by_kind.values()),
                by_kind=by_kind,
                left_seconds=left_seconds,
                study=state(),
                num_queued=num_queued,
                running=running,
                at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ),
        )

    def write_down(self) -> None:
        """Record what this driver took since it last did. On a full disk, or taken over, it cannot:
        said already.
        """
        with contextlib.suppress(SweepError):
            self.budget.write_down(self._driver, self._stretch)
            self._stretch += 1


SPEND_ROUNDS = 3
"""Rounds of what verdicts ask for, each time that `--spend` is given."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedStudyError(ForerunError):
    """The user, or the system, asked to stop; everything finished is recorded."""

    exit_code = ExitCode.INTERRUPTED


def bank_key(spec: RunSpec) -> str:
    """What runs must agree on to share a bank."""
    return canon.content_id(
        [
            spec.shape,
            spec.batch_tokens,
            spec.data_id,
            spec.numerics,
            spec.optimizer,
            spec.factory,
            spec.command,
        ]
    )


def _require_there(ledger: FileIdentity) -> None:
    """Check that the ledger file is still at the path where it was opened.

    Raises:
        FolderRemoved: The file was removed or replaced.
    """
    if not ledger.is_there():
        raise FolderRemoved(
            f"{ledger.path} was removed or replaced while the study ran: what it held is lost "
            "unless you put it back, "
            "and nothing was recorded since; then run the same command again"
        )


class Runner:
    """Runs stages of one study; the pool starts when there is something to run, and is shared by
    the stages.
    """

    def __init__(self, study: Study, ledger: Ledger, reporter: Reporter | None = None) -> None:
        """`study` has a corpus that was verified: workers trust it. `reporter` prints how far the
        study is; None: one for all stages.
        """
        self.study, self.ledger = calibrated(study, ledger), ledger
        self.reporter = reporter or Reporter(self.study, ledger)
        self._pool: Pool | None = None
        self._kinds: tuple[str, ...] = ()  # by worker, that of its device
        self._accounts: Accounts | None = None
        self._stopping = self._warned_of_units = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Runner]:
        """Signals caught, pool closed at the end. A second signal ends at once."""
        # A signal that is ignored at the start (`nohup`) stays ignored.
        caught = [one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN]
        before = [signal.signal(number, self._on_signal) for number in caught]
        try:
            yield self
        finally:
            self.reporter.close()
            for number in caught:
                # closing takes a second, and leaves processes if cut short
                signal.signal(number, signal.SIG_IGN)
            try:
                if self._pool is not None:
                    self._pool.close()
            finally:
                for number, handler in zip(caught, before, strict=True):
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            raise KeyboardInterrupt
        self._stopping = True
        say(
            f"\nstopping: workers save their runs, {GRACE_SECONDS:g} s at most (interrupt again to "
            "abort)"
        )

    def _warn_of_units(self, spec: RunSpec, result: RunResult) -> None:
        """Warn once if a user's trainer seems to log its two losses in different units."""
        training, validation = result.last_train_loss_nats, result.loss_nats
        if self._warned_of_units or spec.command is None or training is None or validation is None:
            return
        if not units_agree(training, validation):
            self._warned_of_units = True
            say(
                f"warning: a run ended with a training loss of {training:.4g} and a validation "
                "loss of "
                f"{validation:.4g}: if they are not both in nats per token, declare their units: "
                f"{UNIT_KEYS}"
            )

    def _interrupted(self) -> InterruptedStudyError:
        done = counted(self.ledger.num_runs, "run")
        folder = self.study.study_dir
        return InterruptedStudyError(
            f"stopped with {done} recorded; `forerun run {folder / PLAN_FILE} --study {folder}` "
            "continues"
        )

    def drive(
        self, label: str, source: RunSource, specs: Sequence[RunSpec], *, noise: bool = False
    ) -> None:
        """Run a source until it is done; `specs` cost what the runs it will give do, for the
        estimate of the time left. `noise`: their gradient noise is measured on the way.

        Raises:
            InterruptedStudyError: a signal came.
            BudgetSpent: a cap of the plan is reached.
            FolderRemoved: the ledger is gone.
        """
        cluster, overrun = self.study.plan.cluster, ""
        pool = self._workers()
        accounts = self._opened_accounts()
        budget, reporter = accounts.budget, self.reporter

        place = FileIdentity(self.study.study_dir / LEDGER_NAME)

        def should_stop() -> bool:
            nonlocal overrun
            _require_there(place)
            left = reporter.progress.batch_left_seconds
            # also while workers are silent
            accounts.look(label, last.running, last.num_queued, left, reporter.draw)
            overrun = overrun or budget.overrun()
            return self._stopping or bool(overrun)

        last = DriverProgress(outcomes=(), lost=(), notes=(), running=(), num_queued=0)
        parts: dict[str, float] = {}  # FLOPs done, by run that has not ended
        flops = own_flops(specs)
        work = {spec.id: each for spec, each in zip(specs, flops, strict=True)}
        mean_work = sum(flops) / max(1, len(flops))
        reporter.progress.ask(float(sum(flops)))

        def progress(event: DriverProgress) -> None:
            nonlocal last, parts
            for sentence in (*event.lost, *event.notes):
                say(f"{label}: {sentence}")
            if event.running is not last.running:  # a second of reports has the same
                parts = {
                    r.run_id: work.get(r.run_id, mean_work) * r.step / r.num_steps
                    for r in event.running
                }
            for outcome in event.outcomes:  # the last look was before it
                parts.pop(outcome.spec.id, None)
                self._warn_of_units(outcome.spec, outcome.result)
            last = event
            reporter.ended(event.outcomes, event.running, sum(parts.values()))

        try:
            drive(
                source,
                pool,
                self.ledger,
                self.study.study_dir,
                num_slots_for=lambda spec: spec.numerics.num_slots,
                bank_key_for=bank_key,
                max_attempts=cluster.max_attempts,
                noise=noise,
                kinds=self._kinds,
                progress=progress,
                should_stop=should_stop,
                refusal=budget.refusal,
            )
        finally:
            reporter.pause()
            accounts.write_down()
        self._check_stop()
        if overrun:
            raise BudgetSpent(overrun)

    def _begin(self, stage: str) -> None:
        """A stage begins: how its runs compute is chosen first, so its specs are another study's
        from here on.
        """
        self.reporter.begin(stage)
        self.study = calibrate(self.study, self.ledger, stage, self._workers, self._check_stop)

    def _workers(self) -> Pool:
        """The pool, started if need be."""
        if self._pool is None:
            self._pool = start_pool(self.study, self._check_stop)
            self._kinds = kinds_of(self._pool, self._check_stop)
            if set(self._kinds) != {"cpu"}:
                say(f"workers: {kinds_text(self._kinds)}")
        return self._pool

    def _opened_accounts(self) -> Accounts:
        """What the workers' time is written down in; they are started. Raises ClusterUnfit."""
        if self._accounts is None:
            cluster = self.study.plan.cluster
            kinds = {
                *self._kinds,
                *(each.kind for each in spent(self.ledger, cluster.caps).by_kind),
            }
            if unpriced := [
                kind for kind in kinds if cluster.max_usd and cluster.caps.price(kind) is None
            ]:
                names = ", ".join(
                    kind or "a device that did not tell its name" for kind in sorted(unpriced)
                )
                raise ClusterUnfit(
                    f"cluster.max_usd = {cluster.max_usd:g}: no price is known of {names}: add it "
                    "to "
                    "cluster.usd_per_device_hour_by_kind, or set cluster.usd_per_device_hour for "
                    "all others"
                )
            self._accounts = Accounts(
                self.study.study_dir, self.ledger, cluster.caps, cluster.num_devices(self._kinds)
            )
        return self._accounts

    def _check_stop(self) -> None:
        if self._stopping:
            raise self._interrupted()

    def check(self) -> dict[str, canon.Json]:
        """The study's coordinate checks, by name; what has not been checked yet is.

        Raises:
            UnseenError: a command trains, whose activations nobody sees.
        """
        from launcher.study.coordinate_checks import checks_of

        self.reporter.begin(CHECK)
        return checks_of(
            self.study, self.ledger, self._workers, self._check_stop, self.reporter.checked
        )

    def sweep(self) -> SearchOutcome:
        """The search at the base width; of a model that is not ours, once its coordinates are
        checked.

        Raises:
            GateError: the user's own model fails the check.
                Or the winning trial, run again, gave something else.
        """
        if self.study.factory is not None:
            refuse_failed(self.study, self.ledger, find_failed_check(self.study, self.check()))
        self._begin("sweep")
        run_search(self.study, self.ledger, self.drive, bank_key)
        self._replay()
        return searched(self.study, self.ledger)

    def _replay(self) -> None:
        """Run the winning trial again elsewhere, its hours counted. Raises GateError if it
        differs.
        """

        def check() -> None:
            self._check_stop()
            self._workers()
            if said := self._opened_accounts().budget.overrun():
                raise BudgetSpent(said)

        head = self.ledger.head_hash
        try:
            replay_search(self.study, self.ledger, self._workers, bank_key, check)
        finally:
            if self._accounts is not None and self.ledger.head_hash != head:
                self._accounts.write_down()

    def transfer(self, *, spend: bool = False) -> Transferred:
        """Every test's valleys, larger sizes after smaller ones, and what their verdicts ask for in
        addition.

        Args:
            spend: go on asking where verdicts cannot tell, `SPEND_ROUNDS` times more at most; each
                time is recorded, so that a resumed study asks for the same runs.
        """
        self.sweep()
        self._begin("transfer")
        self._transfer_runs()
        if spend:
            self._spend()
        return transferred(self.study, self.ledger)

    def _spend(self) -> None:
        """Go on asking, from where an interrupted spending stopped."""
        before = sum(
            int(cast(dict[str, int], record.body)["rounds"])
            for record in self.ledger.records(SPENT)
        )
        for _ in range(len(self.ledger.records(SPEND)) - before, SPEND_ROUNDS):
            found = transferred(self.study, self.ledger)
            verdicts = verdicts_at(self.study, self.ledger, found, target_guess(self.study))
            if transfer_gate(verdicts).outcome != "cannot_tell":
                break
            self.ledger.append(
                SPEND, str(len(self.ledger.records(SPEND))), {"together": verdicts.together.outcome}
            )
            if not self._transfer_runs():
                say("transfer: the verdicts ask for no more runs")
                break
        rounds = len(self.ledger.records(SPEND)) - before
        self.ledger.append(SPENT, str(len(self.ledger.records(SPENT))), {"rounds": rounds})

    def _transfer_runs(self) -> int:
        """Run what the tests want until they want nothing; how many that were."""
        num_runs = 0
        while True:
            results = self.ledger.results()
            tests = asked(self.study, self.ledger)
            needed = {
                test.name: [spec for spec in test.specs if spec.id not in results] for test in tests
            }
            specs = {spec.id: spec for missing in needed.values() for spec in missing}
            if not specs:
                return num_runs
            sentence = ", ".join(
                f"{len(missing)} for {name}" for name, missing in needed.items() if missing
            )
            sentence += ", some for both" if sum(map(len, needed.values())) > len(specs) else ""
            say(
                f"transfer: {counted(len(specs), 'run')} ({sentence}), "
                f"{self._share(specs.values())}"
            )
            self.drive("transfer", StaticSource(specs.values(), bank_key), list(specs.values()))
            num_runs += len(specs)

    def ladder(self) -> list[RunSpec]:
        """The scaling ladder at the transferred hyperparameters, some of it at other rates too; its
        rungs alone.

        Raises:
            GateError: the values do not transfer, rungs are missing, and nobody accepted that.
        """
        found = self.transfer()
        self._begin("ladder")
        specs = ladder_specs(self.study, found)
        results = self.ledger.results()
        missing = [spec for spec in stage_specs(self.study, specs) if spec.id not in results]
        if missing:
            verdicts = verdicts_at(self.study, self.ledger, found, target_guess(self.study))
            refuse_failed(self.study, self.ledger, find_failed_transfer(verdicts))
            num_rungs = len({spec.id for spec in missing} & {spec.id for spec in specs})
            checks = counted(len(missing) - num_rungs, "run")
            say(
                f"ladder: {counted(num_rungs, 'rung')} and {checks} at other rates that check some "
                "of them, "
                f"{self._share(missing)}"
            )
            self.drive("ladder", StaticSource(missing, bank_key), missing, noise=True)
        self.reporter.begin(FIT)
        if self.ledger.find("fit", fit_key(specs)) is None:
            self._check_stop()
            from scaling_fits.fit_file import to_file

            fit = fitted(self.study, self.ledger, specs)
            self.ledger.append("fit", fit_key(specs), to_file(fit))
        self._check_stop()
        return specs

    def _share(self, specs: Iterable[RunSpec]) -> str:
        """As `forerun estimate` has it, until the ladder is fitted."""
        share = float(sum(own_flops(specs))) / planned_main_run(self.study).flops["causal"]
        return f"{format_main_run_share(share)} as guessed"
