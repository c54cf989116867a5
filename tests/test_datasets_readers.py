"""Readers of public families on tiny files of the published form; pickles are read without a
call.
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


@pytest.fixture(scope="module")
def modules():
    """`datasets.py` and `inert_pickle.py` of `benchmarks/statistics`, under their names for this
    module only.
    """
    sys.path.insert(0, str(ROOT / "benchmarks" / "statistics"))
    try:
        yield importlib.import_module("datasets"), importlib.import_module("inert_pickle")
    finally:
        sys.path.remove(str(ROOT / "benchmarks" / "statistics"))
        for name in MODULES:
            sys.modules.pop(name, None)


class Command:
    """A pickle that would create a file if it were loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class WandBRunData:
    """Attributes of a run, as the xLSTM study pickles them."""

    def __init__(self, summary):
        self.summary = summary


def _frame(**columns):
    """Return a pandas table with columns of objects or numbers; names are objects, as older pandas
    had them.
    """
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {name: pandas.Series(values, dtype=kind) for name, (values, kind) in columns.items()}
    )
    table.columns = pandas.Index(list(columns), dtype=object)
    return table


def test_a_pickle_is_read_and_calls_nothing(modules, tmp_path):
    _, inert_pickle = modules
    target = tmp_path / "made"
    value = {
        "list": [1, 2.5, None, True, "text", b"bytes", -3, 2**40],
        "empty": ((), [], {}),
        "call": Command(target),
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
def test_what_is_no_plain_pickle_is_refused(modules, content):
    _, inert_pickle = modules
    with pytest.raises(ValueError):
        inert_pickle.read_pickled(content)


def test_arrays_and_tables_come_back(modules):
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
    table = _frame(
        name=(["x", "y"], object),
        size=([1, 2], "int64"),
        loss=([2.5, 3.5], "float64"),
        n=([3, 4], "int64"),
    )
    read = inert_pickle.read_frame(inert_pickle.read_pickled(pickle.dumps(table, protocol=4)))
    assert {name: column.tolist() for name, column in read.items()} == table.to_dict("list")
    with pytest.raises(ValueError, match="not a table"):
        inert_pickle.read_frame(3)


def _points(family):
    table = family.table
    return list(zip(table.params.tolist(), table.tokens.tolist(), table.loss.tolist(), strict=True))


def test_routing_takes_the_last_loss_of_each_run_and_a_curve(modules, tmp_path):
    datasets, _ = modules
    rows = [
        "hyper_id,step,loss_validation,num_experts,k,router_type,routing_frequency,flop_increase,dense_parameter_count"
    ]
    rows += [
        f"0,{step},{loss},1,1,Dense,0.5,1.0,1e8"
        for step, loss in ((0, 10), (20000, 4), (249000, 3))
    ]
    rows += [
        "1,249000,2,64,1,S-Base,0.5,1.0,2e8",
        "2,249000,2,64,2,S-Base,0.5,1.0,2e8",
        "3,9,2,1,1,Dense,0.5,2.0,1e8",
    ]
    (tmp_path / "curves.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    families = {each.name: each for each in datasets.FETCHED_READERS["routing"](tmp_path)}
    assert _points(families["routing_dense"]) == [(1e8, 250_000 * 2**19, 3.0)]
    assert _points(families["routing_dense_curve"]) == [
        (1e8, 20000 * 2**19, 4.0),
        (1e8, 249000 * 2**19, 3.0),
    ]
    assert _points(families["routing_s_base_64"]) == [(2e8, 250_000 * 2**19, 2.0)]


def test_quest_separates_kinds_of_quantization(modules, tmp_path):
    datasets, _ = modules
    run = {"non_embedding_parameters": 10, "tokens": 1000, "loss": 3.0, "w_bits": 16, "a_bits": 16}
    runs = [
        run | {"w_quant": "NoQuantizer", "a_quant": "NoQuantizer"},
        run
        | {
            "w_quant": "TrustQuantizer",
            "a_quant": "TrustQuantizer",
            "w_bits": 4,
            "a_bits": 4,
            "loss": 3.5,
        },
        run
        | {
            "w_quant": "TrustQuantizer",
            "a_quant": "TrustQuantizer",
            "w_bits": 4,
            "a_bits": 8,
            "loss": 3.4,
        },
    ]
    (tmp_path / "runs_for_scaling.json").write_text(json.dumps(runs))
    families = {each.name: each for each in datasets.FETCHED_READERS["quest"](tmp_path)}
    assert _points(families["quest_bf16"]) == [(10, 1000, 3.0)]
    assert _points(families["quest_trust_w4a4"]) == [(10, 1000, 3.5)]


def test_xlstm_leaves_out_what_did_not_finish_or_diverged(modules, tmp_path):
    datasets, _ = modules

    def run(params, step, loss, batch=512, planned=100):
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
            run(10, 100, 3.0),
            run(20, 100, 2.0),
            run(20, 100, 2.0),
            run(30, 50, 2.5),
            run(40, 100, 9.0),
        ],
        "second": [run(50, 100, 2.2), run(60, 100, 2.1, batch=256), WandBRunData({"_step": 0})],
    }
    for name in datasets.XLSTM_FILES:
        (tmp_path / f"isoflop_{name}_wandb_data.inert").write_bytes(
            pickle.dumps(rounds, protocol=4)
        )
    families = {each.name: each for each in datasets.FETCHED_READERS["xlstm"](tmp_path)}
    tokens = 100 * 2**20
    table = families["xlstm_llama_ctx2048"].table
    assert _points(families["xlstm_llama_ctx2048"]) == [
        (10, tokens, 3.0),
        (20, tokens, 2.0),
        (50, tokens, 2.2),
    ]
    assert table.budget.tolist() == [6 * 15 * tokens, 6 * 15 * tokens, 6 * 50 * tokens]


def test_supercollapse_takes_the_ends_of_histories(modules, tmp_path):
    datasets, _ = modules
    history = _frame(
        step=([0, 7], "int64"), test_loss=([4.0, 0.7], "float64"), tokens=([0.0, 70.0], "float64")
    )
    plain = _frame(P=([10, 20], "int64"), history=([history, history], object))
    crossed = _frame(
        num_params=([10, 20], "int64"),
        schedule=(["linear", "linear"], object),
        decay_frac=([1.0, 0.2], "float64"),
        history=([history, history], object),
    )
    for name, table in (
        ("chess", plain),
        ("chess_const", plain),
        ("c5m", plain),
        ("c5m_schedules", crossed),
    ):
        (tmp_path / f"{name}.inert").write_bytes(pickle.dumps(table, protocol=4))
    families = {each.name: each for each in datasets.FETCHED_READERS["supercollapse"](tmp_path)}
    assert _points(families["collapse_chess_linear"]) == [
        (10, 7 * 2**16, 0.7),
        (20, 7 * 2**16, 0.7),
    ]
    assert _points(families["collapse_cifar5m_cross_linear"]) == [(10, 70, 0.7)]


def test_openwebtext2_reads_nested_tables(modules, tmp_path):
    datasets, _ = modules
    pandas = pytest.importorskip("pandas")
    sizes, tokens, losses = (np.array(values) for values in ([1e6, 2e6], [2e8, 1e8], [4.0, 4.1]))
    budgets = _frame(
        flops=([1.2e15, 9e15], "float64"),
        orig_n=([pandas.Series(sizes), np.nan], object),
        orig_t=([pandas.Series(tokens), np.nan], object),
        orig_loss=([pandas.Series(losses), np.nan], object),
    )
    setup = {key: ([key], object) for key in ("hparams", "warmup", "decay", "param_count", "val")}
    content = pickle.dumps(_frame(**setup, data=([budgets], object)), protocol=4)
    (tmp_path / "summary_df_owt2.inert").write_bytes(lzma.compress(content))
    (family,) = datasets.FETCHED_READERS["openwebtext2"](tmp_path)
    assert (
        family.name == "openwebtext2_hparams_warmup_decay_param_count_val"
        and family.group == "refined_web"
    )
    assert _points(family) == [(1e6, 2e8, 4.0), (2e6, 1e8, 4.1)]
    assert family.table.budget.tolist() == [1.2e15, 1.2e15]


def test_opt_and_mixing_laws(modules, tmp_path):
    datasets, _ = modules
    (tmp_path / "opt_trajectories.csv").write_text(
        "model_name,model_size,steps,num_token,flops,ppl\nOPT,125m,2,9.0,17.8,20\n"
    )
    (family,) = datasets.FETCHED_READERS["colpret"](tmp_path)
    assert _points(family) == [(1.25e8, 1e9, pytest.approx(np.log(20)))]
    for size in ("70M", "160M", "305M", "410M"):
        lines = [
            f"/ckpts//{size}_RP_{mix}-0.5-0.5/10000\t/data/pile.valid.{domain}.bin\t3.5"
            for mix, domain in ((0, "Pile-CC"), (0, "Github"), (1, "Pile-CC"))
        ]
        (tmp_path / f"{size}.txt").write_text("\n".join(lines))
    families = {each.name: each for each in datasets.FETCHED_READERS["mixing_laws"](tmp_path)}
    assert [point[0] for point in _points(families["mixing_laws_red_pajama_0_curve"])] == [
        7e7,
        1.6e8,
        3.05e8,
        4.1e8,
    ]
    assert _points(families["mixing_laws_red_pajama_0_curve"])[0] == (7e7, 10000 * 2**20, 3.5)
