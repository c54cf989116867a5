"""A stage whose runs take place in this process, on one rank: no fault that kills, and seconds
instead of minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import signal

from launcher.base import metrics
from launcher.base.signals import Flag
from launcher.frozen.launch_file import write_launch
from launcher.rehearsal.rank import builder
from launcher.rehearsal.run import set_up
from launcher.rehearsal.stage import RehearsalFolder
from launcher.supervisor.launch import LaunchOutcome
from launcher.trainer.rank import RankOptions, run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HereStage(RehearsalFolder):
    """Needs a process group of this process alone."""

    def run(self, name, *faults, stop_after=None, max_restarts=0, hang_seconds=0.0):
        config = write_launch(self.folder / "frozen", self.decision)
        options = RankOptions(
            config=config,
            data=self.corpus,
            out=self.path(name),
            stop_after=stop_after,
            allow_world_size=True,
            code=self.code_dir,
        )
        told = Flag()
        build = builder([*self.faults, *faults])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGTERM, lambda *_: told.set())
        with contextlib.suppress(FileNotFoundError):
            (self.path(name) / metrics.ENDING_FILE).unlink()
        try:
            ending = run(options, told.is_set, build)
        except (ValueError, OSError) as error:  # what ends a process, and is told by its supervisor
            return LaunchOutcome(event="failed", exit_code=1, step=0, reason=repr(error))
        finally:
            signal.signal(signal.SIGTERM, before)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return LaunchOutcome(**dataclasses.asdict(ending))


def here(frozen_dir, decision, corpus):
    """A stage like `set_up`'s."""
    stage = set_up(frozen_dir, decision, corpus, full=False)
    fields = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    return HereStage(**fields)
