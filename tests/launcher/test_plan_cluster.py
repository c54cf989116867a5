"""Where proxies run, as a plan says it: what is refused, and that none of it is part of the question."""

import pytest
from tiny_study import forerun, plan_with, write_corpus

from launcher.experiments.ladder import ladder_runs
from launcher.plan.cluster import rank_needs
from launcher.plan.file import PlanError, load_plan
from launcher.study.opening import plan_study


def loaded(folder, line):
    return load_plan(plan_with(folder, f"[cluster]\n{line}\n"))


@pytest.mark.parametrize(
    "address", ["", "auto", "head:6379", "10.0.0.1:6379", "a-b.cluster.local:10001", "[2001:db8::1]:6379"]
)
def test_addresses(tmp_path, address):
    plan = loaded(tmp_path, f'address = "{address}"\nbackend = "ray"')
    assert plan.cluster.address == address


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "http://head:8265", "head:6379 ", "a b:1"])
def test_addresses_that_are_none(tmp_path, address):
    with pytest.raises(PlanError, match="host:port of the head, or auto, is wanted"):
        loaded(tmp_path, f'address = "{address}"\nbackend = "ray"')


def test_an_address_wants_ray(tmp_path):
    with pytest.raises(PlanError, match=r"cluster.address = 'auto' wants cluster.backend"):
        loaded(tmp_path, 'address = "auto"')


@pytest.mark.parametrize(
    "line",
    [
        "worker_cpus = 0.0",
        "worker_gpus = -0.5",
        "worker_gpus = 1.5",
        "worker_gpus = 1e-9",
        "worker_memory_gib = -1.0",
        "num_workers = -1",
    ],
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


RANKS = "[proxy]\nnum_ranks = 2\n"


def test_several_ranks_a_run(tmp_path):
    plan = load_plan(plan_with(tmp_path, f'{RANKS}[cluster]\nbackend = "ray"\nworker_gpus = 1.0'))
    numerics = plan.numerics("proxy")
    assert (numerics.num_ranks, numerics.num_slots, plan.numerics("ladder").num_slots) == (2, 1, 1)
    assert plan.choices("proxy") == (), "nothing is calibrated"


def test_every_run_but_the_coordinate_checks(tmp_path):
    """These look at activations, in the driver alone."""
    write_corpus(tmp_path)
    path = plan_with(tmp_path, f'{RANKS}[cluster]\nbackend = "ray"')
    study = plan_study(path, tmp_path, (), source_sha256="0" * 64)
    point = study.space.lowest
    assert {spec.numerics.num_ranks for spec in [study.trial(point), *ladder_runs(study, point)]} == {2}
    checks = [*study.check_runs(study.plan.parametrization), *study.depth_runs()]
    assert {spec.numerics.num_ranks for specs in checks for spec in specs} == {1}


def test_what_a_worker_of_ranks_takes(tmp_path):
    ranks = f'{RANKS}[cluster]\nbackend = "ray"\nworker_cpus = 3.0\n'
    (said,) = rank_needs(load_plan(plan_with(tmp_path, ranks)), 16)
    assert said == (
        "proxy.num_ranks = 2: a run takes 6 CPUs, on one node where one has them; "
        "this machine's 16 cores have room for 2 at a time"
    )
    (said,) = rank_needs(load_plan(plan_with(tmp_path, f'{ranks}worker_gpus = 1.0\naddress = "auto"')), 16)
    assert "6 CPUs and 2 GPUs" in said and "the cluster at auto is asked for room when it is joined" in said
    assert rank_needs(load_plan(plan_with(tmp_path, "")), 16) == []
    write_corpus(tmp_path)
    code, out, _ = forerun("validate", plan_with(tmp_path, ranks))
    assert code == 0 and "a run takes 6 CPUs" in out
    code, out, _ = forerun("estimate", plan_with(tmp_path, f"{ranks}num_workers = 3"))
    assert code == 0 and "a run takes 6 CPUs" in out and "hours on 6 ranks" in out


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", 'proxy.num_ranks = 2 wants cluster.backend = "ray": a rank is a process of its own'),
        ("[cluster]\nworker_gpus = 0.5", "worker_gpus = 0.5: with proxy.num_ranks = 2 a rank takes 1 GPU, or 0"),
        ("[cluster]\nworker_gpus = 2.0", "worker_gpus = 2: with proxy.num_ranks = 2 a rank takes 1 GPU, or 0"),
        ('factory = "mine:build"', "proxy.num_ranks = 2: 'mine:build' is not ours to shard"),
        ("compiled = true", "num_ranks = 2: compiled wants one device"),
        ("batch_tokens = 48", "proxy.batch_tokens: proxy.num_ranks = 2 does not divide the 3 sequences of a batch"),
        ("[ladder]\nbatch_tokens = 80", "ladder.batch_tokens: proxy.num_ranks = 2 does not divide the 5 sequences"),
    ],
)
def test_what_ranks_refuse(tmp_path, lines, said):
    with pytest.raises(PlanError) as error:
        load_plan(plan_with(tmp_path, RANKS + lines))
    assert said in str(error.value)
