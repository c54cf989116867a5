"""A rank of train.py that ends with the process that started it, however that ends.

torchrun puts every rank into a session of its own: killed with a rehearsal, it would leave them training.
"""

import contextlib
import ctypes
import os
import signal
import sys

with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h; it outlasts the next line
os.execv(sys.executable, [sys.executable, "train.py"])
