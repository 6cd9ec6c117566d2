"""That code asks for values of lanes, and what it is told where there are no lanes, none of which could have given it.

Where lanes part, converted code asks no lane, so a function that asks is run like that first. Where that cannot be, any
answer is right, but not with any does the function return: a check of values that no lane has may find them invalid and
raise. Then the function is run again, and the last question is answered otherwise.
"""

from typing import Any

from lanewise._core.parting.lanes import Disagreement, with_around

# Runs of one function. Each check that must pass costs one.
_MOST_RUNS = 64
# Questions of one run after which answers change, in no period, so that loops end that wait for something to hold.
_MANY = 5000


class Answers:
    """The answers of one call of a function: zero to all questions, until it raises.

    Attributes:
        given: The answers of this run, and those to give; True for one.
        asked: How many questions this run has asked.
        errors: What earlier runs raised.
        asks: Whether a run has asked something.
        parting: Whether the function has been run as one whose lanes part.
    """

    __slots__ = ("given", "asked", "errors", "asks", "parting")

    def __init__(self) -> None:
        self.given: list[bool] = []
        self.asked = 0
        self.errors: list[Exception] = []
        self.asks = self.parting = False

    def next(self) -> bool:
        """The answer to one more question."""
        self.asked += 1
        if self.asked > _MANY:
            return self.asked.bit_count() % 2 == 0
        if self.asked > len(self.given):
            self.given.append(False)
        return self.given[self.asked - 1]

    def change(self, error: Exception) -> None:
        """Answer otherwise after `error`; raises the first error where other answers did not help."""
        self.errors.append(error)
        del self.given[self.asked :]
        while self.given and self.given[-1]:
            self.given.pop()
        if not self.given or len(self.errors) == _MOST_RUNS:
            raise self.errors[0]
        self.given[-1] = True
        self.asked = 0


def note_question(level: Any) -> None:
    """Code asks for what may differ from lane to lane of a level: numbers it returns are those of each lane then.

    Where pairs of lanes run, with those of a `vmap` around, it counts for both.
    """
    for each in with_around(level):
        each.asked = True


def answer(level: Any) -> bool:
    """What code is told that asks a level without lanes.

    Raises:
        Disagreement: The function has not been run as one whose lanes part.
    """
    answers = level.answers
    if answers is None:
        return False
    answers.asks = True
    if not answers.parting and level.restartable:
        raise Disagreement(level)
    return answers.next()
