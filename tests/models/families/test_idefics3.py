"""DocTags, as SmolDocling and Granite-Docling-258M (checkpoints of Idefics3) write them, come back as elements."""

from pathlib import Path

import family
from parity import ROWS, make_llm
from sensorium import SamplingParams
from sensorium.engine.sampling_params import StructuredOutputsParams

PAGE = "<doctag><text><loc_50><loc_100><loc_150><loc_200>Total</text></doctag>"


def test_doctags_are_elements(tmp_path: Path) -> None:
    row = ROWS["idefics3"]
    llm = make_llm(row, family.save(row, tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=StructuredOutputsParams(choice=[PAGE]))
    (output,) = llm.generate(family.ask(row, "i", 0, [(100, 200)]).ours, params, use_tqdm=False)
    (total,) = output.elements
    assert (total.label, total.text, total.box) == ("text", "Total", (20, 20, 60, 40))
