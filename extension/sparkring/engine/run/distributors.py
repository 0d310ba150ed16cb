"""The classes TorchDistributor and MirroredStrategyRunner, which run a function or a script on a ring of ranks."""

from __future__ import annotations

import math
import operator
import os
import shlex
from collections.abc import Callable
from typing import Any

# Ranks also import this module if one of the user's own modules uses these classes. Ranks may lack packages that the
# driver has, so modules that only the driver needs are imported in run().
from sparkring.capture.calls import CALLED, check_call, name_of, source_of
from sparkring.capture.scripts import read_script
from sparkring.engine.run.options import Options
from sparkring.errors import OptionsError
from sparkring.worker.rank.script import run_script
from sparkring.worker.rank.strategy import call_mirrored

_TITLE_LENGTH = 60


class TorchDistributor:
    """Runs a function or a script for torch.distributed, on ranks that have torchrun's environment variables.

    num_processes: the number of ranks.
    local_mode: whether the ranks are processes on this machine. Otherwise, they are tasks of a Spark barrier stage.
    use_gpu: whether each rank uses a GPU; on Spark, a rank uses all GPUs of its task. If there are no GPUs at all, the
    ranks run on CPUs, and a notice says so. If there are too few GPUs, run() raises a LaunchError. use_gpu=False hides
    the GPUs from the ranks.

    The API follows pyspark's public documentation of its class.
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        self.num_processes = _at_least_one("num_processes", num_processes)
        self.local_mode = local_mode
        self.use_gpu = use_gpu

    def run(self, train_object: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Call the function `train_object` with these arguments on every rank; return what rank 0 returned.

        If `train_object` is the path of a script, the script is sent to the ranks. Every rank runs it with `args` as
        sys.argv[1:], and run() returns None.

        Raises RunFailed if a rank fails, and OptionsError if an argument is invalid.
        """
        from sparkring.engine.run.api import run_spec
        from sparkring.engine.run.spec import Call, RunSpec

        if callable(train_object):
            check_call(train_object, args, kwargs)
            options, notice = _options(self.num_processes, self.local_mode, self.use_gpu)
            return run_spec(RunSpec(Call(train_object, args, kwargs), options, "torch", notice=notice)).value
        if not isinstance(train_object, str | os.PathLike):
            raise OptionsError(
                f"TorchDistributor.run() takes a function or the path of a script, not {type(train_object).__name__}: "
                f"{CALLED}"
            )
        written = os.fspath(train_object)
        if kwargs:
            raise OptionsError(
                f"TorchDistributor.run({written!r}): pass the script's arguments as strings, as in "
                f'run("train.py", "--lr=0.1"), not as keywords ({", ".join(kwargs)}).'
            )
        try:
            script = read_script(written)
        except OptionsError as error:
            raise OptionsError(f"TorchDistributor.run({written!r}): {error}.") from None
        arguments = [str(argument) for argument in args]
        title = shlex.join([os.path.basename(written), *arguments])[:_TITLE_LENGTH]
        options, notice = _options(self.num_processes, self.local_mode, self.use_gpu)
        call = Call(run_script, (script, arguments))
        return run_spec(RunSpec(call, options, "torch", title, script.source, notice=notice)).value


class MirroredStrategyRunner:
    """Runs a function on the workers of one TensorFlow cluster, within a MultiWorkerMirroredStrategy.

    num_slots: the number of ranks; if each Spark task gets several GPUs, the total number of GPUs.
    local_mode, use_gpu: the same as for TorchDistributor.
    gpu_resource_name: Spark's resource name for GPUs. Only "gpu" is supported.
    use_custom_strategy: whether the function makes its own strategy. Otherwise, it is called in a strategy's scope.

    The API follows spark-tensorflow-distributor's public documentation of its class.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str | None = "gpu",
        use_custom_strategy: bool = False,
    ) -> None:
        if gpu_resource_name not in ("gpu", None):
            raise OptionsError(
                f"gpu_resource_name={gpu_resource_name!r}: the only name is 'gpu', as in "
                "spark.task.resource.gpu.amount."
            )
        self._num_slots = _at_least_one("num_slots", num_slots)
        self._local_mode = local_mode
        self._use_gpu = use_gpu
        self._use_custom_strategy = use_custom_strategy

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `train_fn(**kwargs)` on every rank, and return what rank 0 returned.

        Raises RunFailed if a rank fails, and OptionsError if an argument is invalid.
        """
        from sparkring.engine.run.api import run_spec
        from sparkring.engine.run.spec import Call, RunSpec

        if not callable(train_fn):
            raise OptionsError(
                f"MirroredStrategyRunner.run() takes a function, not {type(train_fn).__name__}: {CALLED}"
            )
        check_call(train_fn, (), kwargs)
        options, notice = _options(self._num_slots, self._local_mode, self._use_gpu, several=True)
        call = Call(call_mirrored, (train_fn, self._use_custom_strategy), kwargs)
        spec = RunSpec(call, options, "tensorflow", name_of(train_fn), source_of(train_fn), notice=notice)
        return run_spec(spec).value


def _at_least_one(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise OptionsError(f"{name} must be a whole number of at least 1, not {value!r}.")
    return number


def _options(count: int, local_mode: bool, use_gpu: bool, *, several: bool = False) -> tuple[Options, str]:
    """Return a run's options and a notice, which is '' unless the ranks will have no GPUs although `use_gpu` is set.

    `count` is the number of ranks. But if `several` is set and each Spark task gets several GPUs, `count` is the total
    number of GPUs.
    """
    from sparkring.launchers import place_of
    from sparkring.runtime.kernel import tell

    np = -count if local_mode else count
    if not use_gpu:
        return Options(np=np, gpus=0), ""
    gpus_each = place_of(np).gpus_of_a_rank(abs(np), tell)
    if not gpus_each:
        why = "this machine has no GPUs" if local_mode else "Spark assigns no GPUs to its tasks"
        return Options(np=np), f"use_gpu=True, but {why}: the ranks run on CPUs"
    if several and gpus_each > 1:
        np = math.ceil(count / gpus_each)
    # On Spark, `gpus` is left at None, because Spark decides how many GPUs each task has, and a rank uses all of them.
    return Options(np=np, gpus=1 if local_mode else None), ""
