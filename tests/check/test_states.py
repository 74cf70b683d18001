from workbench.bundle import Options
from workbench.check.states import callable_ts


def test_calls_are_short_as_long_as_they_may_be_and_of_every_function():
    assert callable_ts(Options(tokens="1-16")) == [1, 2, 3, 4, 15, 16]
    assert callable_ts(Options(tokens="1,8,64")) == [1, 2, 3, 4, 8, 63, 64]
