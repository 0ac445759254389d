"""Reading a policy file: every error names the file and line, and the nearest name that is known."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import yaml
from pydantic import ValidationError

from airflow_profsched.core.errors import PolicyError
from airflow_profsched.core.policy import PolicyFile

Location = tuple[str | int, ...]

_MOST_NODES = 20_000
_MOST_BYTES = 1 << 20

BUILTIN = """\
version: 1
profiles:
  training:
    objective: throughput
    gpus: {min: 1}
    walltime: {default: 24h, max: 48h}
    preemptible: true
    grace: 120s
    checkpoint: {required: true, interval: auto, cost: 60s, between_preemptions: 6h}
    budgets: {without_progress: 3}
  inference:
    objective: latency
    gpus: {max: 4}
    walltime: {default: 30m, max: 2h}
    preemptible: false
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that has been read.

    Args:
        file: its content, over the built-in profiles.
        path: where it was read; for messages.
        lines: the line of every place in it.
    """

    file: PolicyFile
    path: str
    lines: Mapping[Location, int] = field(default_factory=dict)

    def where(self, *place: str | int) -> str:
        """Say where something stands.

        Args:
            place: the keys that lead there.

        Returns:
            `file:line`, of the nearest enclosing place that is in the file.
        """
        if place[:1] == ("profiles",) and place[:2] not in self.lines:
            return "the built-in profile"
        for end in range(len(place), -1, -1):
            if place[:end] in self.lines:
                return f"{self.path}:{self.lines[place[:end]]}"
        return self.path


def nearest(name: str, known: Collection[str]) -> str:
    """Say which known name was probably meant.

    Args:
        name: what was written.
        known: what there is.

    Returns:
        A half sentence for an error's message.
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    there = f"there are {', '.join(sorted(known))}" if known else "there are none"
    return f"did you mean {close[0]!r}? ({there})" if close else there


def builtin_policy() -> Policy:
    """Return the policy that applies where no file is configured: the two profiles, and no cluster."""
    return load_policy(BUILTIN, "the built-in policy")


def load_policy(text: str, path: str) -> Policy:
    """Read a policy.

    Args:
        text: the file's content, YAML.
        path: where it was read, for messages.

    Returns:
        The policy, over the built-in profiles.

    Raises:
        PolicyError: it is wrong; every fault on a line of its own, as `file:line: what`.
    """
    body, lines = _parse(text, path)
    base = yaml.safe_load(BUILTIN)["profiles"]
    merged = {**body, "profiles": _merge(base, body.get("profiles"))} if isinstance(body, dict) else body
    try:
        file = PolicyFile.model_validate(merged)
    except ValidationError as error:
        faults = [_fault(Policy(_EMPTY, path, lines), merged, one) for one in error.errors(include_url=False)]
        raise PolicyError("\n".join(faults)) from error
    policy = Policy(file, path, lines)
    dangling = list(_dangling(policy))
    if dangling:
        raise PolicyError("\n".join(dangling))
    return policy


_EMPTY = PolicyFile(version=1)


def _merge(base: Any, over: Any) -> Any:
    """Lay one mapping over another, field by field; anything else replaces."""
    if over is None:
        return base
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {key: _merge(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}}


# ------------------------------------------------------------------------------------------------ YAML


def _parse(text: str, path: str) -> tuple[Any, dict[Location, int]]:
    if len(text) > _MOST_BYTES:
        raise PolicyError(f"{path}: is larger than {_MOST_BYTES} bytes")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise PolicyError(f"{path}:1: is empty: begin with 'version: 1'")
        lines = dict(_lines(node, path))
        return yaml.safe_load(text), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PolicyError(f"{path}:{line}: is no YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: is no YAML: {error}") from error


def _lines(root: yaml.Node, path: str) -> Iterator[tuple[Location, int]]:
    """Walk all places; aliases are walked as often as they are used, so that a file that explodes is found out."""
    todo: list[tuple[Location, yaml.Node]] = [((), root)]
    count = 0
    while todo:
        place, node = todo.pop()
        count += 1
        if count > _MOST_NODES:
            raise PolicyError(f"{path}: holds more than {_MOST_NODES} values (are aliases nested?)")
        yield place, node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode):
            todo += [((*place, index), item) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            todo += _entries(place, node, path)


def _entries(place: Location, node: yaml.MappingNode, path: str) -> list[tuple[Location, yaml.Node]]:
    seen: dict[str, int] = {}
    entries = []
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen and name != "<<":
            raise PolicyError(f"{path}:{line}: {name!r} stands here a second time (first in line {seen[name]})")
        seen[name] = line
        value.start_mark.line = line - 1 if isinstance(value, yaml.ScalarNode) else value.start_mark.line
        entries.append(((*place, name), value))
    return entries


# ------------------------------------------------------------------------------------------------ faults


def _fault(policy: Policy, body: Any, error: Any) -> str:
    # pydantic puts the tag of a union into the location: it is no key of the file.
    place = tuple(part for part in _real(body, error["loc"]))
    name = ".".join(str(part) for part in place) or "the file"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"is not known here: {nearest(str(place[-1]), _fields(error))}"
    elif error["type"] == "missing":
        message = "is missing"
    return f"{policy.where(*place)}: {name}: {message}"


def _real(body: Any, location: Location) -> Iterator[str | int]:
    here = body
    last = len(location) - 1
    for index, part in enumerate(location):
        inside = _inside(here, part)
        if inside is not None or index == last:
            yield part
            here = inside


def _inside(here: Any, part: str | int) -> Any:
    if isinstance(here, Mapping):
        return here.get(part)
    if isinstance(here, list) and isinstance(part, int) and part < len(here):
        return here[part]
    return None


def _fields(error: Any) -> Collection[str]:
    """The fields that the model has in which an unknown one stands."""
    schema: Any = PolicyFile.model_json_schema()
    definitions = schema.get("$defs", {})
    for part in error["loc"][:-1]:
        schema = _deref(_descend(schema, part), definitions)
    return list(schema.get("properties", ()))


def _descend(schema: Any, part: str | int) -> Any:
    if isinstance(part, int):
        return schema.get("items", {})
    tagged = schema.get("discriminator", {}).get("mapping", {}).get(part)
    if tagged:
        return {"$ref": tagged}
    named = schema.get("properties", {}).get(part)
    entries = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    return named or next((entry for entry in entries if entry), {})


def _deref(schema: Any, definitions: Any) -> Any:
    """Follow a reference, or the one choice of a field that may also be null."""
    choices = [choice for choice in schema.get("anyOf", ()) if "$ref" in choice]
    schema = choices[0] if choices else schema
    return definitions.get(str(schema["$ref"]).rpartition("/")[2], {}) if "$ref" in schema else schema


def _dangling(policy: Policy) -> Iterator[str]:
    """Names that lead nowhere."""
    file = policy.file
    for name, cluster in file.clusters.items():
        for profile in cluster.profiles:
            yield from _unknown(policy, ("clusters", name, "profiles", profile), "profile", profile, file.profiles)
    for profile, targets in file.routes.items():
        yield from _unknown(policy, ("routes", profile), "profile", profile, file.profiles)
        for index, target in enumerate(targets):
            to = target if isinstance(target, str) else target.to
            yield from _unknown(policy, ("routes", profile, index), "cluster", to, file.clusters)
    for index, rule in enumerate(file.rules):
        yield from _unknown(policy, ("rules", index, "profile"), "profile", rule.profile, file.profiles)


def _unknown(policy: Policy, place: Location, what: str, name: str, known: Mapping[str, object]) -> Iterator[str]:
    if name not in known:
        yield f"{policy.where(*place)}: {'.'.join(map(str, place))}: there is no {what} {name!r}: {nearest(name, cast('Collection[str]', known))}"
