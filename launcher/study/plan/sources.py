"""The parametrizations, and the choices on which they differ, in words and with their sources.

m_N, m_L, m_B and m_D are the width, the depth, the batch and the training tokens, each divided by
that of the base run.

`*` marks statements at second hand: for these, only the abstract of the paper or other people's
transcriptions of it were read.
"""

from __future__ import annotations

SECOND_HAND = (
    "* at second hand: from the abstract, or from others' transcriptions; "
    "docs/parametrizations.md says which"
)

PRESETS = {
    "sp": "standard: init std 1/sqrt(fan_in), one learning rate at every size; the control",
    "mup": (
        "the mup package 1.0.0 (Tensor Programs V, arXiv 2203.03466, Table 8): hidden rates "
        "1/width, decay x width"
    ),
    "mup_no_wd_scaling": (
        "mup with the weight decay as given: Megatron-LM, Cerebras modelzoo, nanoGPT-mup"
    ),
    "completep": "mup, branches times 1/depth, eps scaled inside blocks (arXiv 2505.01618)",
    "completedp": (
        "CompleteP with batch and duration rules, the readout's multiplier absorbed "
        "(arXiv 2512.22382*)"
    ),
    "umup": (
        "u-muP's rates, depth rule and independent decay (arXiv 2407.17465), without its unit "
        "scaling"
    ),
}
"""Description of each parametrization, by name."""

CHOICE_SUBJECTS: dict[str, str] = {
    "attention": "Scale of q . k.",
    "output": "Where the readout's 1/width sits.",
    "depth_alpha": "Residual branches times depth^-alpha.",
    "weight_decay": "Weight decay of hidden matrices against width.",
    "decayed": "Parameters that decay.",
    "embedding_rate": "Learning rate of the embedding against width.",
    "eps": "AdamW's eps against width.",
    "rate_batch_power": "Learning rate with batch.",
    "rate_duration_power": "Learning rate with tokens.",
    "moments": "AdamW's betas with batch and tokens.",
    "muon_rate": (
        "Muon's learning rate for a matrix of r rows (outputs) and c columns; only with "
        'proxy.optimizer = "muon".'
    ),
    "muon_width_power": "Muon's learning rate also times m_N to this power.",
}
"""Subject of each choice."""

CHOICES: dict[str, dict[str, str]] = {
    "width": {
        "none": "nothing scales with width",
        "mup": (
            "hidden init std m_N^-1/2, learning rate m_N^-1 (mup, CompleteP, Complete(d)P*, "
            "u-muP, Megatron-LM)"
        ),
    },
    "attention": {
        "inverse_head_dim": (
            "sqrt(base head_dim)/head_dim (mup's README, CompleteP's code, u-muP, Megatron-LM)"
        ),
        "inverse_sqrt_head_dim": "1/sqrt(head_dim) (standard); the same where head_dim stays",
    },
    "output": {
        "multiplier": "logits times 1/m_N (mup, CompleteP, Megatron-LM)",
        "absorbed": (
            "in the readout's init std, rate and decay (Complete(d)P*, Lingle arXiv 2404.05728)"
        ),
    },
    "depth_alpha": {
        "None": "no depth rule (mup, Megatron-LM)",
        "1.0": "branches m_L^-1, block rates unchanged (CompleteP, Complete(d)P*)",
        "0.5": "branches m_L^-1/2, block rates m_L^-1/2 (u-muP, ArchScale)",
    },
    "weight_decay": {
        "scaled": "hidden matrices times m_N, so that lr*wd stays (mup, CompleteP, Complete(d)P*)",
        "unscaled": "as given, so that lr*wd falls as 1/m_N (mup's GitHub head with decoupled_wd, "
        "Megatron-LM, Cerebras modelzoo, nanoGPT-mup, Lingle)",
        "root": "times m_N^1/2 (arXiv 2510.15262*)",
        "independent": "lr*wd is the share given, whatever the rate (u-muP, ArchScale)",
    },
    "decayed": {
        "matrices": "hidden matrices and readout (ours, in every preset)",
        "two_dimensional": "those and the embeddings (nanoGPT)",
        "all": "gains and biases too (mup given one group, Complete(d)P*)",
    },
    "embedding_rate": {
        "constant": "the same at every width (mup, CompleteP, Complete(d)P*)",
        "inverse_root": "m_N^-1/2 (u-muP, nanochat)",
    },
    "eps": {
        "unscaled": "as given (mup)",
        "hidden": "m_N^-1 m_L^-alpha for hidden matrices (Megatron-LM's --use-mup, by width)",
        "blocks": "m_N^-1 m_L^-alpha inside blocks (CompleteP's Table 1)",
        "all": "that for everything (CompleteP's code)",
        "completedp": "blocks so, QK-norm gains without m_N, embeddings m_N^-1, a multiplied "
        "readout m_N^-1 (Complete(d)P*)",
    },
    "rate_batch_power": {
        "0.0": "no rule (mup, CompleteP)",
        "0.5": "learning rates times m_B^1/2 (Complete(d)P*, nanochat)",
    },
    "rate_duration_power": {
        "0.0": "no rule (mup, CompleteP; StepLaw's runs give +0.03 [-0.01, 0.11])",
        "-0.5": "learning rates times m_D^-1/2 (Complete(d)P*)",
        "-0.32": "learning rates times m_D^-0.32 (arXiv 2603.28743*, for a Muon)",
        "-0.3": (
            "learning rates times m_D^-0.3 (Marin, for an Adam on the hyperball; -0.28 in "
            "another of its fits)"
        ),
    },
    "moments": {
        "fixed": "betas as given (mup, CompleteP)",
        "scaled": (
            "1 - beta times m_B/m_D, eps times (m_D/m_B)^1/2, decay times (m_B/m_D)^1/2 "
            "(Complete(d)P*)"
        ),
    },
    "muon_rate": {
        "none": "AdamW steps everything",
        "original": (
            "times sqrt(max(1, r/c)) (Jordan 2024, torch.optim.Muon, torchtitan): the same "
            "at every width"
        ),
        "match_rms_adamw": "times 0.2 sqrt(max(r, c)), the elements of AdamW's steps (Moonlight, "
        "arXiv 2502.16982): grows as width^1/2",
        "spectral": "times sqrt(max(r, c)) (Megatron-LM's word; dion's `spectral_norm` is "
        "unit_rms): grows as width^1/2",
        "unit_rms": "times sqrt(r/c), the spectral condition (arXiv 2310.17813; Megatron-LM's "
        "word): the same at every width",
    },
    "muon_width_power": {
        "0.0": "nothing more (all sources)",
        "0.5": "a step's elements stay as large as they were",
    },
}
"""Answers to every choice, with their sources."""


def describe_answer(choice: str, value: object) -> str:
    """Return the meaning of an answer, and its source; `own choice` if no source gives it."""
    return CHOICES[choice].get(str(value), "own choice")
