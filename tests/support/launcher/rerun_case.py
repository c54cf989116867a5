"""Fakes of several machines in one process, for tests of runs that are repeated on another machine.

The runs are trained by real banks, which train the trials in their slots as one batched model. A
machine is only a name, and some machines corrupt gradients.
"""

import contextlib
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

    def __init__(self, study, hosts):
        make = HostFactory(study_dir=str(study.study_dir.resolve()), corpus=str(study.corpus))
        self.num_workers, self.calls_ahead, self.hosts = len(hosts), 0, hosts
        self.pools = [InlinePool(make) for _ in hosts]
        self.pids = list(range(100, 100 + len(hosts)))
        self.busy, self.current, self.turn = [], 0, 0
        """Workers with a call, the worker at work, and the number of finished calls."""
        self.admitted = []
        """(host, seed, whether it already has its outcome) of every run that was begun."""

    def site(self):
        """Return the site of the worker that is at work."""
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
        self.turn += 1
        self.current = self.busy.pop(self.turn % len(self.busy))
        (report,) = self.pools[self.current].wait(timeout_seconds)
        return [set_worker(report, self.current)]

    def restart(self, worker):
        self.pools[worker].restart(0)
        self.pids[worker] += 100
        self.busy = [busy_worker for busy_worker in self.busy if busy_worker != worker]

    def close(self):
        pass


def set_worker(report, worker):
    """Set the worker of a frozen report, and return it."""
    object.__setattr__(report, "worker", worker)
    return report


def flip_bit(tensor):
    """Flip one bit of the largest value; in a zero it would change almost nothing."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[tensor.abs().argmax()] ^= 1 << 20


class Corruption:
    """A bit flip in the gradients of every `every`-th step on the named hosts."""

    def __init__(self, hosts, every=3):
        self.hosts, self.every = hosts, every
        self.machines, self.num_steps, self.num_flips = None, 0, 0

    def should_strike(self):
        if self.machines is None or self.machines.hosts[self.machines.current] not in self.hosts:
            return False
        self.num_steps += 1
        self.num_flips += self.num_steps % self.every == 0
        return self.num_steps % self.every == 0


@contextlib.contextmanager
def fake_machines(hosts, corrupt=(), **options):
    """Replace the pool of workers in this process by one on these machines.

    Yield the list of pools that forerun starts, and the corruption of gradients on the hosts
    `corrupt`.
    """
    corruption, pools = Corruption(corrupt, **options), []
    gather = BankAdamW.gather_gradients

    def start_pool(study, check_stop):
        pools.append(Machines(study, hosts))
        corruption.machines = pools[-1]
        return pools[-1]

    def get_current_site():
        return pools[-1].site()

    def gather_and_corrupt(self):
        norms_K = gather(self)
        if corruption.should_strike():
            for row_P in self.gradients_KP:
                flip_bit(row_P)
        return norms_K

    with (
        mock.patch.object(stages, "start_pool", start_pool),
        mock.patch.object(host_module, "get_site", get_current_site),
        mock.patch.object(BankAdamW, "gather_gradients", gather_and_corrupt),
    ):
        yield pools, corruption
