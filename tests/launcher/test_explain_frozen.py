"""`forerun explain FROZEN [FIELD]`: every field of a real config, from its records alone, wherever it lies."""

import copy
import dataclasses
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys

import click
import pytest
from export_case import leaf_fields, wide_decision
from tiny_study import ask, forerun

from launcher.cli.cli import cli
from launcher.explaining import explainers, leaves
from launcher.explaining.known import at, known_of
from launcher.explaining.provenance import plan_record
from launcher.explaining.record import Explained
from launcher.explaining.text import block, table_text
from launcher.frozen.attestations import attest, read_attestation
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import read_launch, write_launch
from launcher.plan.file import override
from launcher.study import evidence
from launcher.study.gates import Gate
from launcher.study.opening import recorded_study
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from sweeps.store.ledger import Ledger

OUTCOMES = {"coordinates": "failed", "transfer": "cannot_tell", "fit": "passed", "data": "passed"}


@pytest.fixture(scope="module")
def study_dir(finished, tmp_path_factory):
    """A copy of the finished study, frozen once; nobody writes into it."""
    folder = tmp_path_factory.mktemp("explained") / "study"
    shutil.copytree(finished / "study", folder)
    gates = tuple(Gate(name=name, outcome=outcome, reason=f"{name} says") for name, outcome in OUTCOMES.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "gates", lambda *_: gates)
        code, _ = ask("freeze", folder, "--accept", "coordinates", "--accept", "transfer", "--reason", "planted")
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def config(study_dir):
    (folder,) = (study_dir / "frozen").iterdir()
    return folder


@pytest.fixture(scope="module")
def told(config):
    """Every field by name, as `--json` has it."""
    code, body = ask("explain", config)
    assert (code, body["digest"], body["notes"]) == (0, config.name, [])
    return {one["field"]: one for one in body["fields"]}


@pytest.fixture(scope="module")
def kept(config):
    return read_attestation(config / "attestations" / "evidence.json", config.name)


def flat(record, before=""):
    """The leaves of the JSON of a decision, groups and rules by their names."""
    found = {}
    for name, value in record.items():
        path = f"{before}{name}"
        if path in ("groups", "transfer"):
            called = [item.get("kind") or f"{item['hyperparameter']}.{item['axis']}" for item in value]
            for index, item in enumerate(value):
                number = f".{called[: index + 1].count(called[index])}" if called.count(called[index]) > 1 else ""
                found |= flat(item, f"{path}.{called[index]}{number}.")
        elif isinstance(value, dict):
            found |= flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def other(tmp_path, config, edit=lambda body: None, decision=None):
    """The config (or another decision) far from any study, its evidence as `edit` leaves it."""
    decision = decision or read_launch(config)
    folder = write_launch(tmp_path, decision).parent
    body = copy.deepcopy(read_attestation(config / "attestations" / "evidence.json", config.name))
    edit(body)
    attest(folder, "evidence", decision.digest, body)
    return folder


def one(folder, field):
    code, body = ask("explain", folder, field)
    assert code == 0
    (found,) = body["fields"]
    return found


def test_every_field_is_told_with_the_value_of_the_launch_file(config, told):
    decision = json.loads((config / "launch.json").read_text())["decision"]
    written = {name: found["value"] for name, found in told.items() if found["written"]}
    assert written == flat(decision)
    assert {name for name in told if name not in written} == {
        "spikes.max_rollbacks", "spikes.window_steps", "spikes.threshold", "spikes.least_nats", "spikes.patience_steps",
        "monitoring.validate_every_steps", "monitoring.layers_every_steps", "monitoring.replay_every_steps", "compiled",
    }  # fmt: skip
    assert (told["spikes.threshold"]["value"], told["compiled"]["value"]) == (6.0, False)


def test_every_field_has_a_source_a_strength_and_what_would_change_it(told):
    for name, found in told.items():
        assert found["source"]["text"] and found["strength"]["text"] and found["change"], name
        assert all(found["change"]) and all(found["unknown"]), name
        assert "None" not in found["source"]["text"] + found["strength"]["text"] + "".join(found["change"]), name
        assert found["source"]["plan_keys"] or found["source"]["kind"] not in ("plan", "default", "search"), name


def test_what_is_told_is_what_the_records_say(study_dir, told, kept):
    """Plan keys, run ids, gates: all held against plan and ledger."""
    study, ids = recorded_study(study_dir), set(Ledger.read(study_dir).results())
    plan = plan_record(study.plan)
    gates = {gate["name"]: gate["outcome"] for gate in kept["gates"]}
    num_keys = num_ids = 0
    for found in told.values():
        for key in found["source"]["plan_keys"]:
            assert key["value"] == at(plan, key["key"]) and key["text"], key
            assert key["is_set"] == (key["value"] != key["default"])
            num_keys += 1
        for runs in found["source"]["runs"]:
            assert set(runs["ids"]) <= ids
            assert runs["num_runs"] == len(set(runs["ids"]))
            num_ids += len(runs["ids"])
        for gate in found["strength"]["gates"]:
            assert gate["outcome"] == gates[gate["name"]]
            assert gate["accepted"] == ("planted" if gate["outcome"] != "passed" else None)
    assert num_keys > 100 and num_ids > 100


def test_every_command_that_is_named_is_one(told):
    context, seen = click.Context(cli), set()
    for found in told.values():
        said = " ".join([*found["change"], found["strength"]["text"], *found["unknown"]])
        for command in re.findall(r"`forerun ([^`]+)`", said):
            words = shlex.split(command)
            verb = cli.get_command(context, words[0])
            assert verb is not None, command
            known = {option for parameter in verb.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, command
            for key in (words[i + 1] for i, word in enumerate(words) if word == "--set"):
                raw = {}
                assert override(raw, key.replace("...", "1")) == ""
                ((section, values),) = raw.items()
                assert set(values) <= set(type(getattr(recorded_plan(), section)).model_fields), key
            seen.add(words[0])
    assert seen >= {"run", "freeze", "transfer", "estimate", "explain", "verify", "rehearse", "tokenize"}


def recorded_plan():
    from launcher.plan.plan import Plan

    return Plan()


def test_the_learning_rate_is_traced_from_its_valley_to_its_group(told, kept):
    found = told["groups.hidden.1.learning_rate"]
    (width,) = [t for t in kept["transfer"]["tests"] if (t["hyperparameter"], t["axis"]) == ("learning_rate", "width")]
    base = next(o for o in width["verdict"]["optima"] if o["size"] == 8)
    at_base = kept["transfer"]["at_base_optimum"]
    assert found["source"]["kind"] == ("valley" if at_base else "search")
    if at_base:
        assert f"of {base['num_runs']} runs" in found["source"]["text"]
    assert any("arXiv" in rule or "mup, CompleteP" in rule for rule in found["source"]["rules"])
    factors = re.search(r"hidden: times m_N\^-1, which is ([\d.e-]+) x ([\d.e-]+) = ", found["source"]["text"])
    assert float(factors[1]) * float(factors[2]) == pytest.approx(found["value"], rel=1e-4)
    assert float(factors[2]) == pytest.approx(8 / told["shape.width"]["value"], rel=1e-5)
    assert found["strength"]["outcome"] == kept["transfer"]["together"]["outcome"]
    assert not any("here it is" in one["source"]["text"] for one in told.values())
    reach = told["shape.width"]["value"] / 16
    assert told["transfer.learning_rate.width.power"]["strength"]["extrapolation"] == pytest.approx(reach)


def test_the_search_the_fit_and_the_rest_name_their_own(told, kept):
    assert told["learning_rate.schedule.warmup_steps"]["source"]["kind"] == "search"
    assert told["learning_rate.schedule.warmup_steps"]["strength"]["kind"] == "assumed"
    assert f"trial {kept['provenance']['search']['best_trial']} " in told["clip_norm"]["source"]["text"]
    forecast = told["predicted.loss_nats"]
    assert forecast["strength"]["num_runs"] == kept["fit"]["num_runs"] == 9
    interval = forecast["strength"]["intervals"][0]
    ends = [told[f"predicted.{end}_nats"]["value"] for end in ("low", "high")]
    assert [interval["low"], interval["high"]] == ends
    assert forecast["strength"]["extrapolation"] == told["predicted.extrapolation"]["value"]
    assert told["groups.embedding.weight_decay"]["source"]["kind"] == "rule"
    assert told["groups.readout.weight_decay"]["source"]["kind"] == "default"
    assert told["shape.seq_len"]["source"]["kind"] == "plan"
    assert told["seed"]["cost"].startswith("another seed moves one run's loss by 0.")
    assert "14 points" not in told["predicted.curve"]["source"]["text"]
    for name in ("learning_rate.table_sha256", "learning_rate.samples"):
        assert "this version makes the same" in told[name]["source"]["text"]


def set_plan(section, key, value):
    def edit(body):
        body["provenance"]["plan"][section][key] = value

    return edit


@pytest.mark.parametrize(
    ("field", "key", "value", "change"),
    [
        ("parallelism.microbatch_sequences", "launch.microbatch_sequences", 1,
         lambda d: dataclasses.replace(d, parallelism=dataclasses.replace(d.parallelism, microbatch_sequences=1))),
        ("seed", "launch.seed", 7, lambda d: dataclasses.replace(d, seed=7)),
        ("compiled", "launch.compiled", True, lambda d: dataclasses.replace(d, compiled=True)),
    ],
)  # fmt: skip
def test_a_key_that_the_plan_sets_is_the_source(config, told, tmp_path, field, key, value, change):
    assert told[field]["source"]["kind"] == "default"
    edit = set_plan(*key.split("."), value)
    found = one(other(tmp_path, config, edit, change(read_launch(config))), field)
    assert (found["value"], found["source"]["kind"]) == (value, "plan")
    assert found["source"]["plan_keys"][-1]["is_set"] is True
    if field == "compiled":
        assert found["written"] and found["strength"]["text"].endswith("none computed as this asks")


def test_each_launch_key_goes_to_its_own_field(config, tmp_path):
    """Every key with a value of its own."""
    decision = read_launch(config)
    at_all = {"validate_every_steps": 11, "layers_every_steps": 12, "replay_every_steps": 13}
    degrees = {"data_parallel_shard": 1, "data_parallel_replicate": 2, "tensor": 3, "pipeline": 4, "context": 5,
               "microbatch_sequences": 6, "activation_checkpointing": "full"}  # fmt: skip
    values = {**at_all, **degrees, "checkpoint_every_steps": 14, "spike_rollbacks": 15, "seed": 16, "compiled": True,
              "precision": "bfloat16"}  # fmt: skip
    decision = dataclasses.replace(
        decision, seed=16, compiled=True, precision="bfloat16",
        parallelism=dataclasses.replace(decision.parallelism, **degrees),
        monitoring=dataclasses.replace(decision.monitoring, **at_all),
        checkpointing=dataclasses.replace(decision.checkpointing, every_steps=14),
        spikes=dataclasses.replace(decision.spikes, max_rollbacks=15),
    )  # fmt: skip
    folder = other(tmp_path, config, lambda body: body["provenance"]["plan"]["launch"].update(values), decision)
    told = [found for found in ask("explain", folder)[1]["fields"] if found["source"]["plan_keys"]]
    of_launch = {}
    for found in told:
        (key,) = found["source"]["plan_keys"][-1:]
        if key["key"].startswith("launch."):
            of_launch[key["key"].removeprefix("launch.")] = found["value"]
            assert found["value"] == key["value"], found["field"]
    assert of_launch == values


@pytest.mark.parametrize("outcome", ["holds", "drifts", "cannot_tell"])
def test_the_strength_is_the_verdicts(config, tmp_path, outcome):
    def edit(body):
        for test in body["transfer"]["tests"]:
            if test["hyperparameter"] == "clip_norm":
                test["verdict"] |= {"outcome": outcome, "reasons": ["planted doubt"]}
        for row in body["transfer"]["values"]:
            if row["hyperparameter"] == "clip_norm":
                row["outcome"] = outcome

    found = one(other(tmp_path, config, edit), "clip")
    assert found["strength"]["outcome"] == outcome
    assert f"clip norm over width: {outcome.replace('_', ' ')}" in found["strength"]["text"]
    assert ("planted doubt" in found["strength"]["text"]) == (outcome == "cannot_tell")
    assert any("--spend" in said for said in found["change"]) == (outcome == "cannot_tell")


def test_far_from_its_study_it_says_as_much_and_what_it_cannot(config, told, tmp_path):
    shutil.copytree(config, tmp_path / "gone")
    code, body = ask("explain", tmp_path / "gone")
    assert (code, len(body["notes"])) == (0, 1)
    assert body["notes"][0].startswith("no study lies around this config")
    for found in body["fields"]:
        with_study = told[found["field"]]
        assert (found["value"], found["source"]) == (with_study["value"], with_study["source"])
        assert not any("/study" in said for said in found["change"])
    assert any("`forerun run PLAN --study STUDY --set launch.tensor=...`" in said
               for said in one(tmp_path / "gone", "parallelism.tensor")["change"])  # fmt: skip


def test_the_launch_file_alone_claims_no_evidence(config, told, tmp_path):
    shutil.copy(config / "launch.json", tmp_path)
    code, body = ask("explain", tmp_path / "launch.json")
    assert code == 0
    assert [note.partition(":")[0] for note in body["notes"]] == [
        "no evidence lies beside this config",
        "the plan it was frozen by is not kept beside it",
        "no study lies around this config",
    ]
    assert {found["field"]: found["value"] for found in body["fields"]} == {
        name: found["value"] for name, found in told.items()
    }
    for found in body["fields"]:
        assert found["change"] and found["source"]["text"] and found["strength"]["text"]
        assert not found["source"]["runs"] and not found["strength"]["gates"] and found["cost"] is None, found["field"]
        assert all(key["is_set"] is None for key in found["source"]["plan_keys"])
    by_name = {found["field"]: found for found in body["fields"]}
    assert by_name["predicted.loss_nats"]["strength"]["kind"] == "unknown"
    assert by_name["clip_norm"]["strength"]["outcome"] == told["transfer.clip_norm.width.outcome"]["value"]
    # 16 is not the default of model.seq_len: somebody set it. The seed is the default.
    assert by_name["shape.seq_len"]["source"]["kind"] == "plan"
    assert by_name["seed"]["source"]["kind"] == "default"


def test_evidence_of_an_older_version_leaves_the_studys_plan(study_dir, config, tmp_path):
    shutil.copytree(study_dir, tmp_path / "study")
    folder = tmp_path / "study" / "frozen" / config.name
    body = read_attestation(config / "attestations" / "evidence.json", config.name)
    del body["provenance"]
    attest(folder, "evidence", config.name, body)
    code, told = ask("explain", folder)
    assert code == 0
    (note,) = told["notes"]
    assert "neither the plan nor the runs by stage" in note and note.endswith("the study's as it is now")
    by_name = {found["field"]: found for found in told["fields"]}
    assert by_name["shape.seq_len"]["source"]["plan_keys"][0]["value"] == 16
    assert by_name["clip_norm"]["source"]["runs"] == []
    assert by_name["clip_norm"]["strength"]["num_runs"] > 0
    (tmp_path / "study" / "plan.toml").write_text("[model]\nseq_leng = 3\n")
    assert any("the study's plan cannot be read" in note for note in ask("explain", folder)[1]["notes"])


def test_how_the_evidence_stands_to_the_ledger_around_it(study_dir, config, tmp_path):
    shutil.copytree(study_dir, tmp_path / "study")
    folder = tmp_path / "study" / "frozen" / config.name
    with Ledger.open(tmp_path / "study", recorded_study(tmp_path / "study").question, create=False) as ledger:
        for number in range(2):
            ledger.append("planted", str(number), {})
    (note,) = ask("explain", folder, "seed")[1]["notes"]
    assert re.match(r"the study has [23] records more than when this was frozen", note)  # a driver's start may be one
    body = read_attestation(folder / "attestations" / "evidence.json", config.name)
    attest(folder, "evidence", config.name, {**body, "run_ids": [*body["run_ids"], "0" * 64]})
    assert "1 runs of its evidence are not in the ledger around it" in ask("explain", folder, "seed")[1]["notes"]
    attest(folder, "evidence", config.name, {**body, "ledger_head": "0" * 64})
    (note,) = ask("explain", folder, "seed")[1]["notes"]
    assert note.endswith("another study's")


def test_an_older_ledger_or_one_written_anew_is_no_proof(study_dir, config, tmp_path):
    """Each is whole by itself, so only the config's evidence can tell."""
    shutil.copytree(study_dir, tmp_path / "study")
    folder, ledger = tmp_path / "study" / "frozen" / config.name, tmp_path / "study" / "ledger.db"
    code, body = ask("verify", folder)
    assert code == 0 and any("the ledger around it" in line for line in body["verified"])
    with sqlite3.connect(ledger) as connection:
        head = read_attestation(folder / "attestations" / "evidence.json", config.name)["ledger_head"]
        ((frozen_at,),) = connection.execute("SELECT seq FROM records WHERE hash = ?", (head,))
        connection.execute("DELETE FROM records WHERE seq >= ?", (frozen_at,))
        connection.execute("UPDATE head SET (seq, hash) = (SELECT seq, hash FROM records ORDER BY seq DESC LIMIT 1)")
    connection.close()
    assert ask("status", tmp_path / "study")[0] in (0, 3, 4), "the shorter chain is sound"
    code, body = ask("verify", folder)
    assert code == 5 and head[:12] in body["message"]


@pytest.mark.parametrize(("file", "before", "after"), [
    ("launch.json", '"seed": 1000', '"seed": 1001'),
    ("attestations/evidence.json", "planted", "a better reason"),
    ("attestations/layout.json", '"num_ranks": 2', '"num_ranks": 4'),
])  # fmt: skip
def test_what_was_edited_is_not_explained(config, tmp_path, file, before, after):
    shutil.copytree(config, tmp_path / "edited")
    path = tmp_path / "edited" / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    code, body = ask("explain", tmp_path / "edited", "seed")
    assert (code, body["error"]) == (5, "TamperedError")


@pytest.mark.parametrize(("name", "fields"), [
    ("clip", ["clip_norm"]),
    ("tokens", ["num_tokens"]),
    ("predicted_loss", ["predicted.loss_nats"]),
    ("shape.width", ["shape.width"]),
    ("width", ["shape.width", "base_shape.width", "parametrization.width"]),
    ("schedule.warmup_steps", ["learning_rate.schedule.warmup_steps"]),
    ("warmup_steps", ["learning_rate.schedule.warmup_steps"]),
    ("groups.embedding.lr", ["groups.embedding.learning_rate"]),
    ("groups.hidden.lr", ["groups.hidden.1.learning_rate", "groups.hidden.2.learning_rate"]),
    ("groups.2.learning_rate", ["groups.hidden.1.learning_rate"]),  # its place in the JSON
    ("monitoring.*", ["monitoring.validate_every_steps", "monitoring.layers_every_steps",
                      "monitoring.replay_every_steps"]),
    ("checkpointing", ["checkpointing.every_steps", "checkpointing.keep"]),
    ("transfer.clip_norm.*.outcome", ["transfer.clip_norm.width.outcome"]),
    ("*_share", ["spikes.clip_share"]),
])  # fmt: skip
def test_names_as_people_type_them(config, name, fields):
    found = leaves.find(leaves.leaves(read_launch(config)), name)
    assert [leaf.path for leaf in found] == fields


@pytest.mark.parametrize(("name", "said"), [
    ("shpae.width", "did you mean shape.width or "),
    ("groups.embedding.learnign_rate", "did you mean groups.embedding.learning_rate"),
    ("warmup_stpes", "did you mean learning_rate.schedule.warmup_steps"),
    ("zzzz", "there are schema_version, shape, "),
    ("", "there are schema_version, "),
    ("shape.", "no field of this config has that name"),
    ("seed.more", "no field of this config has that name"),
])  # fmt: skip
def test_no_such_field(config, name, said):
    code, body = ask("explain", config, name)
    assert (code, body["error"]) == (2, "UnknownFieldError")
    assert said in body["message"]


def test_the_table_has_a_line_a_field_and_one_field_a_block(config, told):
    code, out, _ = forerun("explain", config)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(told) + 1]] == list(told)
    (clip,) = [line for line in lines if line.startswith("clip_norm ")]
    assert "0.453" in clip or f"{told['clip_norm']['value']:.6g}" in clip
    assert "search of 4 runs" in clip and "transfer cannot tell*" in clip
    assert lines[len(told) + 1] == "* accepted by hand"
    assert lines[-1] == f"one field whole: forerun explain {config} clip_norm"
    _, out, _ = forerun("explain", config, "seed")
    assert [line.split()[0] for line in out.splitlines() if line[:3] not in ("   ", "")] == [
        "seed", "from", "strength", "change", "cost",
    ]  # fmt: skip
    assert all(len(line) <= 120 for line in out.splitlines() if "/" not in line)
    _, out, _ = forerun("explain", config, "spikes.threshold")
    assert out.startswith("spikes.threshold = 6  (left out at its default)\n")


def test_a_config_and_a_parametrization_are_two_questions(config):
    code, _, err = forerun("explain", config, "--shape", "width=8", "--lr", "0.1")
    assert code == 2
    assert "--shape, --lr: of a parametrization, and not with FROZEN" in err
    code, _, err = forerun("explain", "nowhere", "seed")
    assert code == 2 and "nowhere" in err


def test_it_loads_nothing_heavy(config):
    script = (
        "import sys\nfrom launcher.cli.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print([name for name in ('torch', 'mup', 'ray', 'scipy', 'numpy') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "explain", str(config)], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


def test_every_field_that_a_decision_can_have_is_explained():
    """A new one wants an explainer, and the name of its key here is what misses it."""
    curve = {name for name in leaf_fields() if name.startswith("predicted.curve.")}
    assert set(leaves.keys_of()) == (leaf_fields() - curve) | {"predicted.curve"}
    assert set(explainers.EXPLAINERS) == set(leaves.keys_of())


def test_a_new_field_is_noticed():
    policy = dataclasses.make_dataclass("Policy", [("every_steps", int), ("planted", int)], frozen=True)
    wider = dataclasses.make_dataclass(
        "Wider", [("checkpointing", policy)], bases=(Decision,), kw_only=True, frozen=True
    )
    assert set(leaves.keys_of(wider)) - set(explainers.EXPLAINERS) == {"checkpointing.planted"}


VARIANTS = {
    "completep": {"parametrization": named("completep")},
    "sp": {"parametrization": named("sp")},
    "umup, all decays": {"parametrization": named("umup", decayed="all")},
    "wsd, a batch that warms up": {
        "schedule": Schedule(kind="wsd", num_steps=12, decay_steps=4, batch_warmup_steps=3, batch_warmup_stages=2)
    },
    "no clip": {"clip_norm": None},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_decisions_are_explained_too(manifest, tmp_path, name):
    changes = dict(VARIANTS[name])
    if "schedule" in changes:
        changes["num_tokens"] = int(changes["schedule"].num_full_batches * 256)
    decision = wide_decision(manifest, **changes)
    write_launch(tmp_path, decision)
    code, body = ask("explain", tmp_path / decision.digest)
    assert code == 0
    written = {found["field"]: found["value"] for found in body["fields"] if found["written"]}
    assert written == flat(json.loads((tmp_path / decision.digest / "launch.json").read_text())["decision"])
    text = {found["field"]: found["source"]["text"] for found in body["fields"]}
    assert not any(", times " in text[f"forward.{part}"] for part in ("attention", "residual"))


def planted(config, **parts):
    """What is known of the config with parts of its evidence replaced."""
    known = known_of(config, config)
    found = {**known.evidence, **parts}
    return dataclasses.replace(known, evidence=found, plan=found["provenance"]["plan"])


def explained(known, name) -> Explained:
    (leaf,) = leaves.find(leaves.leaves(known.decision), name)
    return explainers.explain(known, leaf)


def test_what_a_closed_fit_gate_bears_on_is_said_before_its_value(config):
    fit = {"name": "fit", "outcome": "cannot_tell", "reason": "at_bound: E"}
    for name in ("predicted.loss_nats", "shape.width"):
        found = explained(planted(config, gates=[fit]), name)
        assert found.warnings == ("the forecast is inconclusive: the fit gate cannot tell: at_bound: E",)
        assert block(found, 100).startswith(found.warnings[0]) and table_text([found]).startswith(found.warnings[0])
        assert explained(planted(config), name).warnings == ()


def test_a_searched_axis_is_found_by_the_search(config, kept):
    provenance = copy.deepcopy(kept["provenance"])
    provenance["plan"]["search"]["axes"] = {"beta2": [0.9, 0.99], "embedding_multiplier": [0.5, 2.0]}
    provenance["search"]["ranges"] |= {"beta2": [0.9, 0.99], "embedding_multiplier": [0.5, 2.0]}
    provenance["search"]["best"] |= {"beta2": 0.95, "embedding_multiplier": 1.0}
    provenance["search"]["open_edges"] = [{"axis": "beta2", "side": "high", "range": [0.9, 0.99]}]
    known = planted(config, provenance=provenance)
    found = explained(known, "groups.readout.beta2")
    assert found.source.kind == "search" and found.source.plan_keys[0].key == "search.axes.beta2"
    assert any("the best trials lie at the high end" in said for said in found.change)
    assert explained(known, "forward.embedding").source.kind == "search"
    assert explained(planted(config), "forward.embedding").source.kind == "fixed"
    assert explained(planted(config), "groups.readout.beta2").source.kind == "default"


def test_without_a_valley_the_rate_is_the_searchs(config, kept):
    known = planted(config, transfer={**kept["transfer"], "at_base_optimum": False})
    assert explained(known, "groups.readout.lr").source.kind == "search"


@pytest.mark.parametrize(("axis", "field"), [("depth", "shape.num_layers"), ("batch", "batch_tokens")])
def test_a_test_over_an_axis_speaks_of_its_size(config, kept, axis, field):
    assert explained(planted(config), field).strength.kind == "assumed"
    tests = copy.deepcopy(kept["transfer"]["tests"])
    tests[1]["axis"] = tests[1]["verdict"]["axis"] = axis
    found = explained(planted(config, transfer={**kept["transfer"], "tests": tests}), field)
    assert (found.strength.kind, found.strength.outcome) == ("measured", tests[1]["verdict"]["outcome"])
    assert (found.cost is not None) == (axis == "batch")


def test_a_number_that_no_rule_makes_is_not_explained_away(config):
    """Groups and brake of another version, or of another hand: said, and not called the rule's."""
    known = known_of(config, config)
    groups = tuple(dataclasses.replace(group, learning_rate=0.5) for group in known.decision.groups)
    abort = dataclasses.replace(known.decision.abort, train_loss_above_nats=9.0)
    rate = dataclasses.replace(known.decision.learning_rate, table_sha256="0" * 64)
    decision = dataclasses.replace(known.decision, groups=groups, abort=abort, learning_rate=rate)
    other = dataclasses.replace(known, decision=decision)
    assert "here it is " in explained(other, "groups.readout.lr").source.text
    assert "another version's rule" in explained(other, "abort.train_loss_above_nats").source.text
    assert "makes another of the schedule" in explained(other, "table_sha256").source.text


def test_what_is_kept_for_it_names_no_place(study_dir, kept):
    """Freezing leaves machines and folders out of the evidence."""
    text = json.dumps(kept["provenance"])
    assert str(study_dir.parent) not in text
    assert "cluster" not in kept["provenance"]["plan"]
    assert "path" not in kept["provenance"]["plan"]["data"]
