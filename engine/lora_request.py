"""`LoRARequest`: the adapter of a request, as vLLM's scripts write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that is loaded on first use.

    Args:
        lora_name: name under which it is loaded. If this name is loaded from the same folder, that adapter is used.
        lora_int_id: has no effect.
        lora_path: its folder in the layout of peft.
        load_inplace: read the folder again.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
