"""The run that cells continue: what lies outside their cones is taken from it.

It is the baseline run, or a run under edits of its own, which all its cells then share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.outcome import Outcome, join_outcomes
from ..errors import ModelError
from ..models.lens import LensModel
from ..models.points import check_no_user_hooks
from ..models.running import prepare_passes
from .forward import Early
from .needs import Needs
from .passes import BaselineBatch, Passes
from .plan import Plan
from .threads import Lanes, lanes_of


class BaselineRun:
    """The run that cells continue, mostly the one without edits; each batch of prompts is computed when it is read."""

    def __init__(
        self,
        lens: LensModel,
        tokens: TokenBatch,
        *,
        plan: Plan,
        needs: Needs,
        edits: Sequence[Edit] = (),
        every: int = 1,
        keeps_all: bool = True,
        streams: Iterable[int] = (),
    ) -> None:
        """Prepare the run; nothing is computed before it is read. Refuses a bridge on which somebody's hook stands.

        The cells that continue the run share its ``edits`` and read no more than its ``needs``. With ``every`` = 3,
        each third sequence is run. Unless the run ``keeps_all`` batches of prompts, it keeps the last. The stream is
        kept before the layers ``streams``, so that cells that begin there share a forward with others.
        """
        check_no_user_hooks(lens)
        self.lens, self.tokens, self.plan, self.needs = lens, tokens, plan, needs
        self.edits, self.every, self.streams = tuple(edits), every, frozenset(streams)
        self.passes = Passes(lens=lens, needs=needs, n_sequences=tokens.n_sequences)
        self._keeps_all, self._batches = keeps_all, dict[int, BaselineBatch]()
        self._versions = lens.state.unchanged.versions()
        self._keeping: dict[tuple[tuple[str, ...], tuple[int, ...], bool], BaselineRun] = {}
        self._fewer: dict[tuple[int, int | None], BaselineRun] = {}

    @cached_property
    def lanes(self) -> Lanes:
        """The threads that run forwards side by side, each on its own copy of the model's modules."""
        return lanes_of(self.lens, count=self.plan.lanes)

    def check_same_weights(self) -> None:
        """Raise ModelError if weights were changed in place since the run was made, such as by another thread."""
        if self.lens.state.unchanged.versions() != self._versions:
            raise ModelError(
                f"the weights of {self.lens.name} were changed while cells were run, which would be of two models; "
                "need weights that stay as they are. Measure a copy of a model that is trained"
            )

    @property
    def prompt_batches(self) -> list[slice]:
        """The batches of prompts, each a slice of indices among all sequences."""
        n, step = self.tokens.n_sequences, self.plan.prompts * self.every
        every = None if self.every == 1 else self.every
        return [slice(start, min(start + step, n), every) for start in range(0, n, step)]

    @property
    def n_sequences(self) -> int:
        """The number of sequences that the run reads: all, or each third one if ``every`` is 3."""
        return len(range(0, self.tokens.n_sequences, self.every))

    def read_outcome(self, needs: Needs) -> Outcome:
        """Return the run's outcome over all its sequences, with the layers, sites and loss that ``needs`` lists."""
        self.run_side_by_side([self])
        return join_outcomes(
            [self.batch(prompts.start).narrow_to(needs).outcome for prompts in self.prompt_batches]
        )

    @cached_property
    def outcome(self) -> Outcome:
        """The run's outcome over all its sequences, without the tensors of sites."""
        return self.read_outcome(replace(self.needs, sites=()))

    def with_edits(
        self,
        edits: Sequence[Edit],
        *,
        needs: Needs | None = None,
        every: int | None = None,
        length: int | None = None,
    ) -> "BaselineRun":
        """Make a run under other ``edits``: ``needs``, read in each ``every``-th sequence; None is as in this run.

        With a ``length``, sequences are cut to it, and as many more cells share a forward as there is room for.
        """
        every = every or self.every
        tokens = self.tokens if length is None else self.tokens.cut(length)
        plan = self.plan
        if length is not None and plan.cut:
            room = plan.prompts * plan.pack * self.tokens.n_positions
            taken = min(plan.prompts, -(-tokens.n_sequences // every)) * tokens.n_positions
            plan = replace(plan, pack=max(plan.pack, room // taken))
        return BaselineRun(
            self.lens,
            tokens,
            plan=plan,
            edits=edits,
            needs=needs or self.needs,
            every=every,
        )

    def with_sites(
        self, sites: Sequence[str], *, layers: tuple[int, ...], loss: bool
    ) -> "BaselineRun":
        """Return this run if it keeps the tensors of ``sites``; else another, made once, of ``layers`` and ``loss``."""
        if set(sites) <= set(self.needs.sites):
            return self
        key = tuple(sites), layers, loss
        if key not in self._keeping:
            needs = replace(self.needs, sites=tuple(sites), layers=layers, loss=loss, whole=loss)
            self._keeping[key] = self.with_edits(self.edits, needs=needs)
        return self._keeping[key]

    def with_fewer_sequences(self, most: int, *, length: int | None = None) -> "BaselineRun":
        """Return the same run on at most ``most`` of its sequences, evenly spaced, cut to ``length``; made once each.

        It is this run if it has no more.
        """
        every = self.every * -(-self.n_sequences // most)
        length = None if length is None or length >= self.tokens.n_positions else length
        if (every, length) == (self.every, None):
            return self
        if (every, length) not in self._fewer:
            self._fewer[every, length] = self.with_edits(self.edits, every=every, length=length)
        return self._fewer[every, length]

    def batch(self, start: int) -> BaselineBatch:
        """Return the run on the batch of prompts that begins at ``start``: the one that is kept, or a new one."""
        if start not in self._batches:
            with prepare_passes(self.lens):
                self._run_batch(start, self.lens)
        return self._batches[start]

    def _run_batch(self, start: int, lens: LensModel) -> None:
        prompts = next(prompts for prompts in self.prompt_batches if prompts.start == start)
        part, passes = self.tokens[prompts], replace(self.passes, lens=lens)
        if self.plan.path == "bridge":
            ((outcome,), _) = passes.run_on_bridge(part, [self.edits], prompts=prompts)
            early = Early(outcome=outcome, columns={}, losses=None)
            found = BaselineBatch(part=part, prompts=prompts, early=early, keys={})
        else:
            found = passes.run_baseline(
                part, prompts=prompts, edits=self.edits, streams=self.streams
            )
        if not self._keeps_all:
            self._batches.clear()
        self._batches[start] = found

    @staticmethod
    def run_side_by_side(runs: Iterable["BaselineRun"]) -> None:
        """Run the batches that ``runs`` of one model keep and do not have yet, on the lanes of the first."""
        missing = [
            (run, prompts.start)
            for run in dict.fromkeys(runs)
            if run._keeps_all and run.plan.path == "blocks" and run.plan.lanes > 1
            for prompts in run.prompt_batches
            if prompts.start not in run._batches
        ]
        if len(missing) > 1:  # one alone has all cores
            lens, lanes = missing[0][0].lens, missing[0][0].lanes
            with prepare_passes(lens):
                lanes.map(lambda copy, one, stop: one[0]._run_batch(one[1], copy), missing)
