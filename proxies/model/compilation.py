"""Settings of `torch.compile` for banks, which compile many models in one process.

torch recompiles a model for inputs of another kind, up to a limit. Beyond the limit it silently
runs the model uncompiled. The limit is 8 for all models that share their code, which is too few for
the banks of a process.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

SHARED_RECOMPILE_LIMIT = 64
"""Limit of recompilations if torch counts those of all banks of a process together. Each bank has
two graphs, for training and for validation."""


def forbid_uncompiled_fallback() -> None:
    """Make torch raise an error, in the whole process, if a model is compiled too often."""
    from torch._dynamo import config  # 2.9's `torch.compiler.config` lacks the name

    config.fail_on_recompile_limit_hit = True
    # torch allows only one of the two options, and forerun's trainer for main runs sets this option
    config.suppress_errors = False


def separate_recompile_counts() -> dict[str, Any]:
    """Keep the recompilations of one bank from using up the limit of another bank.

    torch counts them separately if a model is compiled with an option for this. A torch before 2.13
    lacks the option: then the limit of the whole process is raised.

    Returns:
        Arguments for `torch.compile`; none for a torch before 2.13.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, SHARED_RECOMPILE_LIMIT)
    return {}
