"""The command line: `python3 -I jobside.pyz run SPEC`."""

import json
import sys

from jobside import checkpoints, job  # type: ignore[import-not-found]


def main(argv):
    """Be the command line: `run SPEC`, or `look CHECKPOINT_DIR [LAYOUT]`."""
    if len(argv) == 2 and argv[0] == "run":
        return job.run(argv[1])
    if len(argv) in (2, 3) and argv[0] == "look":
        print(json.dumps(checkpoints.view_checkpoints(*argv[1:])))
        return 0
    sys.stderr.write("usage: jobside.py run SPEC | look CHECKPOINT_DIR [LAYOUT]\n")
    return 64


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
