"""Tiny configurations of transformers' models: built by name, with random weights."""

import dataclasses
from functools import partial
from typing import Any

from zoo.cases import Case, Problem, random_images, random_tokens

# Given to every configuration that has such a field of the same type.
TINY: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=16,
    embedding_size=16,
    d_model=16,
    n_embd=16,
    dim=16,
    num_hidden_layers=2,
    num_layers=2,
    n_layer=2,
    n_layers=2,
    encoder_layers=1,
    decoder_layers=1,
    num_decoder_layers=1,
    num_attention_heads=2,
    n_head=2,
    n_heads=2,
    num_heads=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    d_kv=8,
    d_ff=24,
    d_inner=24,
    intermediate_size=24,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    ffn_dim=24,
    hidden_dim=24,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    n_positions=64,
    image_size=32,
    patch_size=8,
    num_labels=3,
    initializer_range=0.2,  # of 16 numbers, the usual 0.02 leaves little but the input's constant part
    init_std=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)

# One head per model type. CANINE and MRA are left out: their own forward passes do not run in float64.
MODEL_TYPES = {
    "MaskedLM": """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm
        eurobert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer megatron-bert mobilebert
        modernbert mpnet nomic_bert nystromformer rembert roberta roberta-prelayernorm roc_bert roformer
        squeezebert tapas ultrabert xlm-roberta xlm-roberta-xl yoso""",
    "CausalLM": """
        afmoe apertus arcee aria_text bailing_hybrid beam bert-generation biogpt bitnet bloom cohere cohere2
        cohere2_moe cpmant ctrl cwm deepseek_v4 doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
        falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe
        glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite granite_swa
        granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
        hyperclovax inkling_text jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 llama llama4_text mamba
        mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
        modernbert-decoder moshi mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
        openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
        qwen3_next qwen4_exp_text recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr
        vaultgemma whisper xglm xlnet xlstm""",
    "Seq2SeqLM": """
        bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
        pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 switch_transformers t5 umt5""",
    "SequenceClassification": "markuplm mistral4",
    "ImageClassification": """
        beit cvt data2vec-vision dinov2 dinov2_with_registers focalnet hgnet_v2 ijepa mobilenet_v1
        mobilenet_v2 mobilevit poolformer pp_lcnet pvt pvt_v2 regnet resnet segformer swiftformer textnet vit
        vit_msn""",
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "cpmant": dict(dim_head=8, dim_ff=24),
    "ctrl": dict(dff=24),
    "cvt": dict(embed_dim=[8, 16, 16], num_heads=[1, 1, 2], depth=[1, 2, 3]),
    "falcon_h1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8),
    "focalnet": dict(embed_dim=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
    "fsmt": dict(src_vocab_size=32, tgt_vocab_size=32),
    "funnel": dict(block_sizes=[1, 1], block_repeats=[1, 1], d_head=8),
    "kimi_linear": dict(linear_head_dim=8, linear_num_heads=2),
    "led": dict(attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    "longformer": dict(attention_window=4),
    "mobilenet_v1": dict(depth_multiplier=0.25),
    "mobilenet_v2": dict(depth_multiplier=0.25),
    "poolformer": dict(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    "pvt": dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]),
    "pvt_v2": dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]),
    "regnet": dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    "resnet": dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "roc_bert": dict(pronunciation_vocab_size=32, shape_vocab_size=32),
    "segformer": dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]),
}
CREATES_FLOAT64 = {"fsmt", "xglm"}  # write the least float64 into a mask of the default type


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """Return the configuration of a model type with everything small that has a name known here."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    tiny = {
        name: value
        for name, value in TINY.items()
        if name == "num_labels" or (name in defaults and not isinstance(defaults[name], list | tuple))
    }
    return kind(**{**tiny, **overrides})


def build_model(head: str, model_type: str) -> Problem:
    """Return a tiny model with this head, and inputs for it."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = tiny_config(model_type, **OVERRIDES.get(model_type, {}))
    if head in ("CausalLM", "Seq2SeqLM"):
        config.use_cache = False
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    return Problem(model, _inputs(head))


def _inputs(head: str) -> dict[str, Any]:
    if head == "ImageClassification":
        return {"pixel_values": random_images(32)}
    tokens = random_tokens()
    more = {"decoder_input_ids": tokens.flip(1)} if head == "Seq2SeqLM" else {}
    return {"input_ids": tokens, **more}


def transformers_cases() -> list[Case]:
    """Return one case per model type."""
    return [
        Case(
            "transformers",
            model_type,
            head,
            partial(build_model, head, model_type),
            creates_float64=model_type in CREATES_FLOAT64,
        )
        for head, model_types in MODEL_TYPES.items()
        for model_type in model_types.split()
    ]
