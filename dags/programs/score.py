"""Batch inference: scores rows that the training has not seen with the weights that it returned."""

import argparse
import json
import math
import os
import random
import time


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="", help="JSON list; empty: a model that knows nothing")
    parser.add_argument("--seed", type=int, default=7, help="the training's")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=0.0, help="last at least so long")
    args = parser.parse_args()
    began = time.time()
    draw = random.Random(args.seed)
    truth = [draw.uniform(-2, 2) for _ in range(8)]
    weights = json.loads(args.weights) if args.weights else [0.0] * len(truth)
    rows = random.Random(1000 + args.batch)
    right = 0
    for _ in range(args.rows):
        x = [rows.gauss(0, 1) for _ in truth]
        score = 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, sum(w * v for w, v in zip(weights, x))))))
        right += (score > 0.5) == (sum(w * v for w, v in zip(truth, x)) > 0)
    time.sleep(max(0.0, args.seconds - (time.time() - began)))
    answer = {"batch": args.batch, "rows": args.rows, "accuracy": right / args.rows}
    print(json.dumps(answer), flush=True)
    with open(os.environ["PROFSCHED_RESULT"], "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main()
