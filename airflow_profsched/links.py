"""The link from a task instance to its job's page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperatorLink, XCom

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator, TaskInstanceKey

RECORD_KEY = "profsched"
"""XCom key of a task's record."""


class JobLink(BaseOperatorLink):
    """The job's page: the connection's `job_url`, with the job's id."""

    name = "Job"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's
        """Return the page's address.

        Args:
            operator: the operator.
            ti_key: the task instance.

        Returns:
            The address; empty where the connection names none or no job has been submitted.
        """
        record: Any = XCom.get_value(ti_key=ti_key, key=RECORD_KEY)
        return str(record.get("url", "")) if isinstance(record, dict) else ""
