"""What your training script really does, told to `forerun verify --prove`.

Call `prove` once, behind the optimizer and before the first step:

    from forerun.hook import prove          # or copy this file beside your script: it needs nothing
    else prove(model, optimizer, scheduler)

A normal run is not touched: `prove` returns at once. Under `forerun verify --prove` it tells every
parameter's shape, learning rate, decay, betas, eps and initial values and the schedule of all
steps, watches at most five steps, and ends the process. The standard library alone is imported
before that.
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
"""Names the request, a JSON file: where to `report`, how many `steps` to watch, and at which steps
to read rates."""
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
    """Tell forerun what is about to be trained; outside of `forerun verify --prove`, nothing.

    Args:
        model: a torch module, also wrapped (DDP, FSDP2, compiled), or several.
        optimizer: a torch optimizer, or several.
        scheduler: a torch scheduler, or several, one step of each per step of the optimizer; None
            where there is none.
        rate: `rate(step)`, the learning rate that your loop sets at a step counted from 0, where it
            sets it by hand: a number for all groups, or one for each.
        num_data_ranks: among how many ranks a batch is shared out; None: among all.
        factors: by a part of a parameter's name, what its rate is on purpose, as a multiple of what
            the parametrization gives it.
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
        _write(request["report"], {"format": FORMAT, "error": f"{type(error).__name__}: {error}"})
        _leave(3)


def _leave(code: int) -> None:
    """End the process at once: no `finally` of the script gets to save a checkpoint."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write(path: str, body: dict[str, Any]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        part = Path(path + ".part")
        part.write_text(json.dumps(body))
        part.replace(path)


class _Watch:
    """One request, from the first look at the parameters to the last step watched."""

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
        self.models = _listed(model)
        self.optimizers = [_inner(one, "optimizer", "param_groups") for one in _listed(optimizer)]
        self.schedulers = [_inner(one, "scheduler", "state_dict") for one in _listed(scheduler)]
        self.groups = [(one, group) for one in self.optimizers for group in one.param_groups]
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "error": None,
            "world_size": _world_size(),
            "num_data_ranks": num_data_ranks,
            "factors": factors,
            "observed": [],
        }
        self.ids: dict[int, int] = {}
        self.clip: float | None = None
        self.steps = [0] * len(self.optimizers)

    def begin(self) -> None:
        """Look at everything that stands still, then watch."""
        self.report["parameters"] = self._parameters()
        self.report["groups"] = [_settings(one, group) for one, group in self.groups]
        self.report["rates"], self.report["schedule_error"] = self._schedule()
        if not self.request["steps"]:
            self._end()
        self._hook_clip()
        self._hook_ids()
        for index, one in enumerate(self.optimizers):
            one.register_step_pre_hook(lambda *_, index=index: self._before(index))
            one.register_step_post_hook(lambda *_, index=index: self._after(index))

    def _parameters(self) -> list[dict[str, Any]]:
        trained: dict[int, list[int]] = {}
        for number, (_, group) in enumerate(self.groups):
            for parameter in group["params"]:
                trained.setdefault(id(parameter), []).append(number)
        found: dict[int, dict[str, Any]] = {}
        for model in self.models:
            for path, module in model.named_modules(remove_duplicate=False):
                for last, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    name = _clean(f"{path}.{last}" if path else last)
                    row = found.get(id(parameter)) or self._row(
                        name, parameter, trained.get(id(parameter), [])
                    )
                    row["modules"] += [type(module).__name__]
                    row["names"] += [] if name in row["names"] else [name]
                    found[id(parameter)] = row
        return list(found.values())

    def _row(self, name: str, parameter: Any, groups: list[int]) -> dict[str, Any]:
        values = _whole(parameter.detach()).float()
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

    def _schedule(self) -> tuple[list[list[float]] | None, str]:
        """Per requested step the rate of each group, by the scheduler alone, which is then put
        back.
        """
        at, rows = self.request["at"], []
        if self.rate is not None:
            for step in at:
                given = self.rate(step)
                rows.append(
                    [
                        float(x)
                        for x in (
                            given
                            if isinstance(given, (list, tuple))
                            else [given] * len(self.groups)
                        )
                    ]
                )
            return rows, ""
        if not self.schedulers:
            return None, ""
        kept = [
            {key: copy.copy(value) for key, value in group.items() if key != "params"}
            for _, group in self.groups
        ]
        states = [copy.deepcopy(one.state_dict()) for one in self.schedulers]
        wanted, failed = set(at), ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(max(at) + 1):
                if step in wanted:
                    rows.append([float(group["lr"]) for _, group in self.groups])
                if step == max(at):
                    break
                try:
                    for one in self.schedulers:
                        one.step()
                except Exception as error:  # some count their steps
                    failed = f"after {step + 1} steps: {error}"
                    break
            for one, state in zip(self.schedulers, states, strict=True):
                one.load_state_dict(state)
        for (_, group), values in zip(self.groups, kept, strict=True):
            group.update(values)
        return rows, failed

    def _hook_clip(self) -> None:
        torch = sys.modules["torch"]  # whoever has a model has it
        clip = torch.nn.utils.clip_grad_norm_

        def watched(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            self.clip = float(max_norm)
            return clip(parameters, max_norm, *args, **kwargs)

        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = watched

    def _hook_ids(self) -> None:
        """Count the ids that the tables look up in training: a step's tokens, on this rank."""
        torch = sys.modules["torch"]

        def count(module: Any, args: tuple[Any, ...]) -> None:
            if module.training and torch.is_grad_enabled() and args:
                self.ids[id(module)] = self.ids.get(id(module), 0) + int(args[0].numel())

        for model in self.models:
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.register_forward_pre_hook(count)

    def _before(self, index: int) -> None:
        if index == 0 or not self.report["observed"]:
            row = {
                "ids": max(self.ids.values(), default=None),
                "clip": self.clip,
                "grad_norm": self._norm(),
            }
            self.report["observed"].append({**row, "rates": [None] * len(self.groups)})
            self.ids.clear()
        self.steps[index] += 1
        rates = self.report["observed"][-1]["rates"]
        for number, (one, group) in enumerate(self.groups):
            if one is self.optimizers[index]:
                rates[number] = float(group["lr"])

    def _after(self, index: int) -> None:
        if min(self.steps) >= self.request["steps"]:
            self._end()

    def _norm(self) -> float:
        """Of the gradient that the optimizer is given, so behind any clipping."""
        total = 0.0
        for _, group in self.groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total += float(_whole(parameter.grad).float().square().sum())
        return float(total**0.5)

    def _end(self) -> None:
        _write(self.request["report"], self.report)
        _leave(0)


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _inner(wrapped: Any, name: str, needed: str) -> Any:
    """What Accelerate and others wrap; their wrapper of an optimizer is one only by name."""
    while hasattr(getattr(wrapped, name, None), needed):
        wrapped = getattr(wrapped, name)
    if not hasattr(wrapped, needed):
        raise TypeError(f"prove: {type(wrapped).__name__} is no torch {name}")
    return wrapped


def _clean(name: str) -> str:
    """The script's own name, without those of DDP and torch.compile."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module")]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _whole(tensor: Any) -> Any:
    """All of a tensor whose parts lie on several ranks; each of them must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _world_size() -> int:
    distributed = sys.modules["torch"].distributed
    return (
        int(distributed.get_world_size())
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def _settings(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    """What one group is trained with, in plain numbers."""
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
