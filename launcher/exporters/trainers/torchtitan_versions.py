"""What torchtitan's versions call differently, as pieces of the module that the export writes.

0.3.0 counts sequences (`local_batch_size`, `global_batch_size`, `seq_len`) and folds a batch as [sequences, tokens].
Its main branch since commit 73aed7f6c (2026-08-20, pull request 4121) counts tokens and has one flat token axis, so
attention needs the sequences cut again, and rotary positions need to be told. Read in the sources named here.
"""

_SEQUENCES = {
    "IMPORT_LOADER": "from torchtitan.components.dataloader import BaseDataLoader",
    "ATTENTION": "",
    "INNER_ATTENTION": "ScaledDotProductAttention.Config()",
    "ROPE_LENGTH": "max_seq_len",
    "SIZES": "seq_len: int, local_batch_size: int",
    "SEQUENCES": "local_batch_size",
    "BATCH": """yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()""",
    "TRAINING": """local_batch_size=LOCAL_SEQUENCES if PIPELINE_PARALLEL > 1 else MICROBATCH_SEQUENCES,
            global_batch_size=GLOBAL_SEQUENCES,
            seq_len=SEQ_LEN,""",
    "PIPELINE": "pipeline_parallel_microbatch_size=MICROBATCH_SEQUENCES,",
    "BATCH_TOKENS": "config.training.global_batch_size * config.training.seq_len",
    "SMALLER": "training.local_batch_size 1",
}

_TOKENS = {
    "IMPORT_LOADER": "from torchtitan.components.data.loader import BaseDataLoader",
    "ATTENTION": '''class SequenceAttention(ScaledDotProductAttention):
    """Causal attention within each sequence of a flat batch of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(self, q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, **kwargs: object) -> torch.Tensor:
        folded = [x_TNH.unflatten(0, (-1, SEQ_LEN)) for x_TNH in (q_TNH, k_TNH, v_TNH)]
        return super().forward(*folded, **kwargs).flatten(0, 1)


''',
    "INNER_ATTENTION": "SequenceAttention.Config()",
    "ROPE_LENGTH": "max_context_length",
    "SIZES": "max_context_length: int, num_tokens_per_batch: int",
    "SEQUENCES": "num_tokens_per_batch // max_context_length",
    "BATCH": """positions = torch.arange(SEQ_LEN).repeat(len(ids))
            yield {"input": ids[:, :-1].flatten(), "positions": positions}, ids[:, 1:].flatten()""",
    "TRAINING": """num_tokens_per_microbatch_per_dp_rank=MICROBATCH_SEQUENCES * SEQ_LEN,
            num_tokens_per_train_step=GLOBAL_SEQUENCES * SEQ_LEN,
            max_context_length=SEQ_LEN,""",
    "PIPELINE": "num_pp_microbatches=LOCAL_SEQUENCES // MICROBATCH_SEQUENCES,",
    "BATCH_TOKENS": "config.training.num_tokens_per_train_step",
    "SMALLER": "training.num_tokens_per_microbatch_per_dp_rank SEQ_LEN",
}

PIECES = {"main-2026-08-b5bcd76": _TOKENS, "0.3.0": _SEQUENCES}
"""By version; the last is written where none is asked for. `main-YEAR-MONTH-COMMIT`: the main branch at that commit."""


def in_version(text: str, version: str) -> str:
    """The text with each `<<NAME>>` replaced by that version's piece."""
    for name, piece in PIECES[version].items():
        text = text.replace(f"<<{name}>>", piece)
    return text
