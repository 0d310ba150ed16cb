"""Options that %%foreach has in common with %%horovod and the other magics that start ranks for a cell."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.notebook.option_types import assignment, variables
from sparkring.notebook.options_table import Option

PUSH = Option(
    "--push",
    type=variables,
    metavar="NAME,…",
    action="append",
    help="notebook variables to send, even if the cell does not name them",
)
ENV = Option(
    "--env",
    type=assignment,
    metavar="K=V",
    action="append",
    help="an environment variable for the ranks; may be repeated",
)
AUTOLOG = Option(
    "--no-autolog", action="store_false", dest="autolog", help="do not automatically report the metrics of Keras' fit()"
)
NAME = Option("--name", default="", metavar="NAME", help="the name of the run in %runs")
DRY_RUN = Option("--dry-run", action="store_true", help="show what would be sent to the ranks, and start nothing")
QUIET = Option("--quiet", action="store_true", help="show only errors")
NOTIFY = Option(
    "--notify", action="store_true", help="let the browser show a notification if the run ends while you look elsewhere"
)

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


def flattened(groups: Sequence[tuple[str, ...]] | None) -> tuple[str, ...]:
    """Return the names from all uses of an option that may be repeated. Each name is returned once."""
    return tuple(dict.fromkeys(name for group in groups or () for name in group))
