"""Where proxies run, as a plan says it: what is refused, and that none of it is part of the question."""

import pytest
from tiny_study import plan_with

from launcher.plan.file import PlanError, load_plan


def loaded(folder, line):
    return load_plan(plan_with(folder, f"[cluster]\n{line}\n"))


@pytest.mark.parametrize("address", ["auto", "a-b.cluster.local:10001", "[2001:db8::1]:6379"])
def test_addresses(tmp_path, address):
    plan = loaded(tmp_path, f'address = "{address}"\nbackend = "ray"')
    assert plan.cluster.address == address


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "a b:1"])
def test_addresses_that_are_none(tmp_path, address):
    with pytest.raises(PlanError, match="host:port of the head, or auto, is wanted"):
        loaded(tmp_path, f'address = "{address}"\nbackend = "ray"')


def test_an_address_wants_ray(tmp_path):
    with pytest.raises(PlanError, match=r"cluster.address = 'auto' wants cluster.backend"):
        loaded(tmp_path, 'address = "auto"')


@pytest.mark.parametrize(
    "line",
    ["worker_cpus = 0.0", "worker_gpus = 1.5", "worker_gpus = 1e-9"],
)
def test_shares_out_of_range(tmp_path, line):
    with pytest.raises(PlanError, match=f"cluster.{line.split()[0]}"):
        loaded(tmp_path, line)


def test_a_worker_may_have_several_gpus(tmp_path):
    """As a command with ranks of its own wants them."""
    assert loaded(tmp_path, "worker_gpus = 2.0").cluster.num_devices(4) == 8


def test_it_may_change_on_resume(tmp_path):
    asked = load_plan(plan_with(tmp_path, "")).question()
    other = loaded(tmp_path, 'backend = "ray"\naddress = "auto"\nworker_gpus = 0.25\nslurm_options = ["--nodes=2"]')
    assert other.question() == asked
