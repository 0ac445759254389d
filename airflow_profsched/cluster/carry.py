"""jobside as one file: a zip that python3 runs, made of the package's own sources."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from importlib import resources

_EPOCH = (1980, 1, 1, 0, 0, 0)


@lru_cache(maxsize=1)
def jobside_zip() -> bytes:
    """Pack :mod:`airflow_profsched.jobside`.

    Returns:
        The zip, always the same bytes for the same sources: `python3 -I jobside.pyz run SPEC`.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sorted(resources.files("airflow_profsched.jobside").iterdir(), key=lambda entry: entry.name):
            if source.name.endswith(".py"):
                # At the top of the zip stands what python runs; the modules keep a package of their own.
                name = source.name if source.name == "__main__.py" else f"jobside/{source.name}"
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), source.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
