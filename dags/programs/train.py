"""A training that can be preempted: logistic regression by gradient descent, in the standard library alone.

It reads its whole contract from the environment (docs/reference): where checkpoints go, which one to resume from, where the
result goes. `--seconds-per-epoch` makes it last; the arithmetic is real, and the loss falls.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import time

stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))


def make_data(seed, rows, features=8):
    draw = random.Random(seed)
    truth = [draw.uniform(-2, 2) for _ in range(features)]
    points = []
    for _ in range(rows):
        x = [draw.gauss(0, 1) for _ in range(features)]
        score = sum(w * v for w, v in zip(truth, x))
        points.append((x, 1.0 if score + draw.gauss(0, 0.3) > 0 else 0.0))
    return points


def predict(weights, x):
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, sum(w * v for w, v in zip(weights, x))))))


def epoch_of(weights, points, rate):
    loss, slope = 0.0, [0.0] * len(weights)
    for x, y in points:
        p = predict(weights, x)
        loss -= y * math.log(p + 1e-12) + (1 - y) * math.log(1 - p + 1e-12)
        slope = [s + (p - y) * v for s, v in zip(slope, x)]
    return loss / len(points), [w - rate * s / len(points) for w, s in zip(weights, slope)]


def save(directory, epoch, weights):
    """Write one checkpoint; the manifest comes last and makes it complete."""
    place = os.path.join(directory, "step-%06d" % epoch)
    os.makedirs(place, exist_ok=True)
    state = json.dumps({"epoch": epoch, "weights": weights})
    with open(os.path.join(place, "weights.json"), "w") as out:
        out.write(state)
    with open(os.path.join(place, "manifest.tmp"), "w") as out:
        json.dump({"version": 1, "step": epoch, "files": {"weights.json": len(state)}}, out)
        out.flush()
        os.fsync(out.fileno())
    os.rename(os.path.join(place, "manifest.tmp"), os.path.join(place, "profsched.json"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=10, help="a checkpoint every so many epochs")
    parser.add_argument("--seconds-per-epoch", type=float, default=0.0)
    args = parser.parse_args()
    checkpoints = os.environ["PROFSCHED_CHECKPOINT_DIR"]
    points = make_data(args.seed, args.rows)
    first, weights = 0, [0.0] * len(points[0][0])
    if os.environ.get("PROFSCHED_RESUME_FROM"):
        with open(os.path.join(os.environ["PROFSCHED_RESUME_FROM"], "weights.json")) as source:
            state = json.load(source)
        first, weights = state["epoch"], state["weights"]
    print("starting after epoch", first, flush=True)
    loss = float("nan")
    with open(os.path.join(checkpoints, "steps.log"), "a") as steps:
        for epoch in range(first + 1, args.epochs + 1):
            began = time.time()
            loss, weights = epoch_of(weights, points, args.rate)
            steps.write("%s %d %.6f\n" % (os.environ["PROFSCHED_ATTEMPT"], epoch, loss))
            steps.flush()
            if stop or epoch % args.every == 0 or epoch == args.epochs:
                save(checkpoints, epoch, weights)
                print("epoch", epoch, "loss", round(loss, 4), "saved", flush=True)
            if stop and epoch < args.epochs:
                print("asked to stop: saved at epoch", epoch, flush=True)
                sys.exit(0)  # the result file is missing, so this is a stop, not an end
            time.sleep(max(0.0, args.seconds_per_epoch - (time.time() - began)))
    with open(os.environ["PROFSCHED_RESULT"], "w") as out:
        json.dump({"epochs": args.epochs, "loss": loss, "weights": weights, "seed": args.seed}, out)


if __name__ == "__main__":
    main()
