"""Every error of this package.

::

    ProfschedError
    ├── PolicyError            the policy file, or what a task asks of it
    │   ├── UnknownNameError   a name that is not there, with the nearest that is
    │   └── NotAllowedError    the policy knows it and says no
    ├── WorkDirError           the directory that nodes and Airflow share
    ├── ClusterError           a cluster answered, and the answer is no
    │   ├── SubmitError        a submission that was refused
    │   │   └── SubmitLimitError   refused for now: a submit limit; waiting helps
    │   └── UnreadableReplyError   an answer that this release cannot read
    └── ClusterUnavailableError    no answer: nothing is known, and nothing may be concluded
        └── LostReplyError     the request may or may not have been carried out
"""

from __future__ import annotations


class ProfschedError(Exception):
    """Base of all errors that airflow-profsched raises on purpose."""


class PolicyError(ProfschedError):
    """The policy file is wrong, or a task asks for what it does not offer."""


class UnknownNameError(PolicyError):
    """A profile, cluster, project or key that the policy does not know."""


class NotAllowedError(PolicyError):
    """The policy knows what was asked for, and forbids it."""


class WorkDirError(ProfschedError):
    """A work directory that is not named, is missing, cannot be written, or holds what it must not."""


class ClusterError(ProfschedError):
    """The cluster answered, and the answer is an error."""


class SubmitError(ClusterError):
    """The cluster refused a submission; nothing was queued."""


class SubmitLimitError(SubmitError):
    """Refused because of a limit on queued jobs: waiting and asking again helps."""


class UnreadableReplyError(ClusterError):
    """The cluster answered in a form that this version cannot read."""


class ClusterUnavailableError(ProfschedError):
    """No answer came: nothing is known about any job, and nothing may be concluded."""


class LostReplyError(ClusterUnavailableError):
    """The request went out and no answer came back: it may or may not have been carried out."""
