"""How long functions take for so many lanes: in a loop over them, and together."""

import math

from lanewise._control.runs.telling import Told

# To convert a function and to part its lanes for the first time takes about so many seconds, in which a loop may be
# done. So many are spent on loops before it is tried how long the lanes take together.
FREE, RENT = 3e-3, 1e-2
# A first run takes so many seconds more than later ones.
COLD = 2e-3
# So much longer than a loop lanes may take together and still do so in later calls.
CLOSE = 1.1
# After so many loops it is tried again how long the lanes take together; each time after twice as many.
LATER = 8
# Seconds of loops that are worth telling of, those of earlier calls together.
LONG = 0.1


# A loop whose time is known from some examples only may take so many times as long, or so much less.
_ROUGH = 1.5


class Pace:
    """How long about so many lanes of a function take.

    Attributes:
        each: Seconds that a loop takes for a lane, as far as is known.
        rough: Whether that is known from some lanes only.
        cold: Whether it is known from the first one only, which also warms caches. Once the lanes have run together,
            some more are timed, lest a loop be thought to take several times as long as it does.
        spent: Seconds spent on loops before the lanes have run together.
        known: Whether they have.
        tries: How many runs together in a row took longer than a loop.
        close: How many runs together in a row took about as long as a loop is thought to take.
        alone: Whether the next calls are loops.
        sure: Whether that is because a loop is quicker, not to find out.
        left: So many of them.
        later: So many the next time.
        told: Where the lanes part, for a warning.
        untold: Seconds spent on loops that nobody was told of.
    """

    __slots__ = (
        "each",
        "rough",
        "cold",
        "spent",
        "known",
        "tries",
        "close",
        "alone",
        "sure",
        "left",
        "later",
        "told",
        "untold",
    )

    def __init__(self) -> None:
        self.each = math.inf
        self.rough = True
        self.spent = 0.0
        self.cold = self.known = self.alone = self.sure = False
        self.tries = self.close = self.left = 0
        self.later = LATER
        self.told: Told | None = None
        self.untold = 0.0

    def free(self) -> float:
        """So many seconds a loop may take that is tried before the lanes run together."""
        return 0.0 if self.known else min(FREE, RENT - self.spent)

    def runs_alone(self) -> bool:
        """Whether the lanes of this call run in a loop, which is known to be quicker."""
        if self.alone:
            self.left -= 1
            self.alone = self.left >= 0
        return self.alone

    def note_loop(self, each: float, seconds: float, complete: bool, cold: bool = False) -> None:
        """A loop took so many seconds for each lane; it was completed, or has stopped on the way.

        `cold`: after the first one, where nothing was known before.
        """
        self.spent += seconds
        self.cold = cold and math.isinf(self.each)
        if complete or self.rough:
            self.each, self.rough = each, not complete
        else:  # something else may have taken the time
            self.each = min(each, _ROUGH * self.each)

    def note_together(self, lanes: int, seconds: float) -> bool:
        """So many lanes took so long together. Whether they do so in later calls, too."""
        self.known = True
        loop = self.each * lanes
        if seconds <= CLOSE * loop:
            self.tries = 0
            self.close = self.close + 1 if self.rough and _ROUGH * seconds > loop else 0
            if self.close > 1:  # the first time also warms caches
                self.alone, self.sure, self.left = True, False, 1
            return not self.close
        self.tries += 1
        if self.tries > 1:
            self.go_alone()
        return False

    def go_alone(self) -> None:
        """A loop is quicker."""
        self.known = self.alone = self.sure = True
        self.tries = self.close = 0
        self.left = self.later
        self.later *= 2
