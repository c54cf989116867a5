"""Fakes of several machines in one process, for tests of runs that are repeated on another machine.

The runs are trained by real banks, which train the trials in their slots as one batched model. A
machine is only a name, and some machines corrupt gradients.
"""

import contextlib
import dataclasses
from unittest import mock

import torch

from forerun._launcher.study.stages import stages
from forerun._launcher.study.workers import host as host_module
from forerun._launcher.study.workers.host import HostFactory
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._sweeps.run.pool import InlinePool

# Keys of a plan, a template: the number of slots is filled in by `format`
PLAN = """
[proxy]
num_slots = {num_slots}
[search]
num_trials = 6
parallelism = 3
num_startup = 3
replay_winner = true
"""


class Machines:
    """A pool with one worker on each of `hosts`; a restarted worker gets another process id."""

    calls_ahead = 0

    def __init__(self, study, hosts):
        make = HostFactory(study_dir=str(study.study_dir.resolve()), corpus=str(study.corpus))
        self.num_workers, self.hosts = len(hosts), hosts
        self.pools = [InlinePool(make) for _ in hosts]
        self.pids = list(range(100, 100 + len(hosts)))
        self.busy = []  # workers with a call
        self.current = 0  # worker that trains or trained last
        self.num_finished_calls = 0
        # (host, seed, whether the run already has its outcome) of every run that was begun
        self.admitted = []

    def site(self):
        """Return the site of the current worker."""
        return {
            "host": self.hosts[self.current],
            "process": str(self.pids[self.current]),
            "cpu": "one kind",
        }

    def start(self, worker, call):
        self.pools[worker].start(0, call)
        self.busy.append(worker)
        self.admitted += [
            (self.hosts[worker], data["seed"], call.is_rerun) for _, data in call.admit
        ]

    def wait(self, timeout_seconds):
        if not self.busy:
            return []
        self.num_finished_calls += 1
        self.current = self.busy.pop(self.num_finished_calls % len(self.busy))
        (report,) = self.pools[self.current].wait(timeout_seconds)
        return [dataclasses.replace(report, worker=self.current)]

    def restart(self, worker):
        self.pools[worker].restart(0)
        self.pids[worker] += 100
        self.busy = [busy_worker for busy_worker in self.busy if busy_worker != worker]

    def close(self):
        pass


def flip_bit(tensor):
    """Flip one bit of the largest value. A flipped bit of a zero would change almost nothing."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[tensor.abs().argmax()] ^= 1 << 20


class Corruption:
    """A bit flip in the gradients of every `every`-th step on the named hosts."""

    def __init__(self, hosts, every):
        self.hosts, self.every = hosts, every
        self.machines = None  # the pool in use
        self.num_steps = self.num_flips = 0

    def take_step(self):
        """Count a step of the current worker. Return whether its gradients are corrupted."""
        if self.machines is None or self.machines.hosts[self.machines.current] not in self.hosts:
            return False
        self.num_steps += 1
        is_corrupted = self.num_steps % self.every == 0
        self.num_flips += is_corrupted
        return is_corrupted


@contextlib.contextmanager
def fake_machines(hosts, corrupt=(), every=3):
    """Replace the pool of workers in this process by one on these machines.

    Every `every`-th step on the hosts `corrupt` has a flipped bit in its gradients. Yield the list
    of pools that forerun starts, and the corruption.
    """
    corruption, pools = Corruption(corrupt, every), []
    gather = BankAdamW.gather_gradients

    def start_pool(study, check_stop):
        pools.append(Machines(study, hosts))
        corruption.machines = pools[-1]
        return pools[-1]

    def get_current_site():
        return pools[-1].site()

    def gather_and_corrupt(self):
        norms_K = gather(self)
        if corruption.take_step():
            for row_P in self.gradients_KP:
                flip_bit(row_P)
        return norms_K

    with (
        mock.patch.object(stages, "start_pool", start_pool),
        mock.patch.object(host_module, "get_site", get_current_site),
        mock.patch.object(BankAdamW, "gather_gradients", gather_and_corrupt),
    ):
        yield pools, corruption
