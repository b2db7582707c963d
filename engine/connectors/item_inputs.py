"""The inputs of an encoder for one item, as bytes and by the hash of their content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ...callers.errors import InputError
from ...mm.fields import BatchedField, Field, FieldElem, FlatField, SharedField
from ...mm.hashing import digest
from ...mm.types import MultiModalKwargsItem

_FIELDS: Mapping[str, type[Field]] = {kind.__name__: kind for kind in (BatchedField, FlatField, SharedField)}


@dataclass(frozen=True, eq=False)
class ItemInputs:
    """The inputs of an encoder for one item.

    Args:
        kwargs: its processed tensors.
        num_rows: encoder rows that it makes.
        tenant: digest of the request's cache_salt, so that tenants do not share rows.
    """

    modality: str
    kwargs: MultiModalKwargsItem
    num_rows: int
    tenant: str

    @cached_property
    def hash(self) -> str:
        """Hash of all of it. Equal hashes mean equal rows of the same encoder."""
        elems = {name: [type(elem.field).__name__, asdict(elem.field), elem.data] for name, elem in self.kwargs.items()}
        return digest("sensorium.inputs", self.modality, self.num_rows, self.tenant, elems)


def pack_inputs(item: ItemInputs) -> bytes:
    """Return the inputs as safetensors, with what is no tensor in the header."""
    from safetensors.torch import save

    tensors, others = dict[str, Tensor](), dict[str, Any]()
    for name, elem in item.kwargs.items():
        entry: dict[str, Any] = {"field": type(elem.field).__name__, **asdict(elem.field)}
        if isinstance(elem.data, Tensor):
            tensors[name] = elem.data.detach().cpu().contiguous()
        else:
            entry["value"] = elem.data
        others[name] = entry
    head = {"modality": item.modality, "num_rows": item.num_rows, "tenant": item.tenant, "elems": others}
    return save(tensors, {"item": json.dumps(head)})


def unpack_inputs(data: bytes) -> ItemInputs:
    """Return what `pack_inputs` packed.

    Raises:
        ValueError: the bytes are damaged or hold something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(data)
        length = int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["item"])
        kwargs = {name: _elem(dict(entry), tensors.get(name)) for name, entry in head["elems"].items()}
        item = ItemInputs(str(head["modality"]), kwargs, int(head["num_rows"]), str(head["tenant"]))
        if not tensors.keys() <= kwargs.keys() or not kwargs or not item.hash:
            raise ValueError("it has unknown tensors")
    except (SafetensorError, InputError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"the bytes are no inputs of an item ({type(error).__name__}: {error})") from None
    return item


def _elem(entry: dict[str, Any], tensor: Tensor | None) -> FieldElem:
    field = _FIELDS[entry.pop("field")]
    data = entry.pop("value") if tensor is None else tensor
    return FieldElem(data, field(**entry))
