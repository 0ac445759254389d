"""Durations, memory and TRES in the spellings of people, Slurm and Kubernetes; always rounded up."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
_PARTS = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[wdhms]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[wdhms])")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)[bB]?")
_SECONDS: dict[str, Fraction | int] = {"ms": Fraction(1, 1000), "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_LONGEST_S = 10 * 366 * 86400


def seconds(value: object) -> int:
    """Read a duration.

    Args:
        value: seconds as a number, `90s`, `2h30m`, `1.5h`, `7d`, or Slurm's `D-HH:MM:SS`, `HH:MM:SS`, `MM:SS`.

    Returns:
        Whole seconds, rounded up.

    Raises:
        ValueError: it is none, or longer than ten years.
    """
    found = _number(value) if isinstance(value, (int, float)) else _duration(str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is no duration: write 90s, 2h30m, 7d, or Slurm's 1-12:00:00")
    if found > _LONGEST_S:
        raise ValueError(f"{value!r} is longer than ten years")
    return math.ceil(found)


def _number(value: float) -> Fraction | None:
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        return None
    return Fraction(value)


def _duration(text: str) -> Fraction | None:
    if len(text) > 64 or not text.isascii():  # noqa: PLR2004 - no duration is longer, and numbers stay small
        return None
    if _PARTS.fullmatch(text):
        return sum((Fraction(number) * _SECONDS[unit] for number, unit in _PART.findall(text)), Fraction(0))
    clock = _CLOCK.fullmatch(text)
    if clock is None or (":" not in text and "-" not in text):
        return Fraction(text) if text.isdigit() else None
    days, *rest = clock.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        units: tuple[int, ...] = (3600, 60, 1)
    else:  # MM:SS, HH:MM:SS
        units = (3600, 60, 1)[-len(numbers) :]
    return Fraction(int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False)))


def slurm_time(duration_s: int) -> str:
    """Write a duration as Slurm reads it.

    Args:
        duration_s: seconds.

    Returns:
        `D-HH:MM:SS`.
    """
    days, rest = divmod(duration_s, 86400)
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"


def words(duration_s: float) -> str:
    """Write a duration for people.

    Args:
        duration_s: seconds.

    Returns:
        Such as `1d 12h`, `2h 30m` or `45s`.
    """
    left, parts = round(duration_s), []
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_SECONDS[unit]))
        parts += [f"{count}{unit}"] if count else []
    return " ".join(parts) or "0s"


def mebibytes(value: object) -> int:
    """Read an amount of memory.

    Args:
        value: `512Gi`, `64G`, `1.5TiB`, `2048` (bytes). Without an `i`, `G` is 10^9 bytes as in Kubernetes.

    Returns:
        MiB, rounded up.

    Raises:
        ValueError: it is none.
    """
    match = _MEMORY.fullmatch(str(value).strip()) if len(str(value)) <= 32 else None  # noqa: PLR2004 - as above
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is no amount of memory: write 512Gi, 64G or 1.5TiB")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    whole: int = base ** _POWER[prefix]
    return math.ceil(Fraction(number) * whole / 2**20)


def tres(text: str) -> dict[str, int]:
    """Read trackable resources as Slurm writes them.

    Args:
        text: `cpu=4,gres/gpu=512,mem=64G`.

    Returns:
        Amounts by name; memory in MiB. What is no number is left out.
    """
    found = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        if name == "mem" and amount:
            # Slurm's M, G, T are powers of 1024 (tres in slurm.conf(5)).
            found[name] = mebibytes(amount if amount[-1].isdigit() else f"{amount}i")
        elif amount.isdigit():
            found[name] = int(amount)
    return found
