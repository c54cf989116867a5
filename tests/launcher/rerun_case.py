"""A study's workers on several machines that are one process: real banks, machines by name, some
that are odd.
"""

import contextlib
from unittest import mock

import torch

from launcher.study import stages
from launcher.workers import host as host_module
from launcher.workers.host import HostFactory
from proxies.model.bank_adamw import BankAdamW
from sweeps.run.pool import InlinePool

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
    """A pool with one worker on each of `hosts`; a worker that is restarted is another process."""

    def __init__(self, study, hosts):
        make = HostFactory(study_dir=str(study.study_dir.resolve()), corpus=str(study.corpus))
        self.num_workers, self.calls_ahead, self.hosts = len(hosts), 0, hosts
        self.pools = [InlinePool(make) for _ in hosts]
        self.pids = list(range(100, 100 + len(hosts)))
        self.busy, self.current, self.turn = [], 0, 0
        self.admitted = []
        """(host, seed, whether it has its outcome) of every run that was begun."""

    def site(self):
        """Of the worker at work."""
        return {
            "host": self.hosts[self.current],
            "process": str(self.pids[self.current]),
            "cpu": "one kind",
        }

    def start(self, worker, call):
        self.pools[worker].start(0, call)
        self.busy.append(worker)
        self.admitted += [(self.hosts[worker], data["seed"], call.again) for _, data in call.admit]

    def wait(self, timeout_seconds):
        if not self.busy:
            return []
        self.turn += 1
        self.current = self.busy.pop(self.turn % len(self.busy))
        (report,) = self.pools[self.current].wait(timeout_seconds)
        return [mock_worker(report, self.current)]

    def restart(self, worker):
        self.pools[worker].restart(0)
        self.pids[worker] += 100
        self.busy = [each for each in self.busy if each != worker]

    def close(self):
        pass


def mock_worker(report, worker):
    object.__setattr__(report, "worker", worker)
    return report


def flipped(tensor):
    """One bit of its largest value the other way: in one that is zero it would come to nothing."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[tensor.abs().argmax()] ^= 1 << 20


class Corruption:
    """Gradients in which a bit is flipped in every `every`-th step, on the hosts named."""

    def __init__(self, hosts, every=3):
        self.hosts, self.every = hosts, every
        self.machines, self.num_steps, self.num_flips = None, 0, 0

    def strikes(self):
        if self.machines is None or self.machines.hosts[self.machines.current] not in self.hosts:
            return False
        self.num_steps += 1
        self.num_flips += self.num_steps % self.every == 0
        return self.num_steps % self.every == 0


@contextlib.contextmanager
def machines(hosts, corrupt=(), **how):
    """`forerun` in this process finds those machines; yields the list of the pools that it
    started.
    """
    corruption, pools = Corruption(corrupt, **how), []
    gather = BankAdamW.gather_gradients

    def start_pool(study, check_stop):
        pools.append(Machines(study, hosts))
        corruption.machines = pools[-1]
        return pools[-1]

    def site_now():
        return pools[-1].site()

    def gathered(self):
        norms_K = gather(self)
        if corruption.strikes():
            for row_P in self.gradients_KP:
                flipped(row_P)
        return norms_K

    with (
        mock.patch.object(stages, "start_pool", start_pool),
        mock.patch.object(host_module, "site", site_now),
        mock.patch.object(BankAdamW, "gather_gradients", gathered),
    ):
        yield pools, corruption
