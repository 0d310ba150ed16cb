"""Reducers for what Accelerate knows about a process, and for the TrainingArguments of transformers, which contain it.

In the notebook, this state says that there is one process. On a rank, such values get the state of the rank's process.
Otherwise, each rank would train a model of its own, without an error.
"""

from __future__ import annotations

import sys
from typing import Any

from sparkring.capture.picklability import Kind, Refused
from sparkring.capture.reducers.base import Reduced, Reducer

# What TrainingArguments hold about their process. The second name is that of transformers 4.
_OF_PROCESS = frozenset({"_setup_devices", "__cached__setup_devices", "distributed_state", "_n_gpu"})
_PLUGINS = ("deepspeed_plugins", "deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin",
            "parallelism_config")  # fmt: skip
_WITH_PLUGIN = Kind("the state of an Accelerator with a plugin", "make the Accelerator in the cell")


def reducer_for(cls: type) -> Reducer | None:
    """Return the reducer for the values of a type, if it needs one."""
    if "accelerate.state" not in sys.modules:
        return None
    if cls.__module__ == "accelerate.state":
        return {"PartialState": _process, "AcceleratorState": _accelerator, "GradientState": _gradients}.get(
            cls.__name__
        )
    if any(
        (base.__module__, base.__name__) == ("transformers.training_args", "TrainingArguments") for base in cls.__mro__
    ):
        return _training_arguments
    return None


def _process(state: Any) -> Reduced:
    return _process_of_rank, (state._cpu,)


def _process_of_rank(cpu: bool) -> Any:
    from accelerate.state import PartialState

    return PartialState(cpu=cpu)


def _accelerator(state: Any) -> Reduced:
    fields = vars(state)
    if any(fields.get(name) for name in _PLUGINS):
        raise Refused(_WITH_PLUGIN)
    return _accelerator_of_rank, (state._mixed_precision, state._cpu, fields.get("dynamo_plugin"))


def _accelerator_of_rank(mixed_precision: str, cpu: bool, dynamo_plugin: Any) -> Any:
    from accelerate.state import AcceleratorState

    return AcceleratorState(mixed_precision, cpu, dynamo_plugin, _from_accelerator=True)


def _gradients(state: Any) -> Reduced | None:
    """Pack the settings for gradient accumulation; None in the middle of a loop over a DataLoader."""
    if any(reference is not None for reference in state._dataloader_references_ref):
        return None
    return _gradients_of_rank, (state.plugin_kwargs,)


def _gradients_of_rank(settings: dict[str, Any]) -> Any:
    from accelerate.state import GradientState

    state = GradientState()
    state.plugin_kwargs = settings
    return state


def _training_arguments(arguments: Any) -> Reduced:
    fields = {name: value for name, value in vars(arguments).items() if name not in _OF_PROCESS}
    return _arguments_of_rank, (type(arguments), fields)


def _arguments_of_rank(cls: type, fields: dict[str, Any]) -> Any:
    arguments: Any = object.__new__(cls)
    vars(arguments).update(fields)
    _ = arguments.device  # this sets up the state for the rank's process, as the constructor does
    return arguments
