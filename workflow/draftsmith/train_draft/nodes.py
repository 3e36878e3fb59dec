"""Training on several nodes of one Slurm job.

The rule's command is one process on the job's first node. It starts itself by srun once on each node and stays behind;
what runs on a node checks the node's GPUs and becomes torchrun, which starts one process for each of them. The nodes find
each other by torchrun's c10d rendezvous at the node where srun was called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

from draftsmith import hardware
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.processes import driver_watch
from draftsmith.signals import EXIT_TERMINATED, Termination

# Set in what srun has started.
_ON_NODE = "DRAFTSMITH_ON_NODE"
# Away from a site's services and from the ports that a kernel deals out.
_FIRST_PORT, _PORTS = 15_000, 10_000
# A checkpoint may take this long, in seconds, after its torchrun was killed.
_GRACE = 600


def is_rank() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


def is_node() -> bool:
    """Whether srun has started this process, as the only one of its node."""
    return _ON_NODE in os.environ


def per_node(gpus: int | None, nodes: int) -> int | None:
    """GPUs of each node, of ``gpus`` that were granted on all; raises :class:`DraftsmithError` unless all have as many."""
    if gpus is None:
        return None
    if gpus % nodes:
        raise DraftsmithError(
            f"{gpus} GPUs cannot be shared out evenly over {nodes} nodes; make the resource gpu of train_draft a multiple of nodes"
        )
    return gpus // nodes


def run_on_nodes(nodes: int, gpus: int | None) -> None:
    """Run this very command on every node of the job, with ``gpus`` (None or 0 for none) each, and wait for its end.

    Raises SystemExit with 143 after SIGTERM, which is passed on, and :class:`DraftsmithError` when a node failed; its
    processes have told their own errors by then, on the same standard error.
    """
    job, srun = os.environ.get("SLURM_JOB_ID"), shutil.which("srun")
    if job is None or srun is None:
        lacks = "SLURM_JOB_ID is not set" if job is None else "srun is not on the PATH"
        raise DraftsmithError(
            f"training on {nodes} nodes needs a Slurm job, and {lacks}; run it by --profile slurm, or leave --nodes at 1"
        )
    log(f"training on {nodes} nodes" + (f" with {gpus} GPUs each" if gpus else ""))
    # No CPUs are asked for: a step that names none has all of the job's, and binding would leave one to each node.
    step = [
        srun,
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
    ]
    step += [f"--gres=gpu:{gpus}"] if gpus else []
    environment = os.environ | {_ON_NODE: "1"}
    with Termination() as termination:
        process = subprocess.Popen([*step, sys.executable, "-m", "draftsmith", *sys.argv[1:]], env=environment)
        told = False
        while process.poll() is None:
            time.sleep(0.2)
            if termination.asked and not told:
                told = True
                process.terminate()
    if termination.asked:
        raise SystemExit(EXIT_TERMINATED)
    if process.returncode:
        raise DraftsmithError(
            f"training on {nodes} nodes failed (srun ended with {process.returncode}); the message of the process that failed first is above"
        )


def become_torchrun(nodes: int) -> None:
    """On a node: go on as torchrun, with one process for each GPU of the node, or one where there is none."""
    count = max(1, len(hardware.gpus()))
    job = os.environ["SLURM_JOB_ID"]
    endpoint = f"{os.environ['SLURM_LAUNCH_NODE_IPADDR']}:{_FIRST_PORT + int(job) % _PORTS}"
    # torchrun would leave one thread to each of several processes.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(hardware.cores()) // count)))
    sys.stdout.flush()
    os.execv(
        sys.executable,
        [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={count}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}", "--max-restarts=0", "-m", "draftsmith", *sys.argv[1:],
        ],
    )  # fmt: skip


def follow_torchrun() -> None:
    """In a process that torchrun has started: come to an end when torchrun was killed."""
    driver_watch.follow_parent(_GRACE)
