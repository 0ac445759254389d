from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched import Budgets, Checkpoint, Resources
from airflow_profsched.core.errors import NotAllowedError, PolicyError, UnknownNameError
from airflow_profsched.core.placement import SlurmPlacement, TaskRequest, resolve
from airflow_profsched.core.policyfile import builtin_policy, load_policy

SIX_LINES = """\
version: 1
clusters:
  dgx:
    kind: slurm
    work_dir: /shared/airflow
    profiles: {training: {qos: training, partition: train}, inference: {qos: inference, partition: infer}}
"""

WHOLE = """\
version: 1
profiles:
  inference:
    allowed: {owners: [serving], dag_ids: ["score_*"]}
  debug: {walltime: {default: 10m}}
clusters:
  dgx:
    kind: slurm
    work_dir: /shared/airflow/
    poll_interval: 15s
    files: {group: ml, umask: "027"}
    gpu_form: gpus-per-node
    gpu_types: {h100: h100_80gb}
    setup: ["module load cuda/12.9"]
    profiles:
      training: {partition: train, qos: training, constraint: "a100&ib", signal: "USR1@120"}
      inference: {partition: infer, qos: inference}
    projects: {vision: {account: vis01}, default: {account: ml}}
    overrides: [reservation, mail_type]
  small: {kind: slurm, work_dir: /small, image_required: true, profiles: {debug: {}}}
  k8s: {kind: kueue, namespace: ml, profiles: {training: {queue: ml}}}
routes:
  training: [dgx]
  inference: [{to: k8s, when: {wait_over: 60s}}, dgx]
rules:
  - {when: {gpus_total: ">=8"}, profile: training}
  - {when: {dag_tag: serving}, profile: inference}
"""


def policy(text=WHOLE):
    return load_policy(text, "p.yaml")


def place(profile="training", text=WHOLE, **request):
    resources = request.pop("resources", Resources(gpus=8))
    return resolve(policy(text), TaskRequest(resources, profile, **({"dag_id": "d", "task_id": "t"} | request)))


# ------------------------------------------------------------------------------------------------ the file

FAULTS = {
    "version: 1\nclusters:\n  dgx:\n    kind: slurm\n    polling: 3\n": ["p.yaml:5: clusters.dgx.polling", "did you mean 'poll_interval'"],
    "version: 1\nclusters:\n  dgx: {kind: slurm, profiles: {trainin: {}}}\n": ["p.yaml:3:", "no profile 'trainin'", "did you mean 'training'"],
    "version: 1\nprofils: {}\n": ["p.yaml:2: profils", "did you mean 'profiles'"],
    "version: 1\nroutes: {training: [dxg]}\nclusters:\n  dgx: {kind: slurm}\n": ["p.yaml:2: routes.training.0", "did you mean 'dgx'"],
    "version: 1\nclusters: {a: {kind: slrm}}\n": ["p.yaml:2: clusters.a", "'slurm'"],
    "version: 1\nversion: 2\n": ["p.yaml:2: 'version' stands here a second time (first in line 1)"],
    "a: [\n": ["p.yaml:2: is no YAML"],
    "": ["p.yaml:1: is empty"],
    "- 1\n": ["p.yaml:1: the file"],
    "version: 2\n": ["p.yaml:1: version"],
    "version: 1\nprofiles: {training: {walltime: {default: soon}}}\n": ["p.yaml:2: profiles.training.walltime.default", "no duration"],
    "version: 1\nprofiles: {training: {walltime: {default: 3d}}}\n": ["is longer than max 2d"],
    "version: 1\nprofiles: {mine: {gpus: {min: 1}}}\n": ["profiles.mine.walltime: is missing"],
    "version: 1\nclusters: {dgx: {kind: slurm, work_dir: shared}}\n": ["must be an absolute path"],
    "version: 1\nclusters: {dgx: {kind: slurm, work_dir: /a/../b}}\n": ["must be an absolute path"],
    "version: 1\nclusters: {dgx: {kind: slurm, files: {umask: 27}}}\n": ["umask"],
    'version: 1\nclusters: {dgx: {kind: slurm, setup: ["a\\nb"]}}\n': ["one line without control characters"],
    "version: 1\nclusters: {dgx: {kind: slurm, profiles: {training: {signal: 'B:TERM@1'}}}}\n": ["TERM@120"],
    "version: 1\nclusters: {dgx: {kind: slurm, profiles: {training: {partition: --wrap=x}}}}\n": ["begins with '-'"],
    "version: 1\nclusters: {dgx: {kind: slurm, profiles: {training: {qos: 'a b'}}}}\n": ["one word"],
    "version: 1\nrules: [{when: {gpus_total: lots}, profile: training}]\n": ["rules.0.when.gpus_total"],
}  # fmt: skip


@pytest.mark.parametrize("text", FAULTS)
def test_faults_name_line_and_nearest_name(text):
    with pytest.raises(PolicyError) as caught:
        load_policy(text, "p.yaml")
    for part in FAULTS[text]:
        assert part in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(PolicyError) as caught:
        load_policy("version: 1\nclusters:\n  a: {kind: slurm, x: 1}\n  b: {kind: slurm, y: 1}\n", "p.yaml")
    assert len(str(caught.value).splitlines()) == 2


def test_nested_aliases_do_not_explode():
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for one, other in zip("bcdefgh", "abcdefg", strict=True):
        bomb += f"{one}: &{one} [{', '.join([f'*{other}'] * 9)}]\n"
    with pytest.raises(PolicyError, match="aliases"):
        load_policy(bomb, "p.yaml")


def test_the_builtin_policy_knows_the_two_profiles_and_no_cluster():
    file = builtin_policy().file
    assert (set(file.profiles), dict(file.clusters)) == ({"training", "inference"}, {})


def test_a_files_profile_is_laid_over_the_builtin_one():
    inference = policy().file.profiles["inference"]
    assert (inference.allowed.owners, inference.gpus.max, inference.preemptible) == (("serving",), 4, False)


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_is_a_policy_or_a_policy_error(text):
    with contextlib.suppress(PolicyError):
        load_policy(text, "p.yaml")


# ------------------------------------------------------------------------------------------------ placement


def test_six_lines_are_enough():
    placed = place(text=SIX_LINES)
    assert (placed.cluster, placed.qos, placed.partition, placed.walltime_s) == ("dgx", "training", "train", 86400)
    assert (placed.checkpointed, placed.preemptible, placed.signal, placed.stop_signal) == (
        True,
        True,
        "TERM@120",
        "TERM",
    )


def test_everything_that_the_policy_says_is_in_the_placement_with_its_reason():
    placed = place(
        resources=Resources(nodes=2, gpus=8, gpu_type="h100", walltime="24h"),
        project="vision",
        overrides={"slurm": {"reservation": "x"}},
    )
    assert (placed.account, placed.gpu_type, placed.constraint) == ("vis01", "h100_80gb", "a100&ib")
    assert (placed.signal, placed.stop_signal, placed.walltime_notice_s) == ("USR1@120", "USR1", 120.0)
    assert (placed.work_dir, placed.files_umask, placed.overrides) == (
        "/shared/airflow",
        0o027,
        (("reservation", "x"),),
    )
    assert "profile training: named by the task" in placed.reasons
    assert "cluster dgx: p.yaml:23" in placed.reasons
    assert any(reason.startswith("account vis01: project vision") for reason in placed.reasons)


def test_young_and_daly_advise_the_interval():
    assert place().checkpoint_interval_s == pytest.approx((2 * 60 * 6 * 3600) ** 0.5)


def test_rules_choose_for_a_task_that_names_no_profile():
    assert place(None).profile == "training"
    small = {"resources": Resources(gpus=1), "owner": "serving"}
    assert place(None, dag_tags=("serving",), **small).profile == "inference"
    with pytest.raises(UnknownNameError, match="no rule"):
        place(None, **small)


def test_an_overflow_has_no_effect_yet():
    assert place("inference", resources=Resources(gpus=1), owner="serving").cluster == "dgx"


REFUSED = {
    "unknown profile": (UnknownNameError, {"profile": "trainin"}, "did you mean 'training'"),
    "unknown cluster": (UnknownNameError, {"cluster": "dxg"}, "did you mean 'dgx'"),
    "unknown project": (UnknownNameError, {"project": "vison"}, "did you mean 'vision'"),
    "unknown GPU type": (UnknownNameError, {"resources": Resources(gpus=8, gpu_type="a10")}, "there are h100"),
    "too few GPUs": (NotAllowedError, {"resources": Resources()}, "begins at 1 GPUs"),
    "too many GPUs": (
        NotAllowedError,
        {"profile": "inference", "owner": "serving", "resources": Resources(nodes=2, gpus=4)},
        "= 8",
    ),
    "too long": (NotAllowedError, {"resources": Resources(gpus=8, walltime="3d")}, "may have 2d"),
    "no right": (
        NotAllowedError,
        {"profile": "inference", "owner": "x", "resources": Resources(gpus=1)},
        "owners serving; DAGs score_*",
    ),
    "not served": (
        NotAllowedError,
        {"profile": "debug", "cluster": "dgx", "resources": Resources()},
        "does not take profile debug",
    ),
    "kind to come": (NotAllowedError, {"cluster": "k8s"}, "of kind kueue"),
    "override": (NotAllowedError, {"overrides": {"slurm": {"qos": "x"}}}, "does not let a DAG do"),
    "override's value": (NotAllowedError, {"overrides": {"slurm": {"reservation": "--x"}}}, "begins with '-'"),
    "image required": (NotAllowedError, {"profile": "debug", "resources": Resources()}, "runs containers alone"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_say_what_was_asked_and_where_the_limit_stands(what):
    error, request, words = REFUSED[what]
    with pytest.raises(error) as caught:
        place(**request)
    assert words in str(caught.value)
    assert "d.t" in str(caught.value)
    if what != "override's value":  # whatever the policy says, it is no value
        assert "p.yaml" in str(caught.value) or "the built-in profile" in str(caught.value)


def test_a_right_may_come_by_the_dag():
    assert place("inference", dag_id="score_users", resources=Resources(gpus=1)).profile == "inference"


def test_a_placement_survives_json():
    placed = place()
    assert SlurmPlacement.from_json(placed.to_json()) == placed.model_copy(update={"reasons": ()})


def test_what_a_dag_writes_is_frozen_validated_and_picklable():
    for model in (Resources(gpus=1, memory="1Gi"), Checkpoint(layout="step"), Budgets(deadline="1h")):
        assert pickle.loads(pickle.dumps(model)) == model
        with pytest.raises(ValueError, match="frozen"):
            model.anything = 1
    for wrong in ({"gpu": 1}, {"gpus": -1}, {"memory": "lots"}, {"walltime": "soon"}, {"gpu_type": "a b"}):
        with pytest.raises(ValueError, match=r"validation error"):
            Resources(**wrong)
    with pytest.raises(ValueError, match="absolute"):
        Checkpoint(dir="relative")


@given(value=st.text(), where=st.sampled_from(["gpu_type", "override", "project", "cluster", "profile"]))
def test_no_value_becomes_an_option_or_a_second_word(value, where):
    request = {
        "gpu_type": lambda: {"resources": Resources(gpus=8, gpu_type=value), "text": SIX_LINES},
        "override": lambda: {"overrides": {"slurm": {"reservation": value}}},
        "project": lambda: {"project": value},
        "cluster": lambda: {"cluster": value},
        "profile": lambda: {"profile": value},
    }[where]
    try:
        placed = place(**request())
    except (ValueError, PolicyError):  # refused in words
        return
    for scalar in (placed.gpu_type, *(setting for _, setting in placed.overrides)):
        assert not scalar.startswith("-")
        assert all("!" <= char <= "~" and char not in "\"'\\#`" for char in scalar)


def test_no_cluster_and_none_that_serves_are_different_errors():
    with pytest.raises(UnknownNameError, match="knows no cluster"):
        place(text="version: 1\n")
    with pytest.raises(NotAllowedError, match="does not take profile training"):
        place(text="version: 1\nclusters: {dgx: {kind: slurm, profiles: {inference: {}}}}\n")
    with pytest.raises(NotAllowedError, match="does not take profile training"):
        place(text=SIX_LINES + "routes: {training: [{to: dgx, when: {wait_over: 60s}}]}\n")


def test_an_image_is_left_out_with_a_note_or_refused():
    placed = place(image="registry.site/train:1")
    assert any("image registry.site/train:1: left out" in reason for reason in placed.reasons)
    with pytest.raises(NotAllowedError, match="does not run images on Slurm yet"):
        place(image="x", text=SIX_LINES.replace("kind: slurm", "kind: slurm\n    container: {runtime: pyxis}"))


def test_an_interval_may_be_given():
    text = SIX_LINES + "profiles: {training: {checkpoint: {interval: 20m}}}\n"
    placed = place(text=text)
    assert (placed.checkpoint_interval_s, placed.checkpointed) == (1200.0, True)


def test_budgets_of_the_task_go_before_the_profiles():
    assert place(budgets=Budgets(without_progress=1, deadline="2h")).budgets.deadline_s == 7200


def test_a_file_that_is_too_large_is_refused():
    with pytest.raises(PolicyError, match="is larger than"):
        load_policy("#" * (1 << 21), "p.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: 1\nclusters: {d: {kind: slurm, files: {umask: '9'}}}\n", "is no umask"),
        ("version: 1\nrules: [{when: {dag_tga: x}, profile: training}]\n", "did you mean 'dag_tag'"),
        ("version: 1\nprofiles: {training: {allowed: {owner: [x]}}}\n", "did you mean 'owners'"),
        ("version: 1\nrules: 3\n", "p.yaml:2: rules"),
    ],
)
def test_more_faults(text, words):
    with pytest.raises(PolicyError, match=words):
        load_policy(text, "p.yaml")
