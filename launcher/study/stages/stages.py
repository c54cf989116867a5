"""The stages of a study. Each stage runs what its ledger lacks, on workers that all stages share,
and resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import cast

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.calibration.procedure import apply_calibrations, calibrate
from forerun._launcher.study.calibration.study_cost import plan_main_run
from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
from forerun._launcher.study.experiments.ladder import build_stage_runs
from forerun._launcher.study.experiments.transfer_results import (
    SPEND_END_RECORD,
    SPEND_ROUND_RECORD,
    SearchResult,
    TransferResult,
    guess_target_sizes,
    judge_tests,
    list_tests_with_runs,
    load_search_result,
    load_transfer_result,
)
from forerun._launcher.study.plan.study import Study, build_bank_key
from forerun._launcher.study.stages.gates import (
    find_failed_check,
    find_failed_transfer,
    judge_transfer,
    refuse_failed,
)
from forerun._launcher.study.stages.main_run_choice import (
    build_fit_key,
    build_ladder_runs,
    load_or_fit_ladder,
)
from forerun._launcher.study.stages.progress import CHECK_STAGE, FIT_STAGE, ProgressReporter
from forerun._launcher.study.stages.search_runs import run_search
from forerun._launcher.study.stages.winner_reruns import replay_search
from forerun._launcher.study.stages.worker_pools import (
    SpendTracker,
    record_killed_driver,
    start_pool,
)
from forerun._proxies.core.branches import compute_own_flops
from forerun._proxies.core.errors import ExitCode, ForerunError
from forerun._proxies.core.notation import format_counted, format_main_run_share
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._proxies.external.metric_files import UNIT_KEYS, have_same_unit
from forerun._sweeps.run.budget import compute_spend
from forerun._sweeps.run.device_kinds import ask_device_kinds, format_device_kinds
from forerun._sweeps.run.driver import GRACE_SECONDS, drive
from forerun._sweeps.run.pool import Pool
from forerun._sweeps.search.source import RunSource, StaticSource
from forerun._sweeps.store.errors import BudgetSpent, ClusterUnfit, FolderRemoved
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.live_state import DriverProgress
from forerun._sweeps.store.lock import FileIdentity

SPEND_ROUNDS = 3
"""Maximum number of rounds of additional runs each time `--spend` is given."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedStudyError(ForerunError):
    """The user or the system asked the study to stop; everything finished is recorded."""

    exit_code = ExitCode.INTERRUPTED


class StageRunner:
    """A runner of the stages of one study. The pool of workers starts when there is something to
    run, and all stages share it.
    """

    def __init__(
        self, study: Study, ledger: Ledger, reporter: ProgressReporter | None = None
    ) -> None:
        """Take over a study.

        Args:
            study: Study whose corpus was verified; workers trust it.
            ledger: Its ledger, open for writing.
            reporter: Prints the progress; None for a reporter of all stages.
        """
        self.study, self.ledger = apply_calibrations(study, ledger), ledger
        self.reporter = reporter or ProgressReporter(self.study, ledger)
        self._pool: Pool | None = None
        self._kinds: tuple[str, ...] = ()  # kind of device of each worker
        self._accounts: SpendTracker | None = None
        self.is_stopping = self._warned_of_units = False

    @contextlib.contextmanager
    def running(self) -> Iterator[StageRunner]:
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
        print_progress(
            f"\nstopping: workers save their runs, {GRACE_SECONDS:g} s at most (interrupt again to "
            "abort)"
        )

    def warn_of_units(self, spec: RunSpec, result: RunResult) -> None:
        """Warn once if a user's trainer seems to log its two losses in different units."""
        training, validation = result.last_train_loss_nats, result.loss_nats
        if self._warned_of_units or spec.command is None or training is None or validation is None:
            return
        if not have_same_unit(training, validation):
            self._warned_of_units = True
            print_progress(
                f"warning: a run ended with a training loss of {training:.4g} and a validation "
                f"loss of {validation:.4g}: if they are not both in nats per token, declare their "
                f"units: {UNIT_KEYS}"
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
        cluster, accounts = self.study.plan.cluster, self._open_accounts()
        monitor = _DriveMonitor(self, label, specs, accounts)
        self.reporter.progress.begin_batch(monitor.total_flops)
        try:
            drive(
                source,
                self._start_workers(),
                self.ledger,
                self.study.study_dir,
                bank_key_for=build_bank_key,
                max_attempts=cluster.max_attempts,
                noise=noise,
                kinds=self._kinds,
                progress=monitor.take,
                should_stop=monitor.should_stop,
                find_reached_cap=accounts.budget.find_reached_cap,
            )
        finally:
            self.reporter.pause()
            accounts.record_spend()
        self._check_stop()
        if monitor.overrun:
            raise BudgetSpent(monitor.overrun)

    def _begin_stage(self, stage: str) -> None:
        """Begin a stage: choose how its runs are computed (calibration). `self.study` becomes the
        study with that choice.
        """
        self.reporter.begin(stage)
        self.study = calibrate(
            self.study, self.ledger, stage, self._start_workers, self._check_stop
        )

    def _start_workers(self) -> Pool:
        """Return the pool of workers. The first call starts it."""
        if self._pool is None:
            self._pool = start_pool(self.study, self._check_stop)
            self._kinds = ask_device_kinds(self._pool, self._check_stop)
            if set(self._kinds) != {"cpu"}:
                print_progress(f"workers: {format_device_kinds(self._kinds)}")
        return self._pool

    def _open_accounts(self) -> SpendTracker:
        """Return the record of the workers' time. The first call starts the workers.

        Raises:
            ClusterUnfit: No price is known for a device, and the plan has a cap in dollars.
        """
        if self._accounts is None:
            self._start_workers()
            cluster = self.study.plan.cluster
            kinds = {
                *self._kinds,
                *(usage.kind for usage in compute_spend(self.ledger, cluster.caps).by_kind),
            }
            if unpriced := [
                kind for kind in kinds if cluster.max_usd and cluster.caps.find_price(kind) is None
            ]:
                names = ", ".join(
                    kind or "a device without a known name" for kind in sorted(unpriced)
                )
                raise ClusterUnfit(
                    f"cluster.max_usd = {cluster.max_usd:g}: no price is known for {names}: add it "
                    "to cluster.usd_per_device_hour_by_kind, or set cluster.usd_per_device_hour "
                    "for all others"
                )
            record_killed_driver(self.study.study_dir, self.ledger)
            self._accounts = SpendTracker(
                self.study.study_dir, self.ledger, cluster.caps, cluster.count_devices(self._kinds)
            )
        return self._accounts

    def _check_stop(self) -> None:
        """Raise an error if a signal asked the study to stop."""
        if self.is_stopping:
            done = format_counted(self.ledger.num_runs, "run")
            raise InterruptedStudyError(
                f"stopped with {done} recorded; `{self.study.format_command('run')}` continues"
            )

    def check(self) -> dict[str, RecordedCheck]:
        """Return the study's coordinate checks by name; run those that are missing.

        Raises:
            UnseenError: A command trains the model, and its activations cannot be seen.
        """
        from forerun._launcher.study.stages.coordinate_checks import run_coordinate_checks

        self.reporter.begin(CHECK_STAGE)
        return run_coordinate_checks(
            self.study,
            self.ledger,
            self._start_workers,
            self._check_stop,
            self.reporter.add_check_flops,
        )

    def sweep(self) -> SearchResult:
        """Run the search at the base width. If the model is the user's own, its coordinates are
        checked first.

        Raises:
            GateError: The user's own model fails the check, or the winning trial gave another
                result when it was run again.
        """
        if self.study.factory is not None:
            refuse_failed(self.study, self.ledger, find_failed_check(self.study, self.check()))
        self._begin_stage("sweep")
        run_search(self.study, self.ledger, self.drive)
        self._replay_winner()
        return load_search_result(self.study, self.ledger)

    def _replay_winner(self) -> None:
        """Run the winning trial again elsewhere, and count its hours.

        Raises:
            GateError: The result differs.
        """

        def check() -> None:
            self._check_stop()
            if overrun := self._open_accounts().budget.find_overrun():
                raise BudgetSpent(overrun)

        head = self.ledger.head_hash
        try:
            replay_search(self.study, self.ledger, self._start_workers, check)
        finally:
            if self._accounts is not None and self.ledger.head_hash != head:
                self._accounts.record_spend()

    def transfer(self, *, spend: bool = False) -> TransferResult:
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
        return load_transfer_result(self.study, self.ledger)

    def _spend_rounds(self) -> None:
        """Run more rounds while a verdict cannot tell, from where an interrupted call stopped."""
        num_before = sum(
            int(cast(dict[str, int], record.body)["rounds"])
            for record in self.ledger.read_records(SPEND_END_RECORD)
        )
        for _ in range(
            len(self.ledger.read_records(SPEND_ROUND_RECORD)) - num_before, SPEND_ROUNDS
        ):
            transfer_result = load_transfer_result(self.study, self.ledger)
            verdicts = judge_tests(
                self.study, self.ledger, transfer_result, guess_target_sizes(self.study)
            )
            if judge_transfer(verdicts).outcome != "cannot_tell":
                break
            self.ledger.append(
                SPEND_ROUND_RECORD,
                str(len(self.ledger.read_records(SPEND_ROUND_RECORD))),
                {"together": verdicts.together.outcome},
            )
            if not self._run_transfer_tests():
                print_progress("transfer: the verdicts ask for no more runs")
                break
        rounds = len(self.ledger.read_records(SPEND_ROUND_RECORD)) - num_before
        self.ledger.append(
            SPEND_END_RECORD,
            str(len(self.ledger.read_records(SPEND_END_RECORD))),
            {"rounds": rounds},
        )

    def _run_transfer_tests(self) -> int:
        """Run what the tests ask for until they ask for nothing; return the number of runs."""
        num_runs = 0
        while True:
            results = self.ledger.get_results()
            tests = list_tests_with_runs(self.study, self.ledger)
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
            print_progress(
                f"transfer: {format_counted(len(specs), 'run')} ({sentence}), "
                f"{self._format_share(specs.values())}"
            )
            self.drive(
                "transfer", StaticSource(specs.values(), build_bank_key), list(specs.values())
            )
            num_runs += len(specs)

    def ladder(self) -> list[RunSpec]:
        """Run the scaling ladder at the transferred hyperparameters, and some rungs at other
        learning rates too. Fit the scaling law.

        Returns:
            The rungs, without their runs at other rates.

        Raises:
            GateError: Rungs are missing, and are not run because the values do not transfer and
                nobody accepted that.
        """
        transfer_result = self.transfer()
        self._begin_stage("ladder")
        specs = build_ladder_runs(self.study, transfer_result)
        results = self.ledger.get_results()
        missing = [spec for spec in build_stage_runs(self.study, specs) if spec.id not in results]
        if missing:
            verdicts = judge_tests(
                self.study, self.ledger, transfer_result, guess_target_sizes(self.study)
            )
            refuse_failed(self.study, self.ledger, find_failed_transfer(verdicts))
            num_rungs = len({spec.id for spec in missing} & {spec.id for spec in specs})
            checks = format_counted(len(missing) - num_rungs, "run")
            print_progress(
                f"ladder: {format_counted(num_rungs, 'rung')} and {checks} at other rates that "
                f"check some of them, {self._format_share(missing)}"
            )
            self.drive("ladder", StaticSource(missing, build_bank_key), missing, noise=True)
        self.reporter.begin(FIT_STAGE)
        if self.ledger.find("fit", build_fit_key(specs)) is None:
            self._check_stop()
            from forerun._scaling_fits.fit_file import to_json

            fit = load_or_fit_ladder(self.study, self.ledger, specs)
            self.ledger.append("fit", build_fit_key(specs), to_json(fit))
        self._check_stop()
        return specs

    def _format_share(self, specs: Iterable[RunSpec]) -> str:
        """Format the cost of runs as a share of the main run that `forerun estimate` assumes until
        the ladder is fitted.
        """
        share = float(sum(compute_own_flops(specs))) / plan_main_run(self.study).flops["causal"]
        return f"{format_main_run_share(share)} as guessed"


class _DriveMonitor:
    """The state of one `StageRunner.drive` call: progress, spend, and the reason to stop early."""

    def __init__(
        self, runner: StageRunner, label: str, specs: Sequence[RunSpec], accounts: SpendTracker
    ) -> None:
        self.overrun = ""
        """Cap of the plan that is reached; empty while none is."""
        self._runner, self._label, self._accounts = runner, label, accounts
        self._ledger_file = FileIdentity(runner.study.study_dir / LEDGER_NAME)
        self._last = DriverProgress(outcomes=(), failures=(), notes=(), running=(), num_queued=0)
        self._done_by_run: dict[str, float] = {}  # FLOPs done by each run that has not ended
        flops = compute_own_flops(specs)
        self.total_flops = float(sum(flops))
        """FLOPs of all runs together."""
        self._flops_by_run = {spec.id: work for spec, work in zip(specs, flops, strict=True)}
        self._mean_flops = self.total_flops / max(1, len(flops))

    def should_stop(self) -> bool:
        """Write the current state, and return whether the work must stop.

        Raises:
            FolderRemoved: The ledger was removed or replaced.
        """
        if not self._ledger_file.is_there():
            raise FolderRemoved(
                f"{self._ledger_file.path} was removed or replaced while the study ran, and "
                "nothing was recorded since. What it held is lost unless you put it back; then "
                "run the same command again"
            )
        reporter = self._runner.reporter
        left = reporter.progress.batch_left_seconds
        # This is called also while workers are silent.
        self._accounts.write_state(
            self._label, self._last.running, self._last.num_queued, left, reporter.draw
        )
        self.overrun = self.overrun or self._accounts.budget.find_overrun()
        return self._runner.is_stopping or bool(self.overrun)

    def take(self, event: DriverProgress) -> None:
        """Take in a report of the driver."""
        for sentence in (*event.failures, *event.notes):
            print_progress(f"{self._label}: {sentence}")
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
        self._runner.reporter.add_runs(
            event.outcomes, event.running, sum(self._done_by_run.values())
        )
