"""Options that %%foreach has in common with %%horovod and the other magics that start ranks for a cell."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from sparkring.engine.run.option_types import flag_of, variables
from sparkring.notebook.options_table import Option


def rows_of(options: type, names: str) -> tuple[Option, ...]:
    """Return the rows of a magic's table for the fields with these names of a class of options."""
    by_name = {field.name: field for field in dataclasses.fields(options)}
    return tuple(_row(by_name[name]) for name in names.split())


def _row(field: dataclasses.Field[Any]) -> Option:
    flag, about = flag_of(field.name), field.metadata
    settings: dict[str, Any] = {"help": about["help"], "dest": field.name, "default": argparse.SUPPRESS}
    if isinstance(field.default, bool):
        flag = flag.replace("--", "--no-") if field.default else flag
        settings["action"] = "store_false" if field.default else "store_true"
    elif about["choices"]:
        settings["choices"] = about["choices"]
    else:
        settings |= {"type": about["read"], "metavar": about["value"]}
    if isinstance(field.default, tuple):
        settings["action"] = "extend" if about["read"] is variables else "append"
    return Option(*(["-n"] if flag == "--np" else []), flag, **settings)


# Options of horovodrun, mpirun and torchrun, which users type out of habit, and what there is instead.
_PLACES = "-n -4 for processes on this machine, -n 4 for Spark tasks"
_INSTEAD = (
    (
        "-H --host --hosts -hostfile --hostfile --machinefile --host-discovery-script --slots --slots-per-host",
        "Ranks start on this machine (-n -4) or in Spark tasks (-n 4), not over ssh. To use several hosts, start a "
        "Spark cluster on them and make a SparkSession for it; -n 4 then starts ranks on these hosts.",
    ),
    (
        "--nproc_per_node --nproc-per-node --nnodes --node_rank --node-rank --master_addr --master-addr --master_port "
        "--master-port --standalone --rdzv_backend --rdzv-backend --rdzv_endpoint --rdzv-endpoint --rdzv_id --rdzv-id",
        f"-n gives the number of all ranks: {_PLACES}. The ranks find one another by themselves.",
    ),
    ("--num-proc --num_proc -c", f"The number of ranks is -n or -np: {_PLACES}."),
    ("--max-np", "-n is the largest number of ranks. With --min-np, a run on Spark may continue with fewer."),
    ("--reset-limit --max_restarts", "Write --max-restarts K."),
    ("--gloo --mpi --use-gloo --use-mpi --js", "Leave it out: the ranks are started without MPI."),
    (
        "--verbose -v --log-level --output-filename",
        "Leave it out: the output of all ranks is shown and kept, and %logs shows it later.",
    ),
    (
        "--network-interface --network-interfaces --nics",
        "Leave it out: ranks use the network interface that leads to the driver.",
    ),
    ("--timeline-filename", "--timeline records Horovod's timeline and keeps it with the run."),
    (
        "--ps --num-ps",
        "All ranks run the cell, but a parameter server's server.join() never returns, so the run would not end. Use "
        "tf.distribute.MultiWorkerMirroredStrategy under %%tensorflow, or %%horovod.",
    ),
    ("-x", "--env NAME=VALUE sets an environment variable for the ranks."),
    ("-m --module --no-python", "The ranks run the cell: use %run script.py, or %run -m module, in the cell."),
)
FOREIGN = {flag: sentence for flags, sentence in _INSTEAD for flag in flags.split()}
