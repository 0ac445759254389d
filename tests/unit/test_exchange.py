"""A conversation is carried by a blocking sender and by an async one alike."""

from __future__ import annotations

import asyncio

import pytest

from airflow_profsched.cluster.exchange import Command, Reply, arun, run
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError

SQUEUE, SACCT = Command(("squeue",)), Command(("sacct",))


def blocking(exchange, answers):
    return run(exchange, lambda request: answer(answers, request))


def awaited(exchange, answers):
    async def send(request):
        await asyncio.sleep(0)
        return answer(answers, request)

    return asyncio.run(arun(exchange, send))


def answer(answers, request):
    said = answers[request]
    if isinstance(said, Exception):
        raise said
    return Reply(0, said)


both = pytest.mark.parametrize("carry", [blocking, awaited])


def verb():
    """Ask the queue, and accounting where the queue does not answer."""
    try:
        reply = yield SQUEUE
    except ClusterUnavailableError:
        reply = yield SACCT
    return reply.out


def silent():
    """Answer without a question."""
    return "known"
    yield


@both
def test_the_reply_comes_back_into_the_conversation_and_its_result_out(carry):
    assert carry(verb(), {SQUEUE: "RUNNING"}) == "RUNNING"


@both
def test_a_conversation_may_need_no_request(carry):
    assert carry(silent(), {}) == "known"


@both
def test_an_answer_that_did_not_come_is_thrown_into_the_conversation_which_may_ask_elsewhere(carry):
    assert carry(verb(), {SQUEUE: LostReplyError("timeout"), SACCT: "COMPLETED"}) == "COMPLETED"


@both
def test_where_there_is_no_other_way_the_caller_learns_of_it(carry):
    with pytest.raises(ClusterUnavailableError, match="down"):
        carry(verb(), {SQUEUE: LostReplyError("timeout"), SACCT: ClusterUnavailableError("down")})


@both
def test_an_error_of_the_sender_itself_is_not_hidden_in_the_conversation(carry):
    with pytest.raises(KeyError):
        carry(verb(), {})


@both
def test_a_verb_may_be_made_of_verbs(carry):
    def both_of_them():
        first = yield from verb()
        second = yield from verb()
        return first + second

    assert carry(both_of_them(), {SQUEUE: "x"}) == "xx"
