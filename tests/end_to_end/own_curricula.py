"""A curriculum of a user: rows whose completions do badly rest for a while."""

from rl.stages.curriculum.interface import Bar, Curriculum, Histogram


class Resting(Curriculum):
    """Draws rows in their order. One whose mean reward was below `least` is left out next time."""

    def __init__(self, candidates, least):
        self._order = candidates.among()
        self._total = candidates.total
        self._least = least
        self._drawn = 0
        self._resting = set()
        self._waiting = False
        self._restored = False

    def next(self, count):
        assert self._restored
        assert not self._waiting, "the rewards of the rows before have not been observed"
        rows = []
        while len(rows) < count:
            (row,) = self._order.take([self._drawn])
            self._drawn += 1
            if row in self._resting:
                self._resting.remove(row)
            else:
                rows.append(row)
        self._waiting = True
        return rows

    def observe(self, rows, rewards_RG):
        self._waiting = False
        means = rewards_RG.mean(axis=1)
        self._resting |= {row for row, mean in zip(rows, means, strict=True) if mean < self._least}

    def state(self):
        return {"drawn": self._drawn, "resting": sorted(self._resting)}

    def restore(self, state):
        assert not self._restored, "called twice"
        self._restored = True
        self._drawn = state.get("drawn", 0)
        self._resting = set(state.get("resting", ()))

    def histogram(self):
        return Histogram("Rows <at> the start", [Bar("all", self._total, 0)])


def resting(candidates, least=0.5):
    return Resting(candidates, least)
