"""A list of transformers' architectures, each a few thousand parameters from a configuration alone.

An entry says how to build the model, what records look like, and what the outcome of full training is: gradients by the
capture, one record at a time, or refused with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

RECORDS, TOKENS, VOCABULARY, CLASSES, PIXELS = 3, 6, 30, 3, 16
Batch = tuple[Tensor, ...]

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
_TEXT = {**_SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_QUIET = dict.fromkeys(
    (
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "classifier_dropout_prob",
        "dropout",
        "dropout_prob",
        "dropout_rate",
        "drop_path_rate",
        "embd_pdrop",
        "embedding_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "layerdrop",
        "encoder_layerdrop",
        "decoder_layerdrop",
        "feat_proj_dropout",
        "final_dropout",
        "head_dropout",
        "positional_dropout",
        "path_dropout",
        "ff_dropout",
        "resid_pdrop",
        "summary_first_dropout",
        "summary_last_dropout",
        "classif_dropout",
        "seq_classif_dropout",
        "residual_dropout",
        "ffn_dropout",
        "attn_dropout_rate",
        "drop_rate",
        "stochastic_depth_prob",
    ),
    0.0,
)


def _text() -> Batch:
    ids = torch.randint(3, VOCABULARY, (RECORDS, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    return ids, mask


def _classes() -> Tensor:
    return torch.randint(0, CLASSES, (RECORDS,), generator=torch.Generator().manual_seed(1))


def _floats(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(2))


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)


def next_token(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return _token_losses(model(input_ids=ids, attention_mask=mask).logits[:, -ids.shape[1] : -1], ids[:, 1:])


def next_token_unmasked(model: nn.Module, ids: Tensor) -> Tensor:
    return _token_losses(model(input_ids=ids).logits[:, :-1], ids[:, 1:])


def same_token(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return _token_losses(model(input_ids=ids, attention_mask=mask).logits, ids)


def translation(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return _token_losses(
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits[:, -ids.shape[1] :], ids
    )


def text_class(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, y, reduction="none")


def image_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=x).logits, y, reduction="none")


def input_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs=x).logits, y, reduction="none")


def sound_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input_values=x).logits, y, reduction="none")


def speech(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return _token_losses(model(input_features=x, decoder_input_ids=ids).logits, ids)


def forecast(model: nn.Module, past: Tensor, future: Tensor) -> Tensor:
    return (model(past_values=past).prediction_outputs - future).square().mean((1, 2))


def pixel_class(model: nn.Module, x: Tensor) -> Tensor:
    return model(pixel_values=x).logits.square().flatten(1).mean(1)


def pooled(model: nn.Module, x: Tensor) -> Tensor:
    return model(pixel_values=x).last_hidden_state.square().flatten(1).mean(1)


def contrast(model: nn.Module, ids: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask, pixel_values=x).logits_per_text
    return F.cross_entropy(logits, torch.arange(len(ids)), reduction="none")


def caption(model: nn.Module, ids: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    return _token_losses(model(input_ids=ids, attention_mask=mask, pixel_values=x).logits[:, -TOKENS:], ids)


def _sentence() -> Batch:
    return (*_text(), _classes())


def _picture() -> Batch:
    return _floats(3, PIXELS, PIXELS), _classes()


# kind of records: (loss, batch, options of every configuration)
_KINDS: Mapping[str, tuple[Callable[..., Tensor], Callable[[], Batch], Mapping[str, Any]]] = {
    "causal": (next_token, _text, _TEXT),
    "causal, no mask": (next_token_unmasked, lambda: _text()[:1], _TEXT),
    "masked": (same_token, _text, _TEXT),
    "class": (text_class, _sentence, {**_TEXT, "num_labels": CLASSES}),
    "translation": (translation, _text, {**_TEXT, "decoder_start_token_id": 2}),
    "image": (
        image_class,
        _picture,
        {**_SIZES, "image_size": PIXELS, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES},
    ),
    "video": (
        image_class,
        lambda: (_floats(2, 3, PIXELS, PIXELS), _classes()),
        {**_SIZES, "image_size": PIXELS, "patch_size": 8, "num_frames": 2, "tubelet_size": 2, "num_labels": CLASSES},
    ),
    "input image": (input_class, _picture, {"num_labels": CLASSES}),
    "input text": (input_class, lambda: (_text()[0], _classes()), {"num_labels": CLASSES}),
    "sound": (sound_class, lambda: (_floats(400), _classes()), {**_SIZES, "num_labels": CLASSES}),
    "spectrum": (sound_class, lambda: (_floats(16, 8), _classes()), {**_SIZES, "num_labels": CLASSES}),
    "speech": (speech, lambda: (_floats(8, 16), _text()[0]), {**_TEXT, "decoder_start_token_id": 2}),
    "series": (forecast, lambda: (_floats(16, 2), _floats(4, 2)), {}),
    "features": (pooled, lambda: (_floats(3, PIXELS, PIXELS),), {**_SIZES, "image_size": PIXELS, "patch_size": 4}),
    "pixels": (pixel_class, lambda: (_floats(3, PIXELS, PIXELS),), {**_SIZES, "image_size": PIXELS}),
    "pair": (contrast, lambda: (*_text(), _floats(3, PIXELS, PIXELS)), {}),
    "caption": (caption, lambda: (*_text(), _floats(3, PIXELS, PIXELS)), {**_TEXT}),
}


@dataclass(frozen=True)
class Architecture:
    """One entry: the model's class in transformers, the kind of its records, options of its configuration."""

    model: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model with the same weights every time, in training mode."""
        _, _, common = _KINDS[self.kind]
        kind = getattr(transformers, self.model)
        options = {**_QUIET, **common, **self.options}
        config = kind.config_class(**{name: value for name, value in options.items() if value is not ...})
        torch.manual_seed(0)
        return kind(config).train()

    @property
    def losses(self) -> Callable[..., Tensor]:
        """``losses(model, *batch)``, one value per record."""
        return _KINDS[self.kind][0]

    @property
    def batch(self) -> Batch:
        """The records."""
        return _KINDS[self.kind][1]()


_HEADS = {"num_key_value_heads": 1}
_EXPERTS = {**_HEADS, "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_MAMBA = {"state_size": 4, "conv_kernel": 2, "expand": 2, "time_step_rank": 2}
_DEEPSEEK = {
    **_HEADS,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
_SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
_STAGES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 2}
_STAGES |= {"num_attention_heads": ..., "num_hidden_layers": ...}
_CONV = {"hidden_sizes": [8, 12], "depths": [1, 1], "embedding_size": 8, "num_stages": 2}
_SOUND = {
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}
_SERIES = {
    "context_length": 16,
    "prediction_length": 4,
    "num_input_channels": 2,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 12,
    "num_layers": 1,
}
_PERCEIVER = {"num_latents": 4, "d_latents": 8, "d_model": 8, "num_blocks": 1, "num_self_attends_per_block": 1}
_PERCEIVER |= {"num_self_attention_heads": 2, "num_cross_attention_heads": 1, "vocab_size": VOCABULARY}
_TOWERS = {
    "text_config": {**_TEXT, "projection_dim": 8},
    "vision_config": {**_SIZES, "image_size": PIXELS, "patch_size": 8, "projection_dim": 8},
    "projection_dim": 8,
}

ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "GPT": Architecture("OpenAIGPTLMHeadModel", "causal"),
    "GPT-2": Architecture("GPT2LMHeadModel", "causal"),
    "GPT-Neo": Architecture(
        "GPTNeoForCausalLM", "causal", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2}
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", "causal"),
    "GPT-J": Architecture("GPTJForCausalLM", "causal", {"rotary_dim": 4}),
    "GPTBigCode": Architecture("GPTBigCodeForCausalLM", "causal"),
    "CodeGen": Architecture("CodeGenForCausalLM", "causal", {"rotary_dim": 4, "num_attention_heads": 4}),
    "OPT": Architecture("OPTForCausalLM", "causal", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "BLOOM": Architecture("BloomForCausalLM", "causal"),
    "Falcon": Architecture("FalconForCausalLM", "causal"),
    "MPT": Architecture("MptForCausalLM", "causal", {"d_model": 16, "n_heads": 2, "n_layers": 2}),
    "Llama": Architecture("LlamaForCausalLM", "causal", _HEADS),
    "Mistral": Architecture("MistralForCausalLM", "causal", _HEADS),
    "Mixtral": Architecture("MixtralForCausalLM", "causal", _EXPERTS),
    "Qwen2": Architecture("Qwen2ForCausalLM", "causal", _HEADS),
    "Qwen2-MoE": Architecture("Qwen2MoeForCausalLM", "causal", {**_EXPERTS, "shared_expert_intermediate_size": 12}),
    "Qwen3": Architecture("Qwen3ForCausalLM", "causal", {**_HEADS, "head_dim": 8}),
    "Qwen3-MoE": Architecture("Qwen3MoeForCausalLM", "causal", {**_EXPERTS, "head_dim": 8}),
    "OLMo": Architecture("OlmoForCausalLM", "causal", _HEADS),
    "OLMo2": Architecture("Olmo2ForCausalLM", "causal", _HEADS),
    "OLMoE": Architecture("OlmoeForCausalLM", "causal", _EXPERTS),
    "GPT-OSS": Architecture("GptOssForCausalLM", "causal", {**_EXPERTS, "head_dim": 8}),
    "DeepSeek-V2": Architecture("DeepseekV2ForCausalLM", "causal", _DEEPSEEK),
    "DeepSeek-V3": Architecture("DeepseekV3ForCausalLM", "causal", _DEEPSEEK),
    "Jamba": Architecture(
        "JambaForCausalLM",
        "causal",
        {
            **_EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
        },
    ),
    "Mamba": Architecture("MambaForCausalLM", "causal, no mask", _MAMBA),
    "Mamba-2": Architecture(
        "Mamba2ForCausalLM",
        "causal, no mask",
        {**_MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "FalconMamba": Architecture("FalconMambaForCausalLM", "causal, no mask", _MAMBA),
    "Bamba": Architecture(
        "BambaForCausalLM",
        "causal",
        {
            **_HEADS,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 4,
        },
    ),
    "RWKV": Architecture("RwkvForCausalLM", "causal, no mask", {"attention_hidden_size": 16, "context_length": 16}),
    "RecurrentGemma": Architecture(
        "RecurrentGemmaForCausalLM",
        "causal",
        {**_HEADS, "lru_width": 16, "block_types": ["recurrent", "attention"], "head_dim": 8},
    ),
    "Gemma": Architecture("GemmaForCausalLM", "causal", {**_HEADS, "head_dim": 8}),
    "Gemma2": Architecture("Gemma2ForCausalLM", "causal", {**_HEADS, "head_dim": 8}),
    "Gemma3": Architecture("Gemma3ForCausalLM", "causal", {**_HEADS, "head_dim": 8}),
    "Phi": Architecture("PhiForCausalLM", "causal", {"num_key_value_heads": 2}),
    "Phi-3": Architecture("Phi3ForCausalLM", "causal", _HEADS),
    "Phi-MoE": Architecture("PhimoeForCausalLM", "causal", _EXPERTS),
    "StableLM": Architecture("StableLmForCausalLM", "causal", {"num_key_value_heads": 2}),
    "StarCoder2": Architecture("Starcoder2ForCausalLM", "causal", _HEADS),
    "Persimmon": Architecture("PersimmonForCausalLM", "causal"),
    "Cohere": Architecture("CohereForCausalLM", "causal", _HEADS),
    "Granite": Architecture("GraniteForCausalLM", "causal", _HEADS),
    "GraniteMoE": Architecture("GraniteMoeForCausalLM", "causal", _EXPERTS),
    "GLM": Architecture("GlmForCausalLM", "causal", {**_HEADS, "head_dim": 8}),
    "Nemotron": Architecture("NemotronForCausalLM", "causal", _HEADS),
    "SmolLM3": Architecture("SmolLM3ForCausalLM", "causal", _HEADS),
    "Helium": Architecture("HeliumForCausalLM", "causal", {**_HEADS, "head_dim": 8}),
    "DBRX": Architecture(
        "DbrxForCausalLM",
        "causal",
        {
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 32,
            "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 3, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
        },
    ),
    "XGLM": Architecture(
        "XGLMForCausalLM", "causal", {"d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2}
    ),
    "BioGPT": Architecture("BioGptForCausalLM", "causal"),
    "CTRL": Architecture("CTRLLMHeadModel", "causal", {"dff": 24}),
    "XLNet": Architecture(
        "XLNetLMHeadModel",
        "masked",
        {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "max_position_embeddings": ...},
    ),
    # encoders
    "BERT": Architecture("BertForSequenceClassification", "class"),
    "BERT, masked": Architecture("BertForMaskedLM", "masked"),
    "RoBERTa": Architecture("RobertaForSequenceClassification", "class"),
    "XLM-RoBERTa": Architecture("XLMRobertaForSequenceClassification", "class"),
    "CamemBERT": Architecture("CamembertForSequenceClassification", "class"),
    "DistilBERT": Architecture("DistilBertForSequenceClassification", "class"),
    "ALBERT": Architecture("AlbertForSequenceClassification", "class", {"embedding_size": 8}),
    "ELECTRA": Architecture("ElectraForSequenceClassification", "class", {"embedding_size": 8}),
    "DeBERTa": Architecture(
        "DebertaForSequenceClassification", "class", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    ),
    "DeBERTa-v2": Architecture(
        "DebertaV2ForSequenceClassification",
        "class",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    "Longformer": Architecture("LongformerForSequenceClassification", "class", {"attention_window": 4}),
    "BigBird": Architecture(
        "BigBirdForSequenceClassification",
        "class",
        {"block_size": 2, "num_random_blocks": 1, "attention_type": "original_full"},
    ),
    "ConvBERT": Architecture(
        "ConvBertForSequenceClassification", "class", {"embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 1}
    ),
    "SqueezeBERT": Architecture(
        "SqueezeBertForSequenceClassification",
        "class",
        {
            "embedding_size": 16,
            "q_groups": 1,
            "k_groups": 1,
            "v_groups": 1,
            "post_attention_groups": 1,
            "intermediate_groups": 1,
            "output_groups": 1,
        },
    ),
    "MPNet": Architecture("MPNetForSequenceClassification", "class"),
    "Funnel": Architecture(
        "FunnelForSequenceClassification",
        "class",
        {"num_hidden_layers": ..., "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
    ),
    "RoFormer": Architecture("RoFormerForSequenceClassification", "class", {"embedding_size": 16}),
    "Nystromformer": Architecture(
        "NystromformerForSequenceClassification", "class", {"num_landmarks": 6, "segment_means_seq_len": 6}
    ),
    "FNet": Architecture("FNetForSequenceClassification", "class"),
    "I-BERT": Architecture("IBertForSequenceClassification", "class"),
    "MobileBERT": Architecture(
        "MobileBertForSequenceClassification",
        "class",
        {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    ),
    "LayoutLM": Architecture("LayoutLMForSequenceClassification", "class"),
    "RemBERT": Architecture(
        "RemBertForSequenceClassification", "class", {"input_embedding_size": 8, "output_embedding_size": 8}
    ),
    "ModernBERT": Architecture(
        "ModernBertForSequenceClassification",
        "class",
        {"global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "Megatron-BERT": Architecture("MegatronBertForSequenceClassification", "class"),
    "ESM": Architecture("EsmForSequenceClassification", "class", {"mask_token_id": 3}),
    "CANINE": Architecture(
        "CanineForSequenceClassification",
        "class",
        {"num_hash_buckets": 8, "local_transformer_stride": 2, "downsampling_rate": 2, "upsampling_kernel_size": 2},
    ),
    # encoders and decoders
    "T5": Architecture("T5ForConditionalGeneration", "translation", _T5),
    "mT5": Architecture("MT5ForConditionalGeneration", "translation", _T5),
    "UMT5": Architecture("UMT5ForConditionalGeneration", "translation", _T5),
    "LongT5": Architecture("LongT5ForConditionalGeneration", "translation", {**_T5, "local_radius": 2}),
    "Switch": Architecture(
        "SwitchTransformersForConditionalGeneration",
        "translation",
        {
            **_T5,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 64,
            "router_jitter_noise": 0.0,
        },
    ),
    "BART": Architecture("BartForConditionalGeneration", "translation", _SEQ2SEQ),
    "mBART": Architecture("MBartForConditionalGeneration", "translation", _SEQ2SEQ),
    "Pegasus": Architecture("PegasusForConditionalGeneration", "translation", _SEQ2SEQ),
    "Marian": Architecture("MarianMTModel", "translation", _SEQ2SEQ),
    "Blenderbot": Architecture("BlenderbotForConditionalGeneration", "translation", _SEQ2SEQ),
    "M2M-100": Architecture("M2M100ForConditionalGeneration", "translation", _SEQ2SEQ),
    "LED": Architecture(
        "LEDForConditionalGeneration",
        "translation",
        {
            **_SEQ2SEQ,
            "attention_window": 4,
            "max_encoder_position_embeddings": 32,
            "max_decoder_position_embeddings": 32,
        },
    ),
    "ProphetNet": Architecture(
        "ProphetNetForConditionalGeneration",
        "translation",
        {
            "num_hidden_layers": ...,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "ngram": 2,
        },
    ),
    # images and video
    "ViT": Architecture("ViTForImageClassification", "image"),
    "DeiT": Architecture("DeiTForImageClassification", "image"),
    "BEiT": Architecture("BeitForImageClassification", "image", {"use_relative_position_bias": True}),
    "Swin": Architecture("SwinForImageClassification", "image", _STAGES),
    "Swin v2": Architecture("Swinv2ForImageClassification", "image", _STAGES),
    "ConvNeXt": Architecture("ConvNextForImageClassification", "image", {**_CONV, "patch_size": 4}),
    "ConvNeXt v2": Architecture("ConvNextV2ForImageClassification", "image", {**_CONV, "patch_size": 4}),
    "DINOv2": Architecture("Dinov2ForImageClassification", "image"),
    "PoolFormer": Architecture(
        "PoolFormerForImageClassification",
        "image",
        {
            "hidden_sizes": [8, 12],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
        },
    ),
    "SegFormer": Architecture(
        "SegformerForImageClassification",
        "image",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "PVT": Architecture(
        "PvtForImageClassification",
        "image",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "sequence_reduction_ratios": [2, 1],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "FocalNet": Architecture(
        "FocalNetForImageClassification",
        "image",
        {
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "patch_size": 4,
        },
    ),
    "Hiera": Architecture(
        "HieraForImageClassification",
        "image",
        {
            "embed_dim": 8,
            "image_size": [PIXELS, PIXELS],
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "masked_unit_size": [2, 2],
            "num_query_pool": 1,
            "patch_stride": [4, 4],
            "patch_size": ...,
            "num_attention_heads": ...,
            "num_hidden_layers": ...,
        },
    ),
    "VideoMAE": Architecture("VideoMAEForVideoClassification", "video"),
    "TimeSformer": Architecture("TimesformerForVideoClassification", "video", {"drop_path_rate": 0}),
    "ViViT": Architecture("VivitForVideoClassification", "video", {"tubelet_size": [2, 8, 8]}),
    "Perceiver, text": Architecture(
        "PerceiverForSequenceClassification", "input text", {**_PERCEIVER, "max_position_embeddings": 16}
    ),
    "Perceiver, images": Architecture(
        "PerceiverForImageClassificationLearned", "input image", {**_PERCEIVER, "image_size": PIXELS}
    ),
    "CLIP, images": Architecture(
        "CLIPForImageClassification", "image", {"vision_config": {**_SIZES, "image_size": PIXELS, "patch_size": 8}}
    ),
    "SigLIP, images": Architecture(
        "SiglipForImageClassification", "image", {"vision_config": {**_SIZES, "image_size": PIXELS, "patch_size": 8}}
    ),
    "ResNet": Architecture("ResNetForImageClassification", "image", _CONV),
    "MobileNet v1": Architecture("MobileNetV1ForImageClassification", "image"),
    "MobileNet v2": Architecture("MobileNetV2ForImageClassification", "image"),
    # sound and series
    "Wav2Vec2": Architecture("Wav2Vec2ForSequenceClassification", "sound", _SOUND),
    "HuBERT": Architecture("HubertForSequenceClassification", "sound", _SOUND),
    "WavLM": Architecture("WavLMForSequenceClassification", "sound", _SOUND),
    "AST": Architecture(
        "ASTForAudioClassification",
        "spectrum",
        {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8},
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "speech",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
    ),
    "PatchTST": Architecture("PatchTSTForPrediction", "series", {**_SERIES, "loss": "mse", "norm_type": "layernorm"}),
    "PatchTSMixer": Architecture(
        "PatchTSMixerForPrediction", "series", {**_SERIES, "loss": "mse", "norm_mlp": "LayerNorm"}
    ),
    # pairs
    "CLIP": Architecture("CLIPModel", "pair", _TOWERS),
    "SigLIP": Architecture("SiglipModel", "pair", _TOWERS),
}

ONE_BY_ONE = frozenset(
    (
        "OPT",
        "Mixtral",
        "Qwen2-MoE",
        "Qwen3-MoE",
        "OLMoE",
        "GPT-OSS",
        "DeepSeek-V2",
        "DeepSeek-V3",
        "Jamba",
        "Mamba",
        "FalconMamba",
        "Bamba",
        "RecurrentGemma",
        "Phi-MoE",
        "GraniteMoE",
        "DBRX",
        "XLNet",
        "DeBERTa",
        "DeBERTa-v2",
        "Longformer",
        "Funnel",
        "Switch",
        "BART",
        "mBART",
        "Blenderbot",
        "LED",
        "ProphetNet",
        "Swin",
        "Swin v2",
        "TimeSformer",
        "Perceiver, text",
        "WavLM",
        "PatchTST",
    )
)
"""What a capture refuses, or refused when the list was made: `fit` takes their records one at a time by itself."""

REFUSED: dict[str, str] = {
    "I-BERT": "stores ranges of activations in buffers",
    "ResNet": "batch normalization",
    "MobileNet v1": "batch normalization",
    "MobileNet v2": "batch normalization",
    "CLIP": "a loss that compares the records of a batch",
    "SigLIP": "a loss that compares the records of a batch",
}
"""What can't be private as it is, with the reason."""

REASONS: dict[str, str] = {
    "stores ranges of activations in buffers": "must not change in a training forward pass",
    "batch normalization": "BatchNorm2d",
    "a loss that compares the records of a batch": "compares the records of a batch",
}
"""What a refusal says for each reason."""
