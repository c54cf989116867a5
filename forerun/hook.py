"""The hook with which your training script shows `forerun verify --prove` what it trains.

Call `prove` once, after the optimizer is built and before the first step. You can also copy this
file into the folder of your script, since it needs nothing else:

    from forerun.hook import prove
    prove(model, optimizer, scheduler)

In a normal run `prove` returns at once. Under `forerun verify --prove` it reports every parameter's
shape, learning rate, decay, betas, eps, and initial values, and the schedule of all steps. It then
watches a few steps, and ends the process. This file imports only the standard library; it takes
torch from your script.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

VARIABLE = "FORERUN_PROVE"
"""Environment variable with the path of the request. The request is a JSON file with the path of
the `report`, the number of `steps` to watch, and the steps (`at`) at which to read rates."""
FORMAT = 1
"""Version of the report's format."""


def prove(
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    *,
    rate: Any = None,
    num_data_ranks: int | None = None,
    factors: dict[str, float] | None = None,
) -> None:
    """Report to forerun what is about to be trained. Outside of `forerun verify --prove`, do
    nothing.

    Args:
        model: A torch module, also wrapped (DDP, FSDP2, compiled), or several.
        optimizer: A torch optimizer, or several.
        scheduler: A torch scheduler, or several, each stepped once per step of the optimizer; None
            if there is none.
        rate: If your loop sets the learning rate by hand, a function of the step, counted from 0,
            that returns it: one number for all groups, or a list with one for each.
        num_data_ranks: Number of ranks among which a batch is divided; None for all ranks.
        factors: Learning rates that differ from the parametrization's on purpose: the factor
            between the two, by a part of the parameters' names.
    """
    request_path = os.environ.get(VARIABLE)
    if not request_path:
        return
    request = json.loads(Path(request_path).read_text())
    report = {
        "format": FORMAT,
        "error": None,
        "num_data_ranks": num_data_ranks,
        "factors": dict(factors or {}),
    }
    try:
        _Watch(request, report, model, optimizer, scheduler).begin(rate)
    except Exception as error:
        error_report = {"format": FORMAT, "error": f"{type(error).__name__}: {error}"}
        _end_process(request["report"], error_report, 3)


def _end_process(path: str, report: dict[str, Any], code: int) -> None:
    """Write the report on the first rank, and end the process at once, so that no `finally` of the
    script saves a checkpoint.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        part = Path(path + ".part")
        part.write_text(json.dumps(report))
        part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Watch:
    """The handler of one request: it describes the parameters, watches steps, and reports."""

    def __init__(
        self,
        request: dict[str, Any],
        report: dict[str, Any],
        model: Any,
        optimizer: Any,
        scheduler: Any,
    ) -> None:
        self.torch: Any = sys.modules.get("torch")  # a script with a model has imported it
        self.request, self.report = request, report
        self.models = _to_list(model)
        self.optimizers = [
            _unwrap(wrapped, "optimizer", "param_groups") for wrapped in _to_list(optimizer)
        ]
        self.schedulers = [
            _unwrap(wrapped, "scheduler", "state_dict") for wrapped in _to_list(scheduler)
        ]
        self.groups = [
            (optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups
        ]
        self.num_ids_by_table: dict[int, int] = {}
        """Ids that each embedding table has looked up since the last step."""
        self.clip: float | None = None
        """Maximum gradient norm of the last clipping; None if nothing was clipped."""
        self.num_steps = [0] * len(self.optimizers)
        """Steps that each optimizer has taken."""

    def begin(self, rate: Any) -> None:
        """Record everything that does not change, then watch the steps."""
        distributed = self.torch.distributed
        is_distributed = distributed.is_available() and distributed.is_initialized()
        rates, schedule_error = self._compute_rates(rate)
        self.report |= {
            "world_size": int(distributed.get_world_size()) if is_distributed else 1,
            "parameters": self._describe_parameters(),
            "groups": [_describe_group(optimizer, group) for optimizer, group in self.groups],
            "rates": rates,
            "schedule_error": schedule_error,
            "observed": [],
        }
        if not self.request["steps"]:
            _end_process(self.request["report"], self.report, 0)
        self._hook_clip()
        self._hook_embeddings()
        for index, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(lambda *_, index=index: self._record_step(index))
            optimizer.register_step_post_hook(lambda *_: self._end_if_done())

    # ---- Before the first step ----

    def _describe_parameters(self) -> list[dict[str, Any]]:
        """Return a row for each parameter; a shared parameter has one row with all its names."""
        groups_by_id: dict[int, list[int]] = {}
        for number, (_, group) in enumerate(self.groups):
            for parameter in group["params"]:
                groups_by_id.setdefault(id(parameter), []).append(number)
        rows: dict[int, dict[str, Any]] = {}
        modules = (
            (path, module)
            for model in self.models
            for path, module in model.named_modules(remove_duplicate=False)
        )
        for path, module in modules:
            for own_name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = _clean_name(f"{path}.{own_name}" if path else own_name)
                if id(parameter) not in rows:
                    groups = groups_by_id.get(id(parameter), [])
                    rows[id(parameter)] = _describe_parameter(name, parameter, groups)
                row = rows[id(parameter)]
                row["modules"].append(type(module).__name__)
                if name not in row["names"]:
                    row["names"].append(name)
        return list(rows.values())

    def _compute_rates(self, rate: Any) -> tuple[list[list[float]] | None, str]:
        """Return the learning rate of each group at each requested step, and the error of a
        scheduler that failed.

        The schedulers run alone, and are then restored.
        """
        steps: list[int] = self.request["at"]
        if rate is not None:
            num_groups = len(self.groups)
            rows = []
            for step in steps:
                rates = rate(step)
                if not isinstance(rates, (list, tuple)):
                    rates = [rates] * num_groups
                rows.append([float(group_rate) for group_rate in rates])
            return rows, ""
        if not self.schedulers:
            return None, ""
        saved_groups = [
            {key: copy.copy(value) for key, value in group.items() if key != "params"}
            for _, group in self.groups
        ]
        states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]
        rows, error_text, step = [], "", 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for step in range(max(steps) + 1):
                    if step:
                        for scheduler in self.schedulers:
                            scheduler.step()
                    if step in steps:
                        rows.append([float(group["lr"]) for _, group in self.groups])
            except Exception as error:  # some schedulers fail after their number of steps
                error_text = f"after {step} steps: {error}"
            for scheduler, state in zip(self.schedulers, states, strict=True):
                scheduler.load_state_dict(state)
        for (_, group), values in zip(self.groups, saved_groups, strict=True):
            group.update(values)
        return rows, error_text

    # ---- At each step ----

    def _hook_clip(self) -> None:
        """Record the limit of every clipping. Torch has the function under two names; both are
        replaced.
        """
        utils = self.torch.nn.utils
        clip = utils.clip_grad_norm_

        def clip_and_record(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            self.clip = float(max_norm)
            return clip(parameters, max_norm, *args, **kwargs)

        utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = clip_and_record

    def _hook_embeddings(self) -> None:
        """Count the ids that embedding tables look up in training, which are a step's tokens on
        this rank.
        """

        def count(module: Any, args: tuple[Any, ...]) -> None:
            if module.training and self.torch.is_grad_enabled() and args:
                num_ids = self.num_ids_by_table.get(id(module), 0) + int(args[0].numel())
                self.num_ids_by_table[id(module)] = num_ids

        for model in self.models:
            for module in model.modules():
                if isinstance(module, self.torch.nn.Embedding):
                    module.register_forward_pre_hook(count)

    def _record_step(self, index: int) -> None:
        """Record the state before an optimizer's step; a step of the first one begins a new row."""
        observed = self.report["observed"]
        if index == 0 or not observed:
            observed.append(
                {
                    "ids": max(self.num_ids_by_table.values(), default=None),
                    "clip": self.clip,
                    "grad_norm": self._compute_grad_norm(),
                    "rates": [None] * len(self.groups),
                }
            )
            self.num_ids_by_table.clear()
        self.num_steps[index] += 1
        for number, (optimizer, group) in enumerate(self.groups):
            if optimizer is self.optimizers[index]:
                observed[-1]["rates"][number] = float(group["lr"])

    def _end_if_done(self) -> None:
        """End the process once every optimizer has taken the requested steps."""
        if min(self.num_steps) >= self.request["steps"]:
            _end_process(self.request["report"], self.report, 0)

    def _compute_grad_norm(self) -> float:
        """Compute the norm of the gradient that the optimizer receives, after any clipping."""
        squares = (
            float(_gather_tensor(parameter.grad).float().square().sum())
            for _, group in self.groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        return float(sum(squares) ** 0.5)


def _to_list(value: Any) -> list[Any]:
    """Return a list of one object, of several, or of none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _unwrap(wrapped: Any, name: str, needed: str) -> Any:
    """Return the torch object inside the wrappers of Accelerate and similar libraries.

    Args:
        wrapped: The object or its wrapper.
        name: Attribute in which a wrapper holds the wrapped object.
        needed: Attribute that the torch object has.
    """
    while hasattr(getattr(wrapped, name, None), needed):
        wrapped = getattr(wrapped, name)
    if not hasattr(wrapped, needed):
        raise TypeError(f"prove: {type(wrapped).__name__} is no torch {name}")
    return wrapped


def _clean_name(name: str) -> str:
    """Return the script's own name of a parameter, without the prefixes of DDP, FSDP, and
    torch.compile.
    """
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module")]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _gather_tensor(tensor: Any) -> Any:
    """Return the full tensor if its parts lie on several ranks. Every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _describe_parameter(name: str, parameter: Any, groups: list[int]) -> dict[str, Any]:
    """Return a parameter's row of the report; `groups` are the numbers of its parameter groups."""
    values = _gather_tensor(parameter.detach()).float()
    has_values = bool(values.numel()) and not values.is_meta
    return {
        "name": name,
        "names": [name],
        "modules": [],
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype),
        "trained": bool(parameter.requires_grad),
        "groups": groups,
        "std": float(values.std(correction=0)) if has_values else 0.0,
        "mean": float(values.mean()) if has_values else 0.0,
    }


def _describe_group(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of one parameter group as plain numbers."""
    beta1, beta2 = group.get("betas") or (None, None)
    numbers = {
        "learning_rate": group["lr"],
        "weight_decay": group.get("weight_decay"),
        "eps": group.get("eps"),
        "beta1": beta1,
        "beta2": beta2,
    }
    name = type(optimizer).__name__
    is_coupled = name == "Adam" and not group.get("decoupled_weight_decay", False)
    return {
        "optimizer": name,
        "numbers": {key: float(value) for key, value in numbers.items() if value is not None},
        "decay_in_gradient": bool(is_coupled and group.get("weight_decay")),
    }
