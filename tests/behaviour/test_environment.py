"""The environment of ranks, compared with that of the processes of torchrun and horovodrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkring.capture import notebook_state

RANKS = 2
OF_THE_SHELL = {"SHLVL", "_", "PWD", "OLDPWD"}

# Each variable, with a description of its value or the reason why it differs. Variables that both sparkring and the
# command (torchrun or horovodrun) set:
VALUES = {
    "torch": {
        "MASTER_ADDR": "ranks are reached by address: a host's name may lead elsewhere on other hosts",
        "MASTER_PORT": "a free port",
        "TORCHELASTIC_RUN_ID": "the id of the run",
        "TORCHELASTIC_USE_AGENT_STORE": "torchrun's agent runs the store; here, rank 0 does, and there is no agent",
    },
    "horovod": {
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "a free port",
        "HOROVOD_HOSTNAME": "each host has its own name, even if there is only one",
    },
}
# Variables that only the command sets:
THEIRS = {
    "torch": {
        "TORCHELASTIC_ERROR_FILE": "failures are reported over the rank's connection",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun sets this for its own agent",
    },
    "horovod": {"PYTHONUNBUFFERED": "ranks write line by line without it; processes that they start may buffer"},
}
# Variables that only sparkring sets:
OURS = {
    "torch": {
        "GLOO_SOCKET_IFNAME": "without it, Gloo would use the address that the host's name resolves to",
        "NCCL_SOCKET_IFNAME": "without it, NCCL would avoid the loopback interface",
        "TP_SOCKET_IFNAME": "without it, torch.distributed.rpc would use the address that the host's name resolves to",
        "MPLBACKEND": "a rank displays its figures; processes that it starts draw into files only",
        "SPARKRING_DBFS_ROOT": "where dbfs:/ is",
    },
    "horovod": {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "ranks may come to hvd.init() minutes apart; a lost one ends the run",
        "OMP_NUM_THREADS": "the rank's share of the cores; torchrun sets one thread, horovodrun leaves it alone",
        "MPLBACKEND": "a rank displays its figures; processes that it starts draw into files only",
        "SPARKRING_DBFS_ROOT": "where dbfs:/ is",
    },
}
COMMANDS = {
    "torch": [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"],
    "horovod": [f"{Path(sys.executable).parent}/horovodrun", "--gloo", "-np", str(RANKS), sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "horovod"])
def test_ranks_find_what_the_command_sets(framework, local, tmp_path, monkeypatch):
    """Every variable has the value that the command gives it, except the variables that are listed above."""
    monkeypatch.setattr(notebook_state, "_ever_changed", set())  # ranks of later tests must not learn of the change
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # a notebook may have set it, and deleted it again
    assert local.run("import os\nos.environ['OMP_NUM_THREADS']", 1).value == "7"
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # otherwise, ranks add this
    script = tmp_path / "tell.py"
    script.write_text(
        "import json, os\n"
        "rank = os.environ.get('RANK') or os.environ['HOROVOD_RANK']\n"
        f"json.dump(dict(os.environ), open(rf'{tmp_path}/rank-{{rank}}.json', 'w'))"
    )
    subprocess.run([*COMMANDS[framework], str(script)], check=True, env=dict(os.environ))
    found = local.run("import os\ndict(os.environ)", RANKS, framework=framework).values
    for rank in range(RANKS):
        theirs, ours = added(json.loads((tmp_path / f"rank-{rank}.json").read_text())), added(found[rank])
        assert set(theirs) - set(ours) == set(THEIRS[framework])
        assert set(ours) - set(theirs) == set(OURS[framework])
        both = {name for name in set(theirs) & set(ours) if name != "OMP_NUM_THREADS"}
        assert {name for name in both if theirs[name] != ours[name]} == set(VALUES[framework])


def added(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that this process does not have, or has with another value."""
    return {
        name: value for name, value in environment.items() if os.environ.get(name) != value and name not in OF_THE_SHELL
    }


def test_which_attempt_it_is(local, tmp_path):
    """A restart sets the same variables as torchrun, and a value that the user has set takes precedence."""
    result = local.run(
        """
        import os
        names = ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID")
        if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)
        [os.environ[f"TORCHELASTIC_{name}"] for name in names], os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        """,
        framework="torch",
        max_restarts=2,
        env=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),),
    )
    assert result.values == [(["1", "2", result.record.run_id], "3")] * 2
