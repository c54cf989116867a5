"""Case for tests of rehearsals: a stage that trains in this process on one rank, which takes
seconds instead of minutes but excludes faults that kill a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import signal

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.process_signals import SignalFlag
from forerun._launcher.main_run.rehearsal.rank import make_trainer_builder
from forerun._launcher.main_run.rehearsal.rehearsal_folder import RehearsalFolder
from forerun._launcher.main_run.rehearsal.run import set_up_rehearsal
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome
from forerun._launcher.main_run.trainer.inputs import RunOptions
from forerun._launcher.main_run.trainer.training import run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InProcessStage(RehearsalFolder):
    """A rehearsal whose runs take place in this process; needs its one-rank process group."""

    def run(self, run_dir, *faults, stop_after=None, max_restarts=0, hang_seconds=0.0):
        config = write_launch(self.folder / "frozen", self.decision)
        options = RunOptions(
            config=config,
            data=self.corpus,
            out=run_dir,
            stop_after=stop_after,
            allow_world_size=True,
            code=self.code_dir,
        )
        stop_request = SignalFlag()
        build = make_trainer_builder([*self.faults, *faults])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGTERM, lambda *_: stop_request.set())
        with contextlib.suppress(FileNotFoundError):
            (run_dir / metrics_file.ENDING_FILE).unlink()
        try:
            ending = run(options, stop_request.is_set, build)
        # A real process would end by these errors, and its supervisor would report that.
        except (ValueError, OSError) as error:
            return LaunchOutcome(event="failed", exit_code=1, step=0, reason=repr(error))
        finally:
            signal.signal(signal.SIGTERM, before)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return LaunchOutcome(**dataclasses.asdict(ending))


def make_in_process_stage(frozen_dir, decision, corpus):
    """Return a stage like the one of `set_up_rehearsal`, with its runs in this process."""
    stage = set_up_rehearsal(frozen_dir, decision, corpus, full=False)
    fields = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    return InProcessStage(**fields)
