"""The hook with which your training script shows `forerun verify --prove` what it trains.

Call `prove` once, after the optimizer is built and before the first step. You can also copy this
file beside your script, since it needs nothing else:

    from forerun.hook import prove
    prove(model, optimizer, scheduler)

In a normal run `prove` returns at once. Under `forerun verify --prove` it reports every parameter's
shape, learning rate, decay, betas, eps, and initial values, and the schedule of all steps. It then
watches at most five steps, and ends the process. Before that, only the standard library is
imported.
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
"""Environment variable with the path of the request, a JSON file: path of the `report`, number of
`steps` to watch, and the steps (`at`) at which to read rates."""
FORMAT = 1


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
        rate: `rate(step)`, the learning rate that your loop sets at a step counted from 0, if it
            sets it by hand: a number for all groups, or one for each.
        num_data_ranks: Number of ranks among which a batch is divided; None for all ranks.
        factors: Intended deviations: by a part of a parameter's name, its learning rate as a
            multiple of the parametrization's.
    """
    place = os.environ.get(VARIABLE)
    if not place:
        return
    request = json.loads(Path(place).read_text())
    try:
        _Watch(
            request, model, optimizer, scheduler, rate, num_data_ranks, dict(factors or {})
        ).begin()
    except Exception as error:
        _write_report(
            request["report"], {"format": FORMAT, "error": f"{type(error).__name__}: {error}"}
        )
        _exit_now(3)


def _exit_now(code: int) -> None:
    """End the process at once, so that no `finally` of the script saves a checkpoint."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_report(path: str, body: dict[str, Any]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        part = Path(path + ".part")
        part.write_text(json.dumps(body))
        part.replace(path)


class _Watch:
    """The handling of one request, from the first look at the parameters to the last watched
    step.
    """

    def __init__(
        self,
        request: dict[str, Any],
        model: Any,
        optimizer: Any,
        scheduler: Any,
        rate: Any,
        num_data_ranks: int | None,
        factors: dict[str, float],
    ) -> None:
        self.request, self.rate = request, rate
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
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "error": None,
            "world_size": _get_world_size(),
            "num_data_ranks": num_data_ranks,
            "factors": factors,
            "observed": [],
        }
        self.ids: dict[int, int] = {}
        self.clip: float | None = None
        self.steps = [0] * len(self.optimizers)

    def begin(self) -> None:
        """Record everything that does not change, then watch the steps."""
        self.report["parameters"] = self._describe_parameters()
        self.report["groups"] = [
            _describe_group(optimizer, group) for optimizer, group in self.groups
        ]
        self.report["rates"], self.report["schedule_error"] = self._compute_rates()
        if not self.request["steps"]:
            self._end()
        self._hook_clip()
        self._hook_ids()
        for index, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(
                lambda *_, index=index: self._record_before_step(index)
            )
            optimizer.register_step_post_hook(lambda *_, index=index: self._end_after_step(index))

    def _describe_parameters(self) -> list[dict[str, Any]]:
        trained: dict[int, list[int]] = {}
        for number, (_, group) in enumerate(self.groups):
            for parameter in group["params"]:
                trained.setdefault(id(parameter), []).append(number)
        rows_by_id: dict[int, dict[str, Any]] = {}
        for model in self.models:
            for path, module in model.named_modules(remove_duplicate=False):
                for last, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    name = _clean_name(f"{path}.{last}" if path else last)
                    row = rows_by_id.get(id(parameter)) or self._describe_parameter(
                        name, parameter, trained.get(id(parameter), [])
                    )
                    row["modules"] += [type(module).__name__]
                    row["names"] += [] if name in row["names"] else [name]
                    rows_by_id[id(parameter)] = row
        return list(rows_by_id.values())

    def _describe_parameter(self, name: str, parameter: Any, groups: list[int]) -> dict[str, Any]:
        values = _gather_tensor(parameter.detach()).float()
        known = bool(values.numel()) and not values.is_meta
        return {
            "name": name,
            "names": [name],
            "modules": [],
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype),
            "trained": bool(parameter.requires_grad),
            "groups": groups,
            "std": float(values.std(correction=0)) if known else 0.0,
            "mean": float(values.mean()) if known else 0.0,
        }

    def _compute_rates(self) -> tuple[list[list[float]] | None, str]:
        """Return the learning rate of each group at each requested step, by the scheduler alone,
        which is then restored.
        """
        at, rows = self.request["at"], []
        if self.rate is not None:
            for step in at:
                rates = self.rate(step)
                rows.append(
                    [
                        float(x)
                        for x in (
                            rates
                            if isinstance(rates, (list, tuple))
                            else [rates] * len(self.groups)
                        )
                    ]
                )
            return rows, ""
        if not self.schedulers:
            return None, ""
        saved_groups = [
            {key: copy.copy(value) for key, value in group.items() if key != "params"}
            for _, group in self.groups
        ]
        states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]
        wanted, failed = set(at), ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(max(at) + 1):
                if step in wanted:
                    rows.append([float(group["lr"]) for _, group in self.groups])
                if step == max(at):
                    break
                try:
                    for scheduler in self.schedulers:
                        scheduler.step()
                except Exception as error:  # Some schedulers fail after their number of steps
                    failed = f"after {step + 1} steps: {error}"
                    break
            for scheduler, state in zip(self.schedulers, states, strict=True):
                scheduler.load_state_dict(state)
        for (_, group), values in zip(self.groups, saved_groups, strict=True):
            group.update(values)
        return rows, failed

    def _hook_clip(self) -> None:
        torch = sys.modules["torch"]  # A script with a model has imported it
        clip = torch.nn.utils.clip_grad_norm_

        def clip_and_record(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            self.clip = float(max_norm)
            return clip(parameters, max_norm, *args, **kwargs)

        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_and_record

    def _hook_ids(self) -> None:
        """Count the ids that embedding tables look up in training, which are a step's tokens on
        this rank.
        """
        torch = sys.modules["torch"]

        def count(module: Any, args: tuple[Any, ...]) -> None:
            if module.training and torch.is_grad_enabled() and args:
                self.ids[id(module)] = self.ids.get(id(module), 0) + int(args[0].numel())

        for model in self.models:
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.register_forward_pre_hook(count)

    def _record_before_step(self, index: int) -> None:
        if index == 0 or not self.report["observed"]:
            row = {
                "ids": max(self.ids.values(), default=None),
                "clip": self.clip,
                "grad_norm": self._compute_grad_norm(),
            }
            self.report["observed"].append({**row, "rates": [None] * len(self.groups)})
            self.ids.clear()
        self.steps[index] += 1
        rates = self.report["observed"][-1]["rates"]
        for number, (optimizer, group) in enumerate(self.groups):
            if optimizer is self.optimizers[index]:
                rates[number] = float(group["lr"])

    def _end_after_step(self, index: int) -> None:
        if min(self.steps) >= self.request["steps"]:
            self._end()

    def _compute_grad_norm(self) -> float:
        """Compute the norm of the gradient that the optimizer receives, after any clipping."""
        total = 0.0
        for _, group in self.groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total += float(_gather_tensor(parameter.grad).float().square().sum())
        return float(total**0.5)

    def _end(self) -> None:
        _write_report(self.request["report"], self.report)
        _exit_now(0)


def _to_list(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _unwrap(wrapped: Any, name: str, needed: str) -> Any:
    """Return the object that Accelerate and others wrap, whose wrapper of an optimizer only looks
    like one.
    """
    while hasattr(getattr(wrapped, name, None), needed):
        wrapped = getattr(wrapped, name)
    if not hasattr(wrapped, needed):
        raise TypeError(f"prove: {type(wrapped).__name__} is no torch {name}")
    return wrapped


def _clean_name(name: str) -> str:
    """Return the script's own name of a parameter, without the prefixes of DDP and
    torch.compile.
    """
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module")]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _gather_tensor(tensor: Any) -> Any:
    """Return the full tensor if its parts lie on several ranks. Every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _get_world_size() -> int:
    distributed = sys.modules["torch"].distributed
    return (
        int(distributed.get_world_size())
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def _describe_group(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of one parameter group as plain numbers."""
    betas = group.get("betas") or (None, None)
    given = {
        "learning_rate": group["lr"],
        "weight_decay": group.get("weight_decay"),
        "eps": group.get("eps"),
        "beta1": betas[0],
        "beta2": betas[1],
    }
    coupled = type(optimizer).__name__ == "Adam" and not group.get("decoupled_weight_decay", False)
    return {
        "optimizer": type(optimizer).__name__,
        "numbers": {name: float(value) for name, value in given.items() if value is not None},
        "decay_in_gradient": bool(coupled and group.get("weight_decay")),
    }
