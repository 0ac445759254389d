"""A training for the tests: it counts steps, writes checkpoints, and does at a stop notice what it is told.

Standard library only: it runs under the node's /usr/bin/python3. Its step log, one line per step, is what the tests
believe; our own counters are not.
"""

import argparse
import json
import os
import signal
import sys
import time


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="a checkpoint every so many steps; 0: only at a notice")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds per step")
    parser.add_argument("--save-s", type=float, default=0.5, help="how long a save takes, per rank: 2,40")
    parser.add_argument("--save-per-rank", default="", help="likewise, by rank")
    parser.add_argument("--on-notice", default="85", help="exit code after saving, or: ignore, nosave:CODE")
    parser.add_argument(
        "--save-first", type=int, default=0, help="a checkpoint of this step, in the first attempt alone"
    )
    parser.add_argument("--crash-at", type=int, default=0)
    parser.add_argument("--crash-rank", type=int, default=0)
    parser.add_argument("--crash-once", action="store_true", help="only in the first attempt")
    parser.add_argument("--log", default="", help="default: steps.log beside the checkpoints")
    return parser.parse_args()


ASKED = []
RANK = int(os.environ.get("SLURM_PROCID", "0"))
CHECKPOINTS = os.environ["PROFSCHED_CHECKPOINT_DIR"]


def save(step, seconds):
    """Write a checkpoint of our own layout: the manifest comes last."""
    time.sleep(seconds)
    if RANK:
        with open(os.path.join(CHECKPOINTS, "..", "saved-rank-%d" % RANK), "a") as out:
            out.write("%d\n" % step)
        return
    directory = os.path.join(CHECKPOINTS, "step-%06d" % step)
    os.makedirs(directory, exist_ok=True)
    state = json.dumps({"step": step})
    with open(os.path.join(directory, "state.json"), "w") as out:
        out.write(state)
    manifest = os.path.join(directory, "profsched.json")
    with open(manifest + ".tmp", "w") as out:
        json.dump({"version": 1, "step": step, "files": {"state.json": len(state)}}, out)
    os.rename(manifest + ".tmp", manifest)


def resume():
    if not os.environ.get("PROFSCHED_RESUME_FROM"):
        return 0
    with open(os.path.join(os.environ["PROFSCHED_RESUME_FROM"], "state.json")) as source:
        return json.load(source)["step"]


def leave(args, step):
    if args.on_notice.startswith("nosave:"):
        sys.exit(int(args.on_notice.split(":")[1]))
    seconds = args.save_s
    if args.save_per_rank:
        seconds = float(args.save_per_rank.split(",")[RANK])
    save(step, seconds)
    sys.exit(int(args.on_notice))


def main():
    args = arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: ASKED.append(number))
    attempt = int(os.environ["PROFSCHED_ATTEMPT"])
    log = open(args.log or os.path.join(CHECKPOINTS, "..", "steps.log"), "a", buffering=1)
    first = resume()
    print("attempt", attempt, "rank", RANK, "from step", first, flush=True)
    for step in range(first + 1, args.steps + 1):
        time.sleep(args.delay)
        if not RANK:
            log.write("%d %d %.3f\n" % (attempt, step, time.time()))
        if step == args.crash_at and args.crash_rank == RANK and not (args.crash_once and attempt > 1):
            sys.exit(3)
        if ASKED and args.on_notice != "ignore":
            leave(args, step)
        if step == args.save_first and attempt == 1:
            save(step, 0)
        if args.every and step % args.every == 0:
            save(step, 0)
    if not RANK:
        with open(os.environ["PROFSCHED_RESULT"], "w") as out:
            json.dump({"steps": args.steps, "attempt": attempt}, out)


if __name__ == "__main__":
    main()
