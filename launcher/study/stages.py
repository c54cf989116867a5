"""The stages of a study: which runs each stage makes, on which workers, until the ledger holds
them. Each stage resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence
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
from launcher.study.pools import Accounts, start_pool
from launcher.study.progress import CHECK, FIT, Reporter
from launcher.study.search_runs import run_search
from launcher.study.winner_reruns import replay_search
from proxies.core import canon
from proxies.core.branches import own_flops
from proxies.core.errors import ExitCode, ForerunError
from proxies.core.notation import counted, format_main_run_share
from proxies.core.spec import RunResult, RunSpec
from proxies.external.metric_files import UNIT_KEYS, units_agree
from sweeps.run.budget import spent
from sweeps.run.driver import GRACE_SECONDS, drive
from sweeps.run.kinds import kinds_of, kinds_text
from sweeps.run.pool import Pool
from sweeps.search.source import RunSource, StaticSource
from sweeps.store.errors import BudgetSpent, ClusterUnfit, FolderRemoved
from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.live import DriverProgress
from sweeps.store.lock import FileIdentity

SPEND_ROUNDS = 3
"""Maximum number of rounds of additional runs each time `--spend` is given."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedStudyError(ForerunError):
    """The user or the system asked the study to stop; everything finished is recorded."""

    exit_code = ExitCode.INTERRUPTED


def bank_key(spec: RunSpec) -> str:
    """Return the key that runs must share to train in one bank."""
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
            "unless you put it back, and nothing was recorded since; then run the same command "
            "again"
        )


class Runner:
    """A runner of the stages of one study. The pool of workers starts when there is something to
    run, and all stages share it.
    """

    def __init__(self, study: Study, ledger: Ledger, reporter: Reporter | None = None) -> None:
        """Take over a study.

        Args:
            study: Study whose corpus was verified; workers trust it.
            ledger: Its ledger, open for writing.
            reporter: Prints the progress; None for one that covers all stages.
        """
        self.study, self.ledger = calibrated(study, ledger), ledger
        self.reporter = reporter or Reporter(self.study, ledger)
        self._pool: Pool | None = None
        self._kinds: tuple[str, ...] = ()  # kind of device of each worker
        self._accounts: Accounts | None = None
        self.is_stopping = self._warned_of_units = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Runner]:
        """Catch signals within the block, and close the pool at its end. A second signal ends the
        process at once.
        """
        # A signal that is ignored at the start (`nohup`) stays ignored.
        caught = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        handlers = [signal.signal(number, self._on_signal) for number in caught]
        try:
            yield self
        finally:
            self.reporter.close()
            for number in caught:
                # Closing takes a second, and leaves processes behind if it is cut short.
                signal.signal(number, signal.SIG_IGN)
            try:
                if self._pool is not None:
                    self._pool.close()
            finally:
                for number, handler in zip(caught, handlers, strict=True):
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            raise KeyboardInterrupt
        self.is_stopping = True
        say(
            f"\nstopping: workers save their runs, {GRACE_SECONDS:g} s at most (interrupt again to "
            "abort)"
        )

    def warn_of_units(self, spec: RunSpec, result: RunResult) -> None:
        """Warn once if a user's trainer seems to log its two losses in different units."""
        training, validation = result.last_train_loss_nats, result.loss_nats
        if self._warned_of_units or spec.command is None or training is None or validation is None:
            return
        if not units_agree(training, validation):
            self._warned_of_units = True
            say(
                f"warning: a run ended with a training loss of {training:.4g} and a validation "
                f"loss of {validation:.4g}: if they are not both in nats per token, declare their "
                f"units: {UNIT_KEYS}"
            )

    def _build_interruption(self) -> InterruptedStudyError:
        done = counted(self.ledger.num_runs, "run")
        folder = self.study.study_dir
        return InterruptedStudyError(
            f"stopped with {done} recorded; `forerun run {folder / PLAN_FILE} --study {folder}` "
            "continues"
        )

    def drive(
        self, label: str, source: RunSource, specs: Sequence[RunSpec], *, noise: bool = False
    ) -> None:
        """Run a source until it is done.

        Args:
            label: Name of the stage in messages.
            source: Source of the runs.
            specs: Runs that cost as much as those of the source, to estimate the time left.
            noise: Whether to measure the gradient noise of the runs.

        Raises:
            InterruptedStudyError: A signal arrived.
            BudgetSpent: A cap of the plan is reached.
            FolderRemoved: The ledger was removed.
        """
        cluster = self.study.plan.cluster
        pool = self._start_workers()
        accounts = self._open_accounts()
        monitor = _DriveMonitor(self, label, specs, accounts)
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
                progress=monitor.take,
                should_stop=monitor.should_stop,
                refusal=accounts.budget.refusal,
            )
        finally:
            self.reporter.pause()
            accounts.write_down()
        self._check_stop()
        if monitor.overrun:
            raise BudgetSpent(monitor.overrun)

    def _begin_stage(self, stage: str) -> None:
        """Begin a stage. First choose how its runs are computed (calibration), which changes the
        study.
        """
        self.reporter.begin(stage)
        self.study = calibrate(
            self.study, self.ledger, stage, self._start_workers, self._check_stop
        )

    def _start_workers(self) -> Pool:
        """Return the pool; start it if need be."""
        if self._pool is None:
            self._pool = start_pool(self.study, self._check_stop)
            self._kinds = kinds_of(self._pool, self._check_stop)
            if set(self._kinds) != {"cpu"}:
                say(f"workers: {kinds_text(self._kinds)}")
        return self._pool

    def _open_accounts(self) -> Accounts:
        """Return the record of the workers' time; the workers are started.

        Raises:
            ClusterUnfit: No price is known for a device, and the plan has a cap in dollars.
        """
        if self._accounts is None:
            cluster = self.study.plan.cluster
            kinds = {
                *self._kinds,
                *(usage.kind for usage in spent(self.ledger, cluster.caps).by_kind),
            }
            if unpriced := [
                kind for kind in kinds if cluster.max_usd and cluster.caps.price(kind) is None
            ]:
                names = ", ".join(
                    kind or "a device that did not tell its name" for kind in sorted(unpriced)
                )
                raise ClusterUnfit(
                    f"cluster.max_usd = {cluster.max_usd:g}: no price is known of {names}: add it "
                    "to cluster.usd_per_device_hour_by_kind, or set cluster.usd_per_device_hour "
                    "for all others"
                )
            self._accounts = Accounts(
                self.study.study_dir, self.ledger, cluster.caps, cluster.num_devices(self._kinds)
            )
        return self._accounts

    def _check_stop(self) -> None:
        if self.is_stopping:
            raise self._build_interruption()

    def check(self) -> dict[str, canon.Json]:
        """Return the study's coordinate checks by name; run those that are missing.

        Raises:
            UnseenError: A command trains the model, and its activations cannot be seen.
        """
        from launcher.study.coordinate_checks import checks_of

        self.reporter.begin(CHECK)
        return checks_of(
            self.study, self.ledger, self._start_workers, self._check_stop, self.reporter.checked
        )

    def sweep(self) -> SearchOutcome:
        """Run the search at the base width. If the model is the user's own, its coordinates are
        checked first.

        Raises:
            GateError: The user's own model fails the check, or the winning trial gave another
                result when it was run again.
        """
        if self.study.factory is not None:
            refuse_failed(self.study, self.ledger, find_failed_check(self.study, self.check()))
        self._begin_stage("sweep")
        run_search(self.study, self.ledger, self.drive, bank_key)
        self._replay_winner()
        return searched(self.study, self.ledger)

    def _replay_winner(self) -> None:
        """Run the winning trial again elsewhere, and count its hours.

        Raises:
            GateError: The result differs.
        """

        def check() -> None:
            self._check_stop()
            self._start_workers()
            if overrun := self._open_accounts().budget.overrun():
                raise BudgetSpent(overrun)

        head = self.ledger.head_hash
        try:
            replay_search(self.study, self.ledger, self._start_workers, bank_key, check)
        finally:
            if self._accounts is not None and self.ledger.head_hash != head:
                self._accounts.write_down()

    def transfer(self, *, spend: bool = False) -> Transferred:
        """Run the loss basins of every test, larger sizes after smaller ones, and the additional
        runs that their verdicts ask for.

        Args:
            spend: Whether to continue where verdicts cannot tell, for at most `SPEND_ROUNDS` more
                rounds. Each round is recorded, so that a resumed study asks for the same runs.
        """
        self.sweep()
        self._begin_stage("transfer")
        self._run_transfer_tests()
        if spend:
            self._spend_rounds()
        return transferred(self.study, self.ledger)

    def _spend_rounds(self) -> None:
        """Run more rounds while a verdict cannot tell, from where an interrupted call stopped."""
        num_before = sum(
            int(cast(dict[str, int], record.body)["rounds"])
            for record in self.ledger.records(SPENT)
        )
        for _ in range(len(self.ledger.records(SPEND)) - num_before, SPEND_ROUNDS):
            transfer_result = transferred(self.study, self.ledger)
            verdicts = verdicts_at(
                self.study, self.ledger, transfer_result, target_guess(self.study)
            )
            if transfer_gate(verdicts).outcome != "cannot_tell":
                break
            self.ledger.append(
                SPEND, str(len(self.ledger.records(SPEND))), {"together": verdicts.together.outcome}
            )
            if not self._run_transfer_tests():
                say("transfer: the verdicts ask for no more runs")
                break
        rounds = len(self.ledger.records(SPEND)) - num_before
        self.ledger.append(SPENT, str(len(self.ledger.records(SPENT))), {"rounds": rounds})

    def _run_transfer_tests(self) -> int:
        """Run what the tests ask for until they ask for nothing; return the number of runs."""
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
                f"{self._format_share(specs.values())}"
            )
            self.drive("transfer", StaticSource(specs.values(), bank_key), list(specs.values()))
            num_runs += len(specs)

    def ladder(self) -> list[RunSpec]:
        """Run the scaling ladder at the transferred hyperparameters, some rungs at other learning
        rates too. Return the rungs without those checks.

        Raises:
            GateError: The values do not transfer, rungs are missing, and nobody accepted that.
        """
        transfer_result = self.transfer()
        self._begin_stage("ladder")
        specs = ladder_specs(self.study, transfer_result)
        results = self.ledger.results()
        missing = [spec for spec in stage_specs(self.study, specs) if spec.id not in results]
        if missing:
            verdicts = verdicts_at(
                self.study, self.ledger, transfer_result, target_guess(self.study)
            )
            refuse_failed(self.study, self.ledger, find_failed_transfer(verdicts))
            num_rungs = len({spec.id for spec in missing} & {spec.id for spec in specs})
            checks = counted(len(missing) - num_rungs, "run")
            say(
                f"ladder: {counted(num_rungs, 'rung')} and {checks} at other rates that check some "
                f"of them, {self._format_share(missing)}"
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

    def _format_share(self, specs: Iterable[RunSpec]) -> str:
        """Format the cost of runs as a share of the main run that `forerun estimate` assumes until
        the ladder is fitted.
        """
        share = float(sum(own_flops(specs))) / planned_main_run(self.study).flops["causal"]
        return f"{format_main_run_share(share)} as guessed"


class _DriveMonitor:
    """The state of one call of `Runner.drive`: progress, spend, and the reason to stop early."""

    def __init__(
        self, runner: Runner, label: str, specs: Sequence[RunSpec], accounts: Accounts
    ) -> None:
        self.overrun = ""
        """Cap of the plan that is reached; empty while none is."""
        self._runner, self._label, self._accounts = runner, label, accounts
        self._ledger_file = FileIdentity(runner.study.study_dir / LEDGER_NAME)
        self._last = DriverProgress(outcomes=(), lost=(), notes=(), running=(), num_queued=0)
        self._done_by_run: dict[str, float] = {}  # FLOPs done by each run that has not ended
        flops = own_flops(specs)
        self._flops_by_run = {spec.id: work for spec, work in zip(specs, flops, strict=True)}
        self._mean_flops = sum(flops) / max(1, len(flops))
        runner.reporter.progress.ask(float(sum(flops)))

    def should_stop(self) -> bool:
        """Write the current state, and return whether the work must stop.

        Raises:
            FolderRemoved: The ledger was removed.
        """
        _require_there(self._ledger_file)
        reporter = self._runner.reporter
        left = reporter.progress.batch_left_seconds
        # This is called also while workers are silent.
        self._accounts.look(
            self._label, self._last.running, self._last.num_queued, left, reporter.draw
        )
        self.overrun = self.overrun or self._accounts.budget.overrun()
        return self._runner.is_stopping or bool(self.overrun)

    def take(self, event: DriverProgress) -> None:
        """Take in a report of the driver."""
        for sentence in (*event.lost, *event.notes):
            say(f"{self._label}: {sentence}")
        if event.running is not self._last.running:  # reports within a second share the tuple
            self._done_by_run = {
                run.run_id: self._flops_by_run.get(run.run_id, self._mean_flops)
                * run.step
                / run.num_steps
                for run in event.running
            }
        for outcome in event.outcomes:  # `running` may be older than these outcomes
            self._done_by_run.pop(outcome.spec.id, None)
            self._runner.warn_of_units(outcome.spec, outcome.result)
        self._last = event
        self._runner.reporter.ended(event.outcomes, event.running, sum(self._done_by_run.values()))
