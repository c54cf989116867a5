"""`forerun explain FROZEN [FIELD]`: the provenance of every field, written at the freeze and looked
up from there.
"""

import copy
import dataclasses
import json
import re
import shutil
import sqlite3
import subprocess
import sys

import click
import pytest
from export_case import leaf_fields
from tiny_study import GATES, ask, set_gates

from launcher.cli.cli import cli
from launcher.explanations.context import known_of
from launcher.explanations.provenance import origin_of, records_of
from launcher.explanations.record import fields_of, find
from launcher.explanations.text import block, table_text
from launcher.frozen.launch_file import attest, read_attestation, read_launch
from launcher.report.body import body_of
from launcher.study import evidence
from launcher.study.study_folder import recorded_study
from sweeps.store.ledger import Ledger


@pytest.fixture(scope="module")
def study_dir(frozen_once):
    return frozen_once


@pytest.fixture(scope="module")
def config(study_dir):
    (folder,) = (study_dir / "frozen").iterdir()
    return folder


@pytest.fixture(scope="module")
def told(config):
    """Every field by name, as `--json` has it."""
    code, body = ask("explain", config)
    assert (code, body["digest"]) == (0, config.name)
    return {one["field"]: one for one in body["fields"]}


@pytest.fixture(scope="module")
def known(study_dir, config):
    """What the study knew when it froze."""
    study, ledger = recorded_study(study_dir), Ledger.read(study_dir)
    with pytest.MonkeyPatch.context() as patch:
        set_gates(patch)
        found = evidence.gather(study, ledger)
    return known_of(study, found, read_launch(config), body_of(study, ledger, found))


def but(known, decision=None, **body):
    """The same with a part of the report, or of the decision, replaced."""
    changed = {
        part: {**known.body[part], **value} if isinstance(value, dict) else value
        for part, value in body.items()
    }
    decision = dataclasses.replace(known.decision, **(decision or {}))
    return dataclasses.replace(known, body={**known.body, **changed}, decision=decision)


def recorded(known):
    """The records by field."""
    return {record.field: record for record in records_of(known)}


def test_every_field_is_told_with_the_value_of_the_launch_file(config, told):
    decision = json.loads((config / "launch.json").read_text())["decision"]
    assert {name: told[f"shape.{name}"]["value"] for name in decision["shape"]} == decision["shape"]
    assert told["groups.embedding.init_std"]["value"] == decision["groups"][0]["init_std"]
    assert [told[name]["value"] for name in ("seed", "clip_norm")] == [
        decision["seed"],
        decision["clip_norm"],
    ]
    assert told["spikes.threshold"]["value"] == 6.0  # left out of the file at its default


def test_every_field_has_a_source_a_strength_and_what_would_change_it(told):
    """Plan keys are keys, and every command that is named is one."""
    context, seen = click.Context(cli), set()
    for name, found in told.items():
        assert found["source"]["text"] and found["strength"]["text"] and all(found["change"]), name
        assert found["source"]["plan_keys"] or found["source"]["kind"] not in (
            "plan",
            "default",
            "search",
        ), name
        said = found["source"]["text"] + found["strength"]["text"] + "".join(found["change"])
        assert "None" not in said and "{}." not in said, name
        for text in (found["source"]["text"], found["strength"]["text"]):  # sentences, or a formula
            assert re.match(r"[A-Z0-9]|ln\(|sqrt\(|m_[NLBD]", text) and not text.endswith(
                (".", ";")
            ), text
            assert (
                max(part.count(";") for part in re.sub(r"\([^()]*\)", "", text).split(". ")) <= 1
            ), text
        for command in re.findall(r"`forerun ([^`]+)`", said):
            verb = cli.get_command(context, command.split()[0])
            assert verb is not None, command
            known = {option for parameter in verb.params for option in parameter.opts}
            assert {word for word in command.split() if word.startswith("--")} <= known, command
            seen.add(command.split()[0])
    assert seen >= {"run", "freeze", "transfer", "explain", "tokenize"}


def test_what_is_told_is_what_the_records_say(study_dir, told, known):
    """Plan keys, run ids, gates: all held against plan and ledger."""
    study, results = recorded_study(study_dir), Ledger.read(study_dir).results()
    seeds = {spec.id: spec.seed for spec in known.specs}
    num_keys = num_ids = 0
    for found in told.values():
        for key in found["source"]["plan_keys"]:
            section, name = key["key"].split(".")[:2]
            assert name in type(getattr(study.plan, section)).model_fields, key
            num_keys += 1
        for runs in found["source"]["runs"]:
            assert set(runs["ids"]) <= results.keys()
            assert runs["num_runs"] == len(set(runs["ids"]))
            assert runs["num_seeds"] == len({seeds[id] for id in runs["ids"]})
            num_ids += len(runs["ids"])
        for gate in found["strength"]["gates"]:
            assert gate["outcome"] == GATES[gate["name"]]
            assert gate["accepted"] == ("planted" if gate["outcome"] != "passed" else None)
    assert num_keys > 100 and num_ids > 100


def test_the_learning_rate_is_traced_from_its_loss_basin_to_its_group(told, known):
    found = told["groups.hidden.1.learning_rate"]
    (test,) = known.tests_on(lambda *question: question == ("learning_rate", "width"))
    width = test.verdict
    base = next(optimum for optimum in width["optima"] if optimum["size"] == 8)
    at_base = known.body["transfer"]["at_base_optimum"]
    assert found["source"]["kind"] == ("valley" if at_base else "search")
    if at_base:
        assert f"from {base['num_runs']} runs" in found["source"]["text"]
    assert found["source"]["rules"][0].startswith("mup: ")
    assert "For hidden parameters: the base's value times m_N^-1" in found["source"]["text"]
    assert found["strength"]["outcome"] == known.body["transfer"]["together"]["outcome"]
    reach = told["shape.width"]["value"] / 16
    assert told["transfer.learning_rate.width.power"]["strength"]["extrapolation"] == pytest.approx(
        reach
    )


def test_the_search_the_fit_and_the_rest_name_their_own(told, known):
    kinds = {
        name: (found["source"]["kind"], found["strength"]["kind"]) for name, found in told.items()
    }
    assert {
        "learning_rate.schedule.warmup_steps": ("search", "assumed"),
        "clip_norm": ("search", "measured"),
        "groups.readout.weight_decay": ("default", "assumed"),
        "groups.embedding.weight_decay": ("rule", "assumed"),
        "groups.readout.init_std": ("rule", "measured"),
        "forward.output": ("rule", "measured"),
        "shape.width": ("fit", "measured"),
        "shape.seq_len": ("plan", "assumed"),
        "shape.num_heads": ("derived", "exact"),
        "data.data_id": ("corpus", "exact"),
        "spikes.rollback_steps": ("fixed", "assumed"),
        "optimizer": ("fixed", "assumed"),
        "parallelism.tensor": ("default", "chosen"),
        "seed": ("default", "chosen"),
    }.items() <= kinds.items()
    assert f"trial {known.body['search']['best_trial']} " in told["clip_norm"]["source"]["text"]
    forecast = told["predicted.loss_nats"]["strength"]
    assert (forecast["num_runs"], forecast["extrapolation"]) == (
        9,
        told["predicted.extrapolation"]["value"],
    )


@pytest.mark.parametrize("outcome", ["holds", "drifts", "cannot_tell"])
def test_the_strength_is_the_verdicts(known, outcome):
    rows = [{**row, "outcome": outcome} for row in known.body["transfer"]["values"]]
    verdict = {"outcome": outcome, "reasons": ["planted doubt"]}
    tests = tuple(
        dataclasses.replace(one, verdict={**one.verdict, **verdict}) for one in known.tests
    )
    found = recorded(but(dataclasses.replace(known, tests=tests), transfer={"values": rows}))[
        "clip_norm"
    ]
    assert found.strength.outcome == outcome
    assert ("planted doubt" in found.strength.text) == (outcome == "cannot_tell")
    assert any("--spend" in said for said in found.change) == (outcome == "cannot_tell")


@pytest.mark.parametrize("lacks", ["all", "a field"])
def test_without_the_record_one_sentence_says_who_writes_it(config, tmp_path, lacks):
    """A config frozen before, or by a version with fewer fields."""
    folder = tmp_path / "before"
    shutil.copytree(config, folder)
    path = folder / "attestations" / "provenance.json"
    if lacks == "all":
        path.unlink()
    else:
        body = read_attestation(path, config.name)
        attest(folder, "provenance", config.name, {**body, "fields": body["fields"][1:]})
    code, body = ask("explain", folder, "seed")
    if lacks == "all":  # a config that `verify` rejects is not explained either
        assert (code, body["error"]) == (5, "TamperedError")
    else:
        assert (code, body["error"]) == (4, "NoProvenanceError")
        assert "`forerun freeze STUDY`" in body["message"] and "schema_version" in body["message"]
    assert ask("verify", folder)[0] == (5 if lacks == "all" else 0)


def test_an_older_ledger_or_one_written_anew_is_no_proof(study_dir, config, tmp_path):
    """Each is whole by itself, so only the config's evidence can tell."""
    shutil.copytree(study_dir, tmp_path / "study")
    folder, ledger = tmp_path / "study" / "frozen" / config.name, tmp_path / "study" / "ledger.db"
    code, body = ask("verify", folder)
    assert code == 0 and any("the study's ledger" in line for line in body["verified"])
    with sqlite3.connect(ledger) as connection:
        head = read_attestation(folder / "attestations" / "evidence.json", config.name)[
            "ledger_head"
        ]
        ((frozen_at,),) = connection.execute("SELECT seq FROM records WHERE hash = ?", (head,))
        connection.execute("DELETE FROM records WHERE seq >= ?", (frozen_at,))
        connection.execute(
            "UPDATE head SET (seq, hash) = (SELECT seq, hash FROM records ORDER BY seq DESC LIMIT "
            "1)"
        )
    connection.close()
    assert ask("status", tmp_path / "study")[0] in (0, 3, 4), "the shorter chain is sound"
    code, body = ask("verify", folder)
    assert code == 5 and head[:12] in body["message"]


def test_what_was_edited_is_not_explained(config, tmp_path):
    shutil.copytree(config, tmp_path / config.name)
    path = tmp_path / config.name / "attestations" / "provenance.json"
    assert "planted" in path.read_text()
    path.write_text(path.read_text().replace("planted", "a better reason", 1))
    code, body = ask("explain", tmp_path / config.name, "seed")
    assert (code, body["error"]) == (5, "TamperedError")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("clip", ["clip_norm"]),
        ("warmup_fraction", ["learning_rate.schedule.warmup_steps"]),
        ("warmup", ["learning_rate.schedule.warmup_steps"]),
        ("width", ["shape.width", "base_shape.width", "parametrization.width"]),
        ("groups.embedding.lr", ["groups.embedding.learning_rate"]),
        ("groups.hidden.lr", ["groups.hidden.1.learning_rate", "groups.hidden.2.learning_rate"]),
        ("transfer.clip_norm.*.outcome", ["transfer.clip_norm.width.outcome"]),
    ],
)
def test_names_as_people_type_them(config, name, fields):
    assert [field.path for field in find(fields_of(read_launch(config)), name)] == fields


def test_no_such_field(config):
    for name, said in (("shpae.width", "shape.width"), ("", "")):
        code, body = ask("explain", config, name)
        assert (code, body["error"], said in body["message"]) == (2, "UnknownFieldError", True)


def test_it_loads_nothing_heavy(config):
    script = (
        "import sys\nfrom launcher.cli.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print([name for name in ('torch', 'mup', 'ray', 'scipy', 'numpy') if name in "
        "sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "explain", str(config)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == "[]"


def test_every_field_that_a_decision_can_have_has_an_origin():
    for key in leaf_fields():
        assert origin_of(key).kind
    for key in ("planted", "checkpointing.planted", "groups.planted"):
        with pytest.raises(KeyError):
            origin_of(key)


def test_what_a_closed_fit_gate_bears_on_is_said_before_its_value(known):
    fit = {"name": "fit", "outcome": "cannot_tell", "reason": "at_bound: E"}
    told, fields = (
        recorded(but(known, gates=[fit])),
        {field.path: field for field in fields_of(known.decision)},
    )
    for name in ("predicted.loss_nats", "shape.width"):
        found = told[name]
        assert "at_bound: E" in found.warnings[0]
        assert block(fields[name], found).startswith(found.warnings[0])
        assert table_text([(fields[name], found)]).startswith(found.warnings[0])
        assert recorded(known)[name].warnings == ()


def test_a_searched_axis_is_found_by_the_search(known):
    axes = {"beta2": (0.9, 0.99), "embedding_multiplier": (0.5, 2.0)}
    plan = known.plan.model_copy(
        update={"search": known.plan.search.model_copy(update={"axes": axes})}
    )
    search = copy.deepcopy(known.body["search"])
    search["ranges"] |= {name: list(ends) for name, ends in axes.items()}
    search["best"] |= {"beta2": 0.95, "embedding_multiplier": 1.0}
    told = recorded(but(dataclasses.replace(known, plan=plan), search=search))
    found = told["groups.readout.beta2"]
    assert found.source.kind == "search" and found.source.plan_keys[0].key == "search.axes.beta2"
    assert told["forward.embedding"].source.kind == "search"
    told = recorded(known)
    assert (told["forward.embedding"].source.kind, told["groups.readout.beta2"].source.kind) == (
        "rule",
        "default",
    )


def test_a_measured_rule_says_the_exponent_to_the_target_and_that_of_the_runs(told, known):
    rule = next(rule for rule in known.decision.transfer if rule.source == "measured")
    said = told["transfer.learning_rate.duration.power"]["source"]["text"]
    if rule.power != round(rule.measured_power, 2):
        assert (
            f"{rule.power:+.2f} from base to target, {rule.measured_power:+.2f} over the sizes "
            "that were run" in said
        )
    [test] = known.tests_on(lambda *question: question == ("learning_rate", "duration"))
    bent = {"probability": 0.62, "octaves_per_doubling": {"value": 0.1, "interval": [-0.2, 0.4]}}
    for measured in (True, False):
        clause = dataclasses.replace(
            test, verdict={**test.verdict, "bend": bent, "power_is_measured": measured}
        ).words()
        assert (
            "bends with probability 0.62, beyond the runs by +0.10 [-0.20, +0.40]" in clause
        ) == measured
