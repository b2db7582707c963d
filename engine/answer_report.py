"""Writes the report of `explain` on one answer: its tokens, the seconds of its stages, and its drafted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..callers.repr_mixin import ReprMixin
from .outputs import RequestOutput
from .stats import DraftStats

_REASONS = {
    "off": "none: speculative_config has num_speculative_tokens=0",
    "window": "none: answers keep the keys of their last tokens only",
    "rows": "none: a row's bits may depend on the other rows of a step here",
}


@dataclass(frozen=True, repr=False)
class AnswerReport(ReprMixin):
    """How a request was answered. `print` shows a table.

    Args:
        prompt_tokens, cached_tokens: tokens of the prompt, and those of them that the prefix cache had.
        answer_tokens: tokens of all answers.
        timings: as in RequestOutput.
        drafts: what each proposer of drafted tokens achieved.
        no_drafts: as in EngineStats.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    timings: dict[str, float] = field(default_factory=dict)
    drafts: tuple[DraftStats, ...] = ()
    no_drafts: str = ""

    @property
    def saved_steps(self) -> int:
        """Steps that drafted tokens saved."""
        return sum(stats.num_accepted for stats in self.drafts)

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs as text."""
        return [
            ("prompt", f"{self.prompt_tokens} tokens, {self.cached_tokens} of them cached"),
            ("answer", f"{self.answer_tokens} tokens, {self.saved_steps} of them without a step of their own"),
            *((f"  {stage}", f"{seconds:.3f} s") for stage, seconds in self.timings.items()),
            *self._draft_rows(),
        ]

    def _draft_rows(self) -> Iterator[tuple[str, str]]:
        if not any(stats.num_drafts or stats.failed or stats.switched_off for stats in self.drafts):
            yield "drafts", _REASONS.get(self.no_drafts, "none")
        for stats in self.drafts:
            share = f" ({stats.num_accepted / stats.num_drafted:.0%})" if stats.num_drafted else ""
            notes = "; switched off, since it did not pay" * bool(stats.switched_off) + "; failed" * bool(stats.failed)
            counts = f"{stats.num_accepted} of {stats.num_drafted} tokens accepted{share} in {stats.num_drafts} drafts"
            yield f"drafts of {stats.proposer}", counts + notes
            for position, (drafted, accepted) in enumerate(zip(stats.drafted, stats.accepted, strict=True), start=1):
                yield f"  position {position}", f"{accepted} of {drafted}"

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {value}" for name, value in self.rows())


def report_answer(output: RequestOutput, no_drafts: str) -> AnswerReport:
    """Return the report of an output. `no_drafts`: of the engine that made it."""
    return AnswerReport(
        len(output.prompt_token_ids),
        output.num_cached_tokens,
        sum(len(answer.token_ids) for answer in output.outputs),
        dict(output.timings),
        output.drafts,
        no_drafts,
    )
