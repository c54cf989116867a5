"""Tests of the readers of public data sets, on tiny files in the published formats.

Published pickles are read without calling any function that they name.
"""

import gzip
import importlib.util
import json
import lzma
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("datasets", "downloads", "inert_pickle")
"""Modules that the import of the readers loads."""


@pytest.fixture(scope="module")
def modules():
    """The benchmarks' modules `datasets` and `inert_pickle`.

    They are removed afterwards, because a library has the name `datasets` too.
    """
    sys.path.insert(0, str(ROOT / "benchmarks" / "statistics"))
    try:
        yield importlib.import_module("datasets"), importlib.import_module("inert_pickle")
    finally:
        sys.path.remove(str(ROOT / "benchmarks" / "statistics"))
        for name in MODULES:
            sys.modules.pop(name, None)


class FolderMaker:
    """An object whose pickle would create a folder if it were loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class WandBRunData:
    """A run with the attributes that the xLSTM study pickled."""

    def __init__(self, summary):
        self.summary = summary


def make_frame(**columns):
    """Return a pandas table of columns (values, dtype), with an object index as in older pandas."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {name: pandas.Series(values, dtype=dtype) for name, (values, dtype) in columns.items()}
    )
    table.columns = pandas.Index(list(columns), dtype=object)
    return table


def test_pickle_is_read_without_calling_a_function(modules, tmp_path):
    _, inert_pickle = modules
    target = tmp_path / "made"
    value = {
        "list": [1, 2.5, None, True, "text", b"bytes", -3, 2**40],
        "empty": ((), [], {}),
        "call": FolderMaker(target),
    }
    read = inert_pickle.read_pickled(pickle.dumps(value, protocol=4))
    assert not target.exists()
    assert read["list"] == value["list"] and read["empty"] == value["empty"]
    assert read["call"].function.endswith(".mkdir") and read["call"].arguments == (str(target),)
    assert inert_pickle.read_pickled(pickle.dumps([[7]] * 3, protocol=5)) == [[7]] * 3


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04.", b"not a pickle", pickle.dumps({1: 2}, protocol=0), b"\x80\x04K\x01e."],
)
def test_content_that_is_no_plain_pickle_is_refused(modules, content):
    _, inert_pickle = modules
    with pytest.raises(ValueError):
        inert_pickle.read_pickled(content)


def test_arrays_and_tables_are_read_back(modules):
    _, inert_pickle = modules
    arrays = [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([1, 2], dtype=">i4"),
        np.array(["a", None], dtype=object),
    ]
    for protocol in (4, 5):
        for array in arrays:
            read = inert_pickle.read_array(
                inert_pickle.read_pickled(pickle.dumps(array, protocol=protocol))
            )
            np.testing.assert_array_equal(read, array)
    table = make_frame(
        name=(["x", "y"], object),
        size=([1, 2], "int64"),
        loss=([2.5, 3.5], "float64"),
        n=([3, 4], "int64"),
    )
    read = inert_pickle.read_frame(inert_pickle.read_pickled(pickle.dumps(table, protocol=4)))
    assert {name: column.tolist() for name, column in read.items()} == table.to_dict("list")
    with pytest.raises(ValueError, match="not a table"):
        inert_pickle.read_frame(3)


def list_points(family):
    """Return (params, tokens, loss) of each run of a family."""
    table = family.table
    return list(zip(table.params.tolist(), table.tokens.tolist(), table.loss.tolist(), strict=True))


def test_routing_reader_takes_the_last_loss_of_each_run_and_a_curve(modules, tmp_path):
    datasets, _ = modules
    rows = [
        "hyper_id,step,loss_validation,num_experts,k,router_type,routing_frequency,flop_increase,dense_parameter_count",
        "0,0,10,1,1,Dense,0.5,1.0,1e8",
        "0,20000,4,1,1,Dense,0.5,1.0,1e8",
        "0,249000,3,1,1,Dense,0.5,1.0,1e8",
        "1,249000,2,64,1,S-Base,0.5,1.0,2e8",
        "2,249000,2,64,2,S-Base,0.5,1.0,2e8",
        "3,9,2,1,1,Dense,0.5,2.0,1e8",
    ]
    (tmp_path / "curves.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    families = {family.name: family for family in datasets.FETCHED_READERS["routing"](tmp_path)}
    step_tokens = 2**19
    assert list_points(families["routing_dense"]) == [(1e8, 250_000 * step_tokens, 3.0)]
    assert list_points(families["routing_dense_curve"]) == [
        (1e8, 20_000 * step_tokens, 4.0),
        (1e8, 249_000 * step_tokens, 3.0),
    ]
    assert list_points(families["routing_s_base_64"]) == [(2e8, 250_000 * step_tokens, 2.0)]


def test_quest_reader_separates_kinds_of_quantization(modules, tmp_path):
    datasets, _ = modules
    common = {
        "non_embedding_parameters": 10,
        "tokens": 1000,
        "loss": 3.0,
        "w_bits": 16,
        "a_bits": 16,
    }
    trust = common | {"w_quant": "TrustQuantizer", "a_quant": "TrustQuantizer", "w_bits": 4}
    runs = [
        common | {"w_quant": "NoQuantizer", "a_quant": "NoQuantizer"},
        trust | {"a_bits": 4, "loss": 3.5},
        trust | {"a_bits": 8, "loss": 3.4},
    ]
    (tmp_path / "runs_for_scaling.json").write_text(json.dumps(runs))
    families = {family.name: family for family in datasets.FETCHED_READERS["quest"](tmp_path)}
    assert list_points(families["quest_bf16"]) == [(10, 1000, 3.0)]
    assert list_points(families["quest_trust_w4a4"]) == [(10, 1000, 3.5)]


def test_xlstm_reader_drops_unfinished_and_diverged_runs(modules, tmp_path):
    datasets, _ = modules

    def make_run(params, step, loss, batch=512, planned=100):
        return WandBRunData(
            {
                "_step": step,
                "dataset/": {"global_batch_size": batch, "num_train_steps": planned},
                "model/": {"num_params": params},
                "val/": {"dclm_loss": loss},
            }
        )

    rounds = {
        "first": [
            make_run(10, 100, 3.0),
            make_run(20, 100, 2.0),
            make_run(20, 100, 2.0),
            make_run(30, 50, 2.5),
            make_run(40, 100, 9.0),
        ],
        "second": [
            make_run(50, 100, 2.2),
            make_run(60, 100, 2.1, batch=256),
            WandBRunData({"_step": 0}),
        ],
    }
    for name in datasets.XLSTM_FILES:
        (tmp_path / f"isoflop_{name}_wandb_data.inert").write_bytes(
            pickle.dumps(rounds, protocol=4)
        )
    families = {family.name: family for family in datasets.FETCHED_READERS["xlstm"](tmp_path)}
    tokens = 100 * 512 * 2048  # steps, sequences per step, tokens per sequence
    table = families["xlstm_llama_ctx2048"].table
    assert list_points(families["xlstm_llama_ctx2048"]) == [
        (10, tokens, 3.0),
        (20, tokens, 2.0),
        (50, tokens, 2.2),
    ]
    # Repeated, unfinished and diverged runs, and those of another batch size, are dropped. The
    # budget of a round is that of the mean size of its runs: 15 in the first round, 50 in the
    # second.
    assert table.budget.tolist() == [6 * 15 * tokens, 6 * 15 * tokens, 6 * 50 * tokens]


def test_supercollapse_reader_takes_the_last_loss_of_each_history(modules, tmp_path):
    datasets, _ = modules
    history = make_frame(
        step=([0, 7], "int64"), test_loss=([4.0, 0.7], "float64"), tokens=([0.0, 70.0], "float64")
    )
    runs_of_one_schedule = make_frame(P=([10, 20], "int64"), history=([history, history], object))
    runs_of_two_schedules = make_frame(
        num_params=([10, 20], "int64"),
        schedule=(["linear", "linear"], object),
        decay_frac=([1.0, 0.2], "float64"),
        history=([history, history], object),
    )
    for name, table in (
        ("chess", runs_of_one_schedule),
        ("chess_const", runs_of_one_schedule),
        ("c5m", runs_of_one_schedule),
        ("c5m_schedules", runs_of_two_schedules),
    ):
        (tmp_path / f"{name}.inert").write_bytes(pickle.dumps(table, protocol=4))
    families = {
        family.name: family for family in datasets.FETCHED_READERS["supercollapse"](tmp_path)
    }
    step_tokens = 2**16
    assert list_points(families["collapse_chess_linear"]) == [
        (10, 7 * step_tokens, 0.7),
        (20, 7 * step_tokens, 0.7),
    ]
    assert list_points(families["collapse_cifar5m_cross_linear"]) == [(10, 70, 0.7)]


def test_openwebtext2_reader_reads_nested_tables(modules, tmp_path):
    datasets, _ = modules
    pandas = pytest.importorskip("pandas")
    sizes, tokens, losses = (np.array(values) for values in ([1e6, 2e6], [2e8, 1e8], [4.0, 4.1]))
    budgets = make_frame(
        flops=([1.2e15, 9e15], "float64"),
        orig_n=([pandas.Series(sizes), np.nan], object),
        orig_t=([pandas.Series(tokens), np.nan], object),
        orig_loss=([pandas.Series(losses), np.nan], object),
    )
    setup = {key: ([key], object) for key in ("hparams", "warmup", "decay", "param_count", "val")}
    content = pickle.dumps(make_frame(**setup, data=([budgets], object)), protocol=4)
    (tmp_path / "summary_df_owt2.inert").write_bytes(lzma.compress(content))
    (family,) = datasets.FETCHED_READERS["openwebtext2"](tmp_path)
    assert family.name == "openwebtext2_hparams_warmup_decay_param_count_val"
    assert family.group == "refined_web"
    assert list_points(family) == [(1e6, 2e8, 4.0), (2e6, 1e8, 4.1)]
    assert family.table.budget.tolist() == [1.2e15, 1.2e15]


def test_opt_and_mixing_laws_readers_convert_their_units(modules, tmp_path):
    datasets, _ = modules
    # The file has millions of parameters, decimal logarithms of tokens and FLOPs, and a perplexity.
    (tmp_path / "opt_trajectories.csv").write_text(
        "model_name,model_size,steps,num_token,flops,ppl\nOPT,125m,2,9.0,17.8,20\n"
    )
    (family,) = datasets.FETCHED_READERS["colpret"](tmp_path)
    assert list_points(family) == [(1.25e8, 1e9, pytest.approx(np.log(20)))]
    for size in ("70M", "160M", "305M", "410M"):
        lines = [
            f"/ckpts//{size}_RP_{mix}-0.5-0.5/10000\t/data/pile.valid.{domain}.bin\t3.5"
            for mix, domain in ((0, "Pile-CC"), (0, "Github"), (1, "Pile-CC"))
        ]
        (tmp_path / f"{size}.txt").write_text("\n".join(lines))
    families = {family.name: family for family in datasets.FETCHED_READERS["mixing_laws"](tmp_path)}
    assert [point[0] for point in list_points(families["mixing_laws_red_pajama_0_curve"])] == [
        7e7,
        1.6e8,
        3.05e8,
        4.1e8,
    ]
    # A step of these runs has 2^20 tokens.
    assert list_points(families["mixing_laws_red_pajama_0_curve"])[0] == (7e7, 10000 * 2**20, 3.5)
