"""The folder of a run, watched for removal while the run trains in it."""

from __future__ import annotations

from pathlib import Path

from forerun._launcher.main_run.progress_output import print_progress
from forerun._sweeps.store.errors import StudyHeld
from forerun._sweeps.store.lock import DriverLock


class RunFolder:
    """The folder that a supervisor has locked for a run."""

    def __init__(self, folder: Path, lock: DriverLock, log: Path) -> None:
        """Watch a folder.

        Args:
            folder: Folder of the run, or of this machine's part of it.
            lock: Lock of the folder, which this process holds.
            log: File that exists in the folder from the start of the first attempt.
        """
        self.folder, self._lock, self._log = folder, lock, log
        self.is_removed = False
        """Whether the folder was removed or emptied."""
        self.new_holder = ""
        """Message that names the process which has taken the lock; empty while this process holds
        it."""

    def check(self) -> None:
        """Look for the folder and its lock, and update `is_removed` and `new_holder`.

        A removed folder is made again, so that the run can save in it, and a removed lock file is
        taken again. While nothing has happened, this takes two system calls.
        """
        if self.is_removed or self.new_holder or self._lock.is_in_place():
            return
        if not self._log.exists():
            self.is_removed = True
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.take_again()
        except StudyHeld as error:
            self.new_holder = str(error)
            return
        if not self.is_removed:
            print_progress(
                f"warning: the lock file in {self.folder} was removed while it was held; it is "
                "taken again"
            )

    def require_lock(self) -> None:
        """Check the folder, and raise StudyHeld if another process has taken the lock. Call this
        after an attempt.
        """
        self.check()
        if self.new_holder:
            raise StudyHeld(
                f"the lock file was removed while the run trained, and {self.new_holder}"
            )

    def describe_lost_files(self, saved_step: int) -> str:
        """Return a sentence on what was lost with the folder, and from where the run can resume.

        Args:
            saved_step: Step of the newest complete checkpoint in the folder now; 0 if there is
                none.
        """
        text = (
            f"{self.folder} was removed or emptied while the run trained in it: its metrics, "
            "events and checkpoints "
        )
        if saved_step:
            return (
                f"{text}from before are lost; the run was saved again at step {saved_step}, "
                "from where it resumes"
            )
        return (
            f"{text}are lost, and nothing could be saved since: restore the folder from a copy, "
            "or begin anew"
        )
