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
EACH = pytest.mark.parametrize("trainer", COMMANDS)


@EACH
def test_fidelity_judges_every_leaf_field_once_and_loses_none(tmp_path, manifest, trainer):
    export_case.assert_judges_every_leaf(fidelity.exporter(trainer).export, manifest, tmp_path)


@EACH
def test_the_launch_line_starts_the_frozen_number_of_ranks(tmp_path, manifest, trainer):
    for num_ranks, layout, told in export_case.LAYOUTS:
        out = tmp_path / str(num_ranks)
        fidelity.exporter(trainer).export(export_case.one_sequence_each(manifest, num_ranks), out)
        words = " ".join(export_case.launch_words(out, layout, "x=1", **told))
        assert words.endswith(COMMANDS[trainer].format(out))


def test_what_travels_needs_neither_forerun_nor_torch(tmp_path, manifest, corpus):
    fidelity.exporter("torchtitan").export(wide_decision(manifest), tmp_path)
    export_case.assert_travels(tmp_path, corpus, "proxies.data.tokens", "proxies.core.schedule")
