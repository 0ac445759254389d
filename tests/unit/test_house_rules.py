from __future__ import annotations

from tools.house_rules import Source, measure


def broken(text, name="airflow_profsched/x.py"):
    return "\n".join(measure([Source(name, text)])[1])


def test_this_would_pass():
    assert broken("def f():\n    return 1\n") == ""


def test_a_long_function():
    assert "61 lines (allowed: 60)" in broken("def f():\n" + "    x = 1\n" * 61)


def test_comments_blanks_and_docstrings_are_no_code():
    assert broken('def f():\n    """' + "x\n" * 70 + '"""\n' + "    # y\n\n" * 40 + "    return 1\n") == ""


def test_half_of_all_functions():
    assert "half of all functions are longer than 11 lines" in broken("def f():\n" + "    x = 1\n" * 11)


def test_one_in_twenty():
    text = "".join(f"def f{number}():\n    return 1\n" for number in range(30))
    assert "one function in twenty" in broken(
        text + "".join(f"def g{number}():\n" + "    x = 1\n" * 45 for number in range(3))
    )


def test_a_long_file():
    assert "501 lines (allowed: 500)" in broken("x = 1\n" * 501)


def test_broad_handlers():
    for head in ("except Exception:", "except:", "except BaseException:"):
        assert "`except Exception`" in broken(f"try:\n    pass\n{head}\n    pass\n")
    assert broken("try:\n    pass\nexcept BaseException:\n    raise\n") == ""
    assert broken("try:\n    pass\nexcept Exception:\n    pass\n", "airflow_profsched/cluster/poller.py") == ""


def test_an_operator_with_too_many_arguments():
    arguments = ", ".join(f"a{number}" for number in range(17))
    assert "17 own arguments (allowed: 16)" in broken(
        f"class AnOperator:\n    def __init__(self, *, {arguments}):\n        pass\n"
    )
