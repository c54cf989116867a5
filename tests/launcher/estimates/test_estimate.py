"""`forerun estimate`: what a plan takes, against what its stages then run."""

import pytest
from main_run import decision_of, spec_of, write_corpus
from tiny_study import PLAN, ask, forerun, write_plan

from launcher.estimates.machine import Given, machine_of
from launcher.estimates.main_run import EndlessRunError, MainRun, estimate_main, main_body
from launcher.launch_file import write_launch
from launcher.reference import MODELS
from proxies.checks import SpecError

LLAMA = MainRun(
    shape=MODELS["llama-3.1-405b"].shape, num_tokens=15_600_000_000_000, batch_tokens=2**24, precision="bfloat16"
)
EIGHT = MainRun(shape=MODELS["llama-3-8b"].shape, num_tokens=2**40, batch_tokens=2**22, precision="bfloat16")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return write_plan(tmp_path_factory.mktemp("estimate"))


@pytest.fixture(scope="module")
def body(plan):
    code, found = ask("estimate", plan)
    assert code == 0
    return found


def test_stages_are_counted_from_the_plan(body):
    stages = {stage["stage"]: stage for stage in body["stages"]}
    assert list(stages) == ["check", "sweep", "transfer", "ladder"]
    assert stages["check"]["num_runs"] == [8, 8]  # 2 widths, 2 seeds, muP and standard form
    assert stages["sweep"]["num_runs"] == [4, 4]
    assert stages["ladder"]["num_runs"] == [13, 13]  # 9 rungs, two of them at two other rates
    # 16 over width and 4 in the control arm; two longer durations of 8; two widths of 3 clips, the base's own shared.
    least, most = stages["transfer"]["num_runs"]
    assert least == 45 < most
    for stage in stages.values():
        low, high = stage["core_hours"]["interval"]
        assert low < stage["core_hours"]["value"] < high
        assert stage["hours"]["value"] == stage["core_hours"]["value"]  # one worker, inline
    assert body["main_run"]["flops"]["six_nd"] == pytest.approx(2e9, rel=0.05)


@pytest.mark.slow
def test_the_study_runs_as_many(plan, body, tmp_path):
    from collections import Counter

    from launcher.decide import ladder_specs
    from launcher.opening import recorded
    from launcher.rungs import stage_specs
    from launcher.transferred import transferred

    assert forerun("run", plan, "--study", tmp_path / "study")[0] in (0, 3, 4)
    study, ledger = recorded(tmp_path / "study")
    ladder = {spec.id for spec in stage_specs(study, ladder_specs(study, transferred(study, ledger)))}
    results = ledger.results()
    estimated = {stage["stage"]: stage for stage in body["stages"]}
    found = Counter("ladder" if id in ladder else "other" for id in results)
    assert found["ladder"] == estimated["ladder"]["num_runs"][0]
    least, most = estimated["transfer"]["num_runs"]
    assert least + 4 <= found["other"] <= most + 4
    spent = sum(result.flops for id, result in results.items() if id in ladder)
    assert estimated["ladder"]["flops"]["value"] == pytest.approx(spent, rel=1e-6)


def test_the_answer_in_words(plan):
    code, out, _ = forerun("estimate", plan, "--dry-shard")
    assert code == 0
    for said in ("transfer", "GPU-hours", "main run:", "convention full", "goodput", "the longest sensible run",
                 "deepseek-v3", "warning: ", "sharded over a fake group of 2 ranks"):  # fmt: skip
        assert said in out


def test_without_a_number_all_ranks_of_the_plan_count(plan):
    body = ask("estimate", plan, "--set", "launch.tensor=2")[1]
    assert body["main_run"]["machine"]["num_gpus"] == 4


def test_llama_405b_as_it_was_run():
    found = estimate_main(LLAMA, Given(num_gpus=16_384, mfu=0.41))
    told = main_body(found)
    assert told["flops"]["six_nd"] == pytest.approx(3.799e25, rel=1e-3)
    assert told["flops"]["causal"] == pytest.approx(3.937e25, rel=1e-3)
    assert found.gpu_hours.value == pytest.approx(30.84e6, rel=0.05)  # its model card
    assert 0.9 < found.cadence.goodput.value < 0.95  # published: more than 90 %
    steps = LLAMA.num_tokens / LLAMA.batch_tokens
    assert found.step_seconds.value * steps == pytest.approx(found.days.value * found.cadence.goodput.value * 86_400)
    assert found.save_every_steps == int(found.cadence.interval_seconds / found.step_seconds.value) > 1
    assert found.days.value == pytest.approx(found.gpu_hours.value / 16_384 / 24)
    assert found.days.low < found.days.value < found.days.high
    assert len(told["thresholds"]) == 1
    assert told["usd"]["value"] == pytest.approx(3.90 * found.gpu_hours.value)


def test_a_measured_throughput_is_a_share_of_the_peak():
    """torchtitan, Llama 3 8B, compiled: 6,667 tokens a second and H100, which it calls 39 %."""
    found = estimate_main(EIGHT, Given(num_gpus=8, tokens_per_gpu_second=6667.0, price_usd=2.0))
    assert found.machine.mfu.value == pytest.approx(0.390, abs=1e-3)
    hours = 2**40 / 6667 / 3600
    assert found.gpu_hours.value == pytest.approx(hours / found.cadence.goodput.value)
    assert found.usd.value == pytest.approx(2 * found.gpu_hours.value)
    with pytest.raises(SpecError, match=r"2\.\d+ times the peak"):
        machine_of(Given(tokens_per_gpu_second=50_000.0), 5.79e10)


def test_what_is_given_replaces_the_table():
    machine = machine_of(Given(gpu="Z1", peak_flops=1e15, memory_gb=100, failures_per_1000_node_days=9.0), 1e9)
    assert (machine.name, machine.peak_flops, machine.memory_gb, machine.price_usd) == ("Z1", 1e15, 100.0, None)
    assert machine.failures.low == machine.failures.high == 9.0
    assert machine_of(Given(gpu="h100", memory_gb=96), 1e9).memory_gb == 96


def test_bad_options_are_said_at_once(plan):
    code, found = ask("estimate", plan, "--gpu", "H10", "--mfu", 2, "--tokens-per-second", 5, "--gpus", 0)
    assert code == 2
    for said in ("num_gpus = 0", "mfu = 2.0", "give one of them", "did you mean H100?"):
        assert any(said in problem for problem in found["problems"])


def test_what_no_parallelism_fits_is_refused(plan):
    code, found = ask("estimate", plan, "--gpus", 3)
    assert (code, found["error"]) == (2, "NoParallelismError")
    code, found = ask("estimate", plan, "--memory-gb", "nan")
    assert code == 2


def test_a_run_that_is_always_interrupted_is_refused():
    with pytest.raises(EndlessRunError, match="such a run need not end"):
        estimate_main(LLAMA, Given(num_gpus=16_384, failures_per_1000_node_days=5000.0))


def test_a_plan_that_is_not_one(tmp_path):
    assert forerun("estimate", tmp_path / "none.toml")[0] == 2
    (tmp_path / "plan.toml").write_text(PLAN + "[nonsense]\n")
    assert forerun("estimate", tmp_path / "plan.toml")[0] == 2


def test_a_frozen_config_is_estimated_as_frozen(tmp_path):
    manifest = write_corpus(tmp_path)
    decision = decision_of(spec_of(manifest.data_id), manifest, num_ranks=2)
    path = write_launch(tmp_path / "frozen", decision)
    code, found = ask("estimate", path)
    assert code == 0
    assert found["digest"] == decision.digest
    main = found["main_run"]
    assert main["tokens"] == decision.num_tokens
    assert (main["parallelism"]["shard"], main["machine"]["num_gpus"]) == (2, 2)
    assert "stages" not in found
    assert ask("estimate", path, "--gpus", 4)[1]["main_run"]["machine"]["num_gpus"] == 4
    assert ask("estimate", path, "--set", "target.budget_flops=1e12")[0] == 2
    path.write_text(path.read_text().replace('"batch_tokens": ', '"batch_tokens": 1'))
    assert ask("estimate", path)[0] == 5
