"""The operators: a task says what kind of work it is; the policy decides where and how it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, BaseOperator, conf

from airflow_profsched.core.profiles import Budgets, Checkpoint, Resources
from airflow_profsched.links import JobLink

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from airflow_profsched.operators.conduct import Conductor

# What runs on a worker only (senders, triggers, the cluster's rooms) is imported inside the methods: a DAG file that
# imports this module is parsed over and over, and pays for every import each time.

Callback = Callable[[Any], None]


class _Needs(BaseOperator):
    """Holds the resources under a name of its own.

    BaseOperator has an argument `resources` of another kind, and Airflow (3.1 to 3.4) cannot read back a mapped task whose
    `partial` names it: the whole file would vanish. So the author's `resources=` becomes `needs` before Airflow sees it.
    """

    def __init__(self, *, needs: Resources | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.needs = Resources() if needs is None else needs

    @classmethod
    def partial(cls, *, task_id: str, resources: Any = None, **kwargs: Any) -> Any:
        """As every operator's, with `resources` under its other name."""
        return super().partial(task_id=task_id, needs=resources, **kwargs)


class WorkloadOperator(_Needs):
    """Runs a command as a job of a workload profile, on the cluster that the policy file chooses.

    A preempted job is resumed from its newest complete checkpoint within the same Airflow try: `retries` is for the
    errors of the program itself.

    Args:
        command: the program and its arguments, an argument vector (no shell). Templated.
        profile: the workload profile; None lets the policy's rules decide. Templated.
        resources: what it needs, per node but for the walltime; a :class:`Resources` or a dict of its fields. Templated.
        checkpoint: how it writes checkpoints; a :class:`Checkpoint` or a dict of its fields. Templated.
        env: environment variables. Values are templated when the job is submitted and shown nowhere, so that
            `{{ var.value.token }}` or `{{ conn.wandb.password }}` is how a secret reaches a job.
        cwd: the program's working directory on the node; None: the task's directory. Templated.
        image: container image, where the cluster runs containers. Templated.
        project: whose budget it is charged to, in the policy's word. Templated.
        cluster: pins a cluster of the policy. Templated.
        overrides: `{"slurm": {"reservation": "…"}}`: what the cluster's policy lets a DAG set. Templated.
        budgets: how many resumes without progress are allowed; None: the profile's.
        deferrable: wait in the triggerer, without holding a worker.
        durable: a later try adopts the living job of an earlier one; False: it cancels it and starts anew.
        cancel_on_kill: cancel the job when a user ends the task.
        on_preempted: called with the context when a preempted attempt has ended.
        on_resumed: called with the context when the next attempt is submitted.
        kwargs: Airflow's own arguments.
    """

    template_fields: Sequence[str] = (
        "command",
        "profile",
        "needs",
        "checkpoint",
        "cwd",
        "image",
        "project",
        "cluster",
        "overrides",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"command": "json", "overrides": "json"}
    ui_color = "#e3f0e8"
    operator_extra_links = (JobLink(),)

    def __init__(
        self,
        *,
        command: Sequence[str],
        profile: str | None = None,
        resources: Resources | Mapping[str, Any] | None = None,
        checkpoint: Checkpoint | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        image: str | None = None,
        project: str | None = None,
        cluster: str | None = None,
        overrides: Mapping[str, Mapping[str, str]] | None = None,
        budgets: Budgets | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        durable: bool = True,
        cancel_on_kill: bool = True,
        on_preempted: Callback | None = None,
        on_resumed: Callback | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**({"needs": resources} | kwargs))
        self.command = command
        self.profile = profile
        self.checkpoint = checkpoint
        self.env = env
        self.cwd = cwd
        self.image = image
        self.project = project
        self.cluster = cluster
        self.overrides = overrides
        self.budgets = budgets
        self.deferrable = deferrable
        self.durable = durable
        self.cancel_on_kill = cancel_on_kill
        self.on_preempted = on_preempted
        self.on_resumed = on_resumed
        self._conductor: Conductor | None = None

    def execute(self, context: Context) -> Any:
        """Submit the job, or adopt the one of an earlier try, and wait for it.

        Args:
            context: the task's context.

        Returns:
            The program's result.

        Raises:
            AirflowFailException: another try would end the same way.
            AirflowException: the job failed.
        """
        from airflow_profsched.operators.conduct import Conductor  # noqa: PLC0415 - see the head of the module

        with _in_words():
            self._conductor = Conductor.of(self, context)
            run = self._conductor.begin()
            return self._wait(context, self._conductor, run)

    def resume(self, context: Context, event: dict[str, Any]) -> Any:
        """Go on where the trigger fired: submit the next attempt, or come to an end.

        Args:
            context: the task's context.
            event: the trigger's event.

        Returns:
            The program's result.

        Raises:
            AirflowFailException: another try would end the same way.
            AirflowException: the job failed.
        """
        from airflow_profsched.operators.conduct import Conductor  # noqa: PLC0415 - see the head of the module

        with _in_words():
            self._conductor = Conductor.of(self, context, desk=event["desk"])
            return self._go_on(context, self._conductor, event)

    def _wait(self, context: Context, conductor: Conductor, run: Any) -> Any:
        from airflow_profsched.triggers.workload import WorkloadTrigger, encode_event  # noqa: PLC0415 - likewise

        while True:
            if self.deferrable or conductor.drained:
                self.defer(
                    trigger=WorkloadTrigger(
                        conductor.desk.to_json(), run.to_json(), cancel_on_kill=self.cancel_on_kill
                    ),
                    method_name="resume",
                )
            run, action = conductor.wait(run)
            if action is not None:
                return self._go_on(context, conductor, encode_event(run, action))

    def _go_on(self, context: Context, conductor: Conductor, event: Mapping[str, Any]) -> Any:
        from airflow_profsched.triggers.workload import decode_event  # noqa: PLC0415 - see the head of the module

        run, action = decode_event(event)
        conductor.keep(run)
        conductor.report(run, action)
        if action == "submit":
            self._call(self.on_preempted if conductor.was_preempted(run) else None, context)
            run = conductor.submit(run)
            self._call(self.on_resumed if run.job_id and run.history else None, context)
            return self._wait(context, conductor, run)
        if action == "succeed":
            return conductor.result(run)
        if action == "broken":
            return self._wait_again(context, conductor, run, str(event["message"]))
        error = AirflowException if event.get("retry") else AirflowFailException
        raise error(conductor.failure_words(run, str(event["message"])))

    def _wait_again(self, context: Context, conductor: Conductor, run: Any, message: str) -> Any:
        """The trigger met an error of its own: the same is tried here once, so that it is seen with its cause."""
        self.log.warning("the trigger ended by an error, waiting goes on: %s", message)
        run, event = conductor.step_once(run)
        return self._wait(context, conductor, run) if event is None else self._go_on(context, conductor, event)

    def _call(self, callback: Callback | None, context: Context) -> None:
        if callback is not None:
            callback(context)

    def on_kill(self) -> None:
        """Cancel the job if a user ended the task; leave it if only the worker has to go.

        Airflow calls this from a signal handler, whose thread may be in the middle of a question to Airflow itself: the
        task's state is asked from a thread of its own, and not waited for longer than five seconds.
        """
        conductor = self._conductor
        if conductor is None:
            return
        thread = threading.Thread(target=conductor.killed, args=(self.cancel_on_kill,), daemon=True)
        thread.start()
        thread.join(timeout=5.0)


class TrainingOperator(WorkloadOperator):
    """A :class:`WorkloadOperator` of the profile `training`: many GPUs, long, preemptible, with checkpoints.

    Args:
        profile: the profile; `training`.
        kwargs: as :class:`WorkloadOperator`.
    """

    def __init__(self, *, profile: str | None = "training", **kwargs: Any) -> None:
        super().__init__(profile=profile, **kwargs)


class InferenceOperator(WorkloadOperator):
    """A :class:`WorkloadOperator` of the profile `inference`: few GPUs, short, never preempted.

    Args:
        profile: the profile; `inference`.
        kwargs: as :class:`WorkloadOperator`.
    """

    def __init__(self, *, profile: str | None = "inference", **kwargs: Any) -> None:
        super().__init__(profile=profile, **kwargs)


class _in_words:  # noqa: N801 - a context manager that reads as a phrase
    """Turns this package's errors into Airflow's: what another try cannot mend fails for good."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        from airflow_profsched.core.errors import PolicyError, ProfschedError, SubmitError  # noqa: PLC0415 - likewise

        if isinstance(error, (PolicyError, SubmitError)):
            raise AirflowFailException(str(error)) from error
        if isinstance(error, ProfschedError):
            raise AirflowException(str(error)) from error
