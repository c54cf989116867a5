"""Notices that a run's folder is taken away while the run trains in it."""

from __future__ import annotations

from pathlib import Path

from launcher.base.talk import say
from sweeps.store.errors import StudyHeld
from sweeps.store.lock import DriverLock


class RunFolder:
    """The folder that a supervisor holds: is it still there, and still held?"""

    def __init__(self, folder: Path, lock: DriverLock, log: Path) -> None:
        """Watch a folder.

        Args:
            folder: Folder of the run, or of this machine's part of it.
            lock: Its lock, which is held.
            log: A file that is in it from the start of the first attempt.
        """
        self.folder, self._lock, self._log = folder, lock, log
        self.removed = False
        """Whether the folder was removed or emptied."""
        self.taken = ""
        """Holder of the folder in place of this supervisor; empty while this one holds it."""

    def look(self) -> None:
        """Check the folder: two system calls while nothing has happened."""
        if self.removed or self.taken or self._lock.is_in_place():
            return
        if not self._log.exists():
            self.removed = True
            self.folder.mkdir(parents=True, exist_ok=True)  # for what the run can still save
        try:
            self._lock.take_again()
        except StudyHeld as error:
            self.taken = str(error)
            return
        if not self.removed:
            say(f"warning: the lock file in {self.folder} was removed while it was held; it is taken again")

    def describe_loss(self, saved_step: int) -> str:
        """Return what was lost with the folder, and what there is again.

        Args:
            saved_step: Step of the newest complete checkpoint in it now; 0 for none.
        """
        lost = f"{self.folder} was removed or emptied while the run trained in it: its metrics, events and checkpoints "
        if saved_step:
            return f"{lost}from before are lost; the run was saved again at step {saved_step}, from where it resumes"
        return f"{lost}are lost, and nothing could be saved since: restore the folder from a copy, or begin anew"
