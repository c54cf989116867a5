"""What holds of every export to another trainer that makes the whole run itself."""

import export_case
import pytest
from export_case import wide_decision

from launcher.exporters import fidelity

COMMANDS = {
    "torchtitan": "-m torchtitan.train --module forerun_torchtitan --config main_run x=1",
    "huggingface": "{}/forerun_huggingface.py x=1",
    "olmo-core": "{}/train.py x=1",
}
NAMES = {
    "torchtitan": ("layers.1.attention.qkv_linear.wk.weight", "layers.0.feed_forward.w2.weight", "lm_head.weight"),
    "huggingface": ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"),
    "olmo-core": ("blocks.1.attention.w_k.weight", "blocks.0.feed_forward.w2.weight", "lm_head.w_out.weight"),
}
OURS = ("layers.1.attention.wk.weight", "layers.0.feed_forward.w2.weight", "lm_head.weight")
EACH = pytest.mark.parametrize("trainer", COMMANDS)


@EACH
def test_fidelity_judges_every_leaf_field_once_and_loses_none(tmp_path, manifest, trainer):
    export_case.assert_judges_every_leaf(fidelity.exporter(trainer).export, manifest, tmp_path)


@EACH
def test_the_launch_line_starts_the_frozen_number_of_ranks(tmp_path, manifest, trainer):
    for num_ranks, layout in export_case.LAYOUTS:
        out = tmp_path / str(num_ranks)
        fidelity.exporter(trainer).export(export_case.one_sequence_each(manifest, num_ranks), out)
        words = " ".join(export_case.launch_words(out, layout, "x=1"))
        assert words.endswith(COMMANDS[trainer].format(out))


def test_what_travels_needs_neither_forerun_nor_torch(tmp_path, manifest, corpus):
    fidelity.exporter("torchtitan").export(wide_decision(manifest), tmp_path)
    export_case.assert_travels(tmp_path, corpus, "proxies.data.tokens", "proxies.core.schedule")


@EACH
def test_unknown_versions_are_refused_naming_the_known(tmp_path, manifest, trainer):
    export, known = fidelity.exporter(trainer).export, fidelity.exporter(trainer).VERSIONS
    said = f"version '0.2.2' is unknown: {', '.join(known)}"
    export_case.assert_refused(export, wide_decision(manifest), tmp_path / "out", said, version="0.2.2")


@EACH
def test_names_are_mapped_one_to_one(trainer):
    names = fidelity.exporter(trainer).parameter_names(export_case.SHAPE)
    assert len(set(names.values())) == len(names)
    assert tuple(names[name] for name in OURS) == NAMES[trainer]
