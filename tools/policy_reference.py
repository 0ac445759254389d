"""Writes docs/reference/policy.md and policy.schema.json from the policy file's models; `--check` fails where they are stale."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from airflow_profsched.commands.policy import policy_schema
from airflow_profsched.core.policyfile import BUILTIN

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
ORDER = (
    "PolicyFile", "WorkloadProfile", "GpuRange", "Walltime", "CheckpointRule", "Budgets", "Allowed", "SlurmCluster", "SlurmProfile",
    "Files", "Container", "Project", "SlurmSite", "SlurmQos", "KubeCluster", "KubeProfile", "Claim", "KubeSite", "PriorityClass",
    "LocalCluster", "Detour", "When", "Rule", "Match",
)  # fmt: skip
HEAD = """\
# The policy file

<!-- Made by `python -m tools.policy_reference` from the models in airflow_profsched/core; do not edit. -->

YAML, named by `[profsched] policy_file` in Airflow's configuration. Check one with `profsched policy validate FILE`; the JSON
Schema for editors is [policy.schema.json](policy.schema.json) (`profsched policy schema` prints it). An unknown field is an
error, told with file, line and the nearest known name.

Durations are `90s`, `2h30m`, `7d`, Slurm's `1-12:00:00`, or seconds. `site` and `when` have no effect in this version; clusters of
another kind than `slurm` are read and checked, and refused when a task is to be submitted there.

These profiles are built in; a profile of the same name in the file is laid over them, field by field:

```yaml
"""


def render() -> str:
    """Render the page.

    Returns:
        Markdown.
    """
    schema = policy_schema()
    models = {"PolicyFile": schema, **schema["$defs"]}
    names = [name for name in ORDER if name in models] + [name for name in models if name not in ORDER]
    sections = [section for name in names for section in _section(name, models[name])]
    return HEAD + BUILTIN + "```\n" + "\n".join(sections) + "\n"


def _section(name: str, model: dict[str, Any]) -> Iterator[str]:
    title = "The file" if name == "PolicyFile" else name
    yield f"\n## {title}\n"
    text = str(model.get("description", "")).split("\n\nArgs:")
    if text[0] and name != "PolicyFile":
        yield text[0] + "\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    told = _told(text[1]) if len(text) > 1 else {}
    required = model.get("required", ())
    for field, body in model.get("properties", {}).items():
        default = (
            "**required**" if field in required else f"`{json.dumps(body.get('default'))}`" if "default" in body else ""
        )
        meaning = told.get(field) or body.get("description", "")
        yield f"| `{field}` | {_type(body)} | {default} | {meaning} |".replace("\n", " ")


def _told(arguments: str) -> dict[str, str]:
    """The docstring's `Args:`."""
    pairs = (line.strip().partition(": ") for line in arguments.splitlines() if ": " in line)
    return {name: meaning for name, _, meaning in pairs}


def _type(body: dict[str, Any]) -> str:
    if "$ref" in body:
        name = body["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    values = [body["const"]] if "const" in body else body.get("enum")
    if values:
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    choices = body.get("anyOf") or body.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices))
    inner = body.get("additionalProperties") or next(iter(body.get("patternProperties", {}).values()), None)
    if body.get("type") == "object":
        return f"name: {_type(inner)}" if isinstance(inner, dict) else "mapping"
    if body.get("type") == "array":
        return f"list of {_type(body.get('items', {}))}"
    kind = body.get("type", "anything")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def main() -> int:
    """Write the files, or compare them.

    Returns:
        1 where `--check` finds a stale file, else 0.
    """
    wanted = {"policy.md": render(), "policy.schema.json": json.dumps(policy_schema(), indent=2) + "\n"}
    stale = [
        name for name, text in wanted.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/reference/{name} is stale: run python -m tools.policy_reference")
        return 1 if stale else 0
    for name in stale:
        (FOLDER / name).write_text(wanted[name], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
