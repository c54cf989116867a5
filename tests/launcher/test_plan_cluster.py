"""Where proxies run, as a plan says it: what is refused, and that none of it is part of the question."""

import pytest
from tiny_study import plan_with

from launcher.plan.file import PlanError, load_plan


def loaded(folder, line):
    return load_plan(plan_with(folder, f"[cluster]\n{line}\n"))


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "a b:1"])
def test_addresses_that_are_none(tmp_path, address):
    with pytest.raises(PlanError, match="host:port of the head, or auto, is wanted"):
        loaded(tmp_path, f'address = "{address}"\nbackend = "ray"')


@pytest.mark.parametrize(
    "line",
    ["worker_cpus = 0.0", "worker_gpus = 1.5", "worker_gpus = 1e-9"],
)
def test_shares_out_of_range(tmp_path, line):
    with pytest.raises(PlanError, match=f"cluster.{line.split()[0]}"):
        loaded(tmp_path, line)


def test_it_may_change_on_resume(tmp_path):
    asked = load_plan(plan_with(tmp_path, "")).question()
    other = loaded(tmp_path, 'backend = "ray"\naddress = "auto"\nworker_gpus = 0.25\nslurm_options = ["--nodes=2"]')
    assert other.question() == asked
