"""What the program sees: the job's environment, the author's variables, the contract's, and where the ranks meet."""

import os
import shlex
import socket
import subprocess
import zlib

from . import files

MOST_BYTES = 64 << 20
LOOKUP_S = 10


def build(job):
    """Build the environment of a job's program.

    Args:
        job: the job.

    Returns:
        Names and values, in bytes.

    Raises:
        OSError: the author's variables cannot be read.
        ValueError: likewise.
    """
    env = dict(os.environb)
    env.update(own_variables(job.path("env.sh")))
    ours = contract(job)
    ours.update(rendezvous(job))
    env.update({os.fsencode(name): os.fsencode(str(value)) for name, value in ours.items()})
    return env


def own_variables(path):
    """Read env.sh, byte for byte: a file for its owner alone, deleted at the end."""
    text = os.fsdecode(files.patiently(files.read_regular, path, MOST_BYTES))
    words = [word for word in shlex.split(text) if word != "export"]
    return dict(os.fsencode(word).partition(b"=")[::2] for word in words)


def contract(job):
    """Return the variables that every program may rely on."""
    spec = job.spec
    interval = spec.get("checkpoint_interval_s")
    variables = {
        "PROFSCHED_PROFILE": spec["profile"],
        "PROFSCHED_JOB_KEY": spec["key"],
        "PROFSCHED_CLUSTER": spec["cluster"],
        "PROFSCHED_ATTEMPT": spec["attempt"] + job.restart,
        "PROFSCHED_CHECKPOINT_DIR": spec["checkpoint_dir"],
        "PROFSCHED_RESUME_FROM": job.resume_from,
        "PROFSCHED_RESUME_STEP": "" if job.start_step is None else job.start_step,
        "PROFSCHED_NOTICE_S": "%g" % spec["grace_s"],
        "PROFSCHED_CHECKPOINT_INTERVAL_S": "" if interval is None else "%g" % interval,
        "PROFSCHED_RESULT": job.path("result.json"),
    }
    if spec.get("traceparent"):
        variables["TRACEPARENT"] = spec["traceparent"]
    return variables


def rendezvous(job):
    """Return where the ranks meet, computed anew at each start: a resumed job runs on other hosts."""
    nodes, tasks = job.spec["nodes"], job.spec["tasks_per_node"]
    if nodes * tasks == 1:
        return {}
    host = master_host() if nodes > 1 else "127.0.0.1"
    number = int(job.job_id) if job.job_id.isdigit() else zlib.crc32(os.fsencode(job.job_id))
    port = 20000 + (number * 31 + job.spec["attempt"] + job.restart) % 10000  # below the ephemeral ports
    meet = {"MASTER_ADDR": host, "MASTER_PORT": port, "NODE_RANK": job.node_rank, "NNODES": nodes}
    if nodes > 1:
        meet.update({"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port, "PET_NODE_RANK": job.node_rank})
        meet.update({"PET_NNODES": nodes, "PET_NPROC_PER_NODE": job.spec["gpus_per_node"] or 1})
    if tasks > 1:
        local = int(os.environ.get("SLURM_LOCALID", "0"))
        meet.update({"WORLD_SIZE": nodes * tasks, "RANK": job.rank, "LOCAL_RANK": local})
    return meet


def master_host():
    """Return the host of rank 0: the first of the job's nodes where its name resolves, else the address srun came from."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        named = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=LOOKUP_S)
        first = named.decode("utf-8", "replace").split()[0]
        socket.getaddrinfo(first, None)
    except (OSError, IndexError, UnicodeError, subprocess.SubprocessError):
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
    return first
