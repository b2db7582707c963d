"""Beam search: the likeliest answers of a fixed number of candidates per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.sampling_params import SamplingParams
from ..engine.types import Logprob, RequestOutput
from ..mm.errors import InputError, hints_at_arguments, short_repr
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

_MAX_PENALTY = 10  # powers of a length remain finite


@hints_at_arguments
@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Args:
        beam_width: number of candidates that are kept per step, and of answers.
        max_tokens: maximum number of tokens of an answer.
        ignore_eos: continue after EOS.
        temperature: as in SamplingParams.
        length_penalty: an answer's score is its log probability divided by its number of tokens to this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} must be an integer, 1 or above", param=name)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= _MAX_PENALTY:
            reason = f"length_penalty={short_repr(penalty)} must be a number, at most {_MAX_PENALTY} from 0"
            raise InputError(reason, param="length_penalty")


@dataclass
class BeamSearchSequence:
    """One answer. `tokens` and `text` begin with the prompt, as in vLLM."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """The answers to one prompt, the best first."""

    sequences: list[BeamSearchSequence]


class _Search:
    """The beams of one prompt."""

    def __init__(self, prompt: object, output: RequestOutput, params: BeamSearchParams, eos: Sequence[int]) -> None:
        media = {key: value for key, value in prompt.items() if key != "prompt"} if isinstance(prompt, Mapping) else {}
        self._media, self._params, self._eos = media, params, eos
        self.beams = [BeamSearchSequence(list(output.prompt_token_ids))]
        self.finished: list[BeamSearchSequence] = []
        self.advance([output])

    def prompts(self) -> list[dict[str, Any]]:
        return [{**self._media, "prompt_token_ids": beam.tokens} for beam in self.beams]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend each beam by the likeliest next tokens, and keep the best."""
        candidates: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            if output.error is not None:
                raise InputError(output.error.message, code=output.error.code, param=output.error.param)
            (logprobs,) = output.outputs[0].logprobs or [{}]
            for token, entry in logprobs.items():
                total = beam.cum_logprob + entry.logprob
                longer = BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, logprobs], total)
                ends = token in self._eos and not self._params.ignore_eos
                longer.finish_reason = "stop" if ends else None
                (self.finished if ends else candidates).append(longer)
        self.beams = self._best(candidates)

    def result(self, llm: LLM) -> BeamSearchOutput:
        for beam in self.beams:
            beam.finish_reason = "length"
        best = self._best(self.finished + self.beams)
        for sequence in best:
            sequence.text = llm.get_tokenizer().decode(sequence.tokens)
        return BeamSearchOutput(best)

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(one: BeamSearchSequence) -> float:
            length = len(one.tokens) - (one.finish_reason == "stop")
            return one.cum_logprob / float(length**self._params.length_penalty)

        return sorted(sequences, key=score, reverse=True)[: self._params.beam_width]


def beam_search(llm: LLM, prompts: Sequence[object], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Return the best answers to each prompt. Every step is a batch of all beams, which share cached prefixes.

    Raises:
        InputError: a prompt cannot be served, or twice the beam width is above `max_logprobs`.
    """
    check_type("params", params, BeamSearchParams)
    one_token = SamplingParams(max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature, ignore_eos=True)
    first = llm.generate(prompts, one_token, use_tqdm=False)
    searches = [_Search(prompt, output, params, llm.eos_token_ids) for prompt, output in zip(prompts, first, strict=True)]
    for _ in range(params.max_tokens - 1):
        beam_prompts = [prompt for search in searches for prompt in search.prompts()]
        if not beam_prompts or max(len(prompt["prompt_token_ids"]) for prompt in beam_prompts) >= llm.max_model_len:
            break
        outputs = iter(llm.generate(beam_prompts, one_token, use_tqdm=False))
        for search in searches:
            search.advance([next(outputs) for _ in search.beams])
    return [search.result(llm) for search in searches]
