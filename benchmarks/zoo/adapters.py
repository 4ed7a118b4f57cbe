"""peft's adapters on a tiny Llama: the adapter's parameters alone are differentiated."""

import dataclasses
import warnings
from functools import partial
from typing import Any

from zoo.cases import Case, Problem
from zoo.hugging_face import build_model

MODULES = ["q_proj", "v_proj", "down_proj"]
# AdaMSS is left out: it does not run in float64.
# Options beside a rank of 4, the modules above and 3 virtual tokens, where a configuration has them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "LORA": {},
    "LORA, DoRA": dict(use_dora=True),
    "ADALORA": dict(total_step=10, init_r=4, r=8),
    "ADAPTION_PROMPT": dict(adapter_len=3, adapter_layers=2, target_modules=None),
    "BEFT": {},
    "BOFT": dict(boft_block_size=4),
    "C3A": dict(block_size=8),
    "CARTRIDGE": {},
    "CPT": {},
    "DEFT": {},
    "DELORA": {},
    "FOURIERFT": dict(n_frequency=16),
    "FROD": {},
    "GLORA": {},
    "GRALORA": {},
    "HIRA": {},
    "HRA": {},
    "IA3": dict(feedforward_modules=["down_proj"]),
    "LILY": {},
    "LN_TUNING": dict(target_modules=None),
    "LOHA": {},
    "LOKR": {},
    "MISS": {},
    "OFT": dict(r=0, oft_block_size=4),
    "OSF": {},
    "PEANUT": {},
    "PREFIX_TUNING": {},
    "PROMPT_TUNING": {},
    "PSOFT": {},
    "PVERA": {},
    "P_TUNING": {},
    "RANDLORA": {},
    "ROAD": dict(group_size=8),
    "SHIRA": {},
    "SUPERTUNING": {},
    "TINYLORA": {},
    "TRAINABLE_TOKENS": dict(target_modules=["embed_tokens"], token_indices=[4, 8, 9, 20]),
    "UNILORA": {},
    "VBLORA": dict(vector_length=8, num_vectors=16, topk=2),
    "VERA": {},
    "WAVEFT": dict(n_frequency=16),
}


def peft_cases() -> list[Case]:
    """Return one case per kind of adapter."""
    return [Case("peft", name, "Llama", partial(build_adapted, name)) for name in ADAPTERS]


def build_adapted(name: str) -> Problem:
    """Return the tiny Llama with this adapter, its own parameters frozen."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name.split(",")[0])]
    usual = dict(task_type="CAUSAL_LM", target_modules=MODULES, r=4, rank=4, num_virtual_tokens=3)
    fields = {field.name for field in dataclasses.fields(kind)}
    options = {**{k: v for k, v in usual.items() if k in fields}, **ADAPTERS[name]}
    model, inputs = build_model("CausalLM", "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Problem(peft.get_peft_model(model, kind(**options)), inputs)
