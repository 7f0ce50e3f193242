"""The tensor names of each family: ours on the left, those of Hugging Face (or PLUS) on the right.

`{}` stands for the number of the layer, `*` for weight and bias. Import reads the tables from right
to left, export from left to right. If three of their tensors make one of ours, they are
concatenated in order: query, key, value. In a model with heads, the names of the encoder's tensors
have a prefix such as "bert."; the tables leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from xformer.tasks.task import Task

Table = dict[str, list[str]]


@dataclass(frozen=True)
class Family:
    """One architecture: the names of its tensors by part, and the keys of its config.json."""

    name: str  # `model_type` in config.json
    prefix: str  # of the encoder's tensors in a model with heads
    encoder: Table
    pooler: Table
    mlm: Table
    classify: Table
    tied: dict[str, str]  # {copy: original}: tied tensors; we store only the original
    config: dict[str, str]  # {our setting: their key}
    form: str = ""  # `dropout_form` of its models: itself, or the family whose architecture it has
    model: str = ""  # the beginning of its class names, such as "Bert" in BertModel
    pair_classes: tuple[str, str] = ("", "")  # of pair head and MLM head, of a pair head alone
    pair: Table = field(default_factory=dict)
    span: Table = field(default_factory=lambda: {"task_head.*": ["qa_outputs.*"]})
    tag: Table = field(default_factory=lambda: {"task_head.*": ["classifier.*"]})
    choice: Table = field(default_factory=lambda: {"task_head.*": ["classifier.*"]})
    mlm_activation: str | None = None  # of the MLM head, if it does not follow the config
    contact: Table = field(default_factory=dict)
    buffer: str = ""  # the name of its rotary frequencies, if it stores them
    fixed: dict[str, Any] = field(default_factory=dict)  # our settings that all its models share
    free: tuple[str, ...] = ()  # our settings that xformer.convert.modern reads and writes
    required: dict[str, Any] = field(default_factory=dict)  # the only values of their settings
    defaults: dict[str, Any] = field(default_factory=dict)  # of settings that a config may omit

    def head(self, task: Task | type[Task] | None) -> Table:
        """The names of the tensors of a task's own head."""
        if task is None:
            return {}
        table: Table = getattr(self, task.hf_table)
        return table

    def class_of(self, task: Task | None, pairs: bool) -> str:
        """The class of transformers for a model with this task's head and, with `pairs`, a pair
        head."""
        if pairs and (task is None or task.predicts_masked):
            with_mlm, without_mlm = self.pair_classes
            return without_mlm if task is None else with_mlm
        return f"{self.model}For{task.hf_class}" if task else f"{self.model}Model"


_EMBEDDINGS = {
    "encoder.embeddings.word.weight": ["embeddings.word_embeddings.weight"],
    "encoder.embeddings.position.weight": ["embeddings.position_embeddings.weight"],
    "encoder.embeddings.norm.*": ["embeddings.LayerNorm.*"],
}
_SEGMENT = {"encoder.embeddings.segment.weight": ["embeddings.token_type_embeddings.weight"]}
_CONFIG = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "head_dropout": "classifier_dropout",
    "initializer_range": "initializer_range",
}
_BERT_LAYERS = {
    "encoder.layers.{}.attention.qkv.*": [
        "encoder.layer.{}.attention.self.query.*",
        "encoder.layer.{}.attention.self.key.*",
        "encoder.layer.{}.attention.self.value.*",
    ],
    "encoder.layers.{}.attention.out.*": ["encoder.layer.{}.attention.output.dense.*"],
    "encoder.layers.{}.attention_norm.*": ["encoder.layer.{}.attention.output.LayerNorm.*"],
    "encoder.layers.{}.mlp.up.*": ["encoder.layer.{}.intermediate.dense.*"],
    "encoder.layers.{}.mlp.down.*": ["encoder.layer.{}.output.dense.*"],
    "encoder.layers.{}.mlp_norm.*": ["encoder.layer.{}.output.LayerNorm.*"],
}
_DEFAULTS = {
    "token_types": 2,
    "layer_norm_eps": 1e-12,
    "activation": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "head_dropout": None,
    "initializer_range": 0.02,
}

BERT = Family(
    name="bert",
    prefix="bert.",
    encoder=_EMBEDDINGS | _SEGMENT | _BERT_LAYERS,
    pooler={"pooler.*": ["pooler.dense.*"]},
    mlm={
        "mlm_head.dense.*": ["cls.predictions.transform.dense.*"],
        "mlm_head.norm.*": ["cls.predictions.transform.LayerNorm.*"],
        "mlm_head.bias": ["cls.predictions.bias"],
    },
    pair={"pair_head.*": ["cls.seq_relationship.*"]},
    classify={"task_head.*": ["classifier.*"]},
    tied={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    config=_CONFIG,
    form="bert",
    model="Bert",
    pair_classes=("BertForPreTraining", "BertForNextSentencePrediction"),
    defaults=_DEFAULTS,
)
ROBERTA = Family(
    name="roberta",
    prefix="roberta.",
    encoder=_EMBEDDINGS | _SEGMENT | _BERT_LAYERS,
    pooler={"pooler.*": ["pooler.dense.*"]},
    mlm={
        "mlm_head.dense.*": ["lm_head.dense.*"],
        "mlm_head.norm.*": ["lm_head.layer_norm.*"],
        "mlm_head.bias": ["lm_head.bias"],
    },
    classify={"pooler.*": ["classifier.dense.*"], "task_head.*": ["classifier.out_proj.*"]},
    tied={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    config=_CONFIG,
    form="roberta",
    model="Roberta",
    mlm_activation="gelu",
    defaults=_DEFAULTS,
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", model="XLMRoberta")
CAMEMBERT = replace(ROBERTA, name="camembert", model="Camembert")
ALBERT = Family(
    name="albert",
    prefix="albert.",
    encoder=_EMBEDDINGS
    | _SEGMENT
    | {
        "encoder.embeddings.projection.*": ["encoder.embedding_hidden_mapping_in.*"],
        **{
            ours: [f"encoder.albert_layer_groups.0.albert_layers.{{}}.{name}" for name in theirs]
            for ours, theirs in {
                "encoder.layers.{}.attention.qkv.*": [
                    "attention.query.*",
                    "attention.key.*",
                    "attention.value.*",
                ],
                "encoder.layers.{}.attention.out.*": ["attention.dense.*"],
                "encoder.layers.{}.attention_norm.*": ["attention.LayerNorm.*"],
                "encoder.layers.{}.mlp.up.*": ["ffn.*"],
                "encoder.layers.{}.mlp.down.*": ["ffn_output.*"],
                "encoder.layers.{}.mlp_norm.*": ["full_layer_layer_norm.*"],
            }.items()
        },
    },
    pooler={"pooler.*": ["pooler.*"]},
    mlm={
        "mlm_head.dense.*": ["predictions.dense.*"],
        "mlm_head.norm.*": ["predictions.LayerNorm.*"],
        "mlm_head.bias": ["predictions.bias"],
    },
    pair={"pair_head.*": ["sop_classifier.classifier.*"]},
    classify={"task_head.*": ["classifier.*"]},
    tied={
        "predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    config=_CONFIG | {"embedding": "embedding_size", "head_dropout": "classifier_dropout_prob"},
    form="albert",
    model="Albert",
    pair_classes=("AlbertForPreTraining", "AlbertForPreTraining"),
    fixed={"shared_layers": True},
    defaults=_DEFAULTS
    | {
        "activation": "gelu_new",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "head_dropout": 0.1,
        "embedding": 128,
    },
)
DISTILBERT = Family(
    name="distilbert",
    prefix="distilbert.",
    encoder=_EMBEDDINGS
    | {
        "encoder.layers.{}.attention.qkv.*": [
            "transformer.layer.{}.attention.q_lin.*",
            "transformer.layer.{}.attention.k_lin.*",
            "transformer.layer.{}.attention.v_lin.*",
        ],
        "encoder.layers.{}.attention.out.*": ["transformer.layer.{}.attention.out_lin.*"],
        "encoder.layers.{}.attention_norm.*": ["transformer.layer.{}.sa_layer_norm.*"],
        "encoder.layers.{}.mlp.up.*": ["transformer.layer.{}.ffn.lin1.*"],
        "encoder.layers.{}.mlp.down.*": ["transformer.layer.{}.ffn.lin2.*"],
        "encoder.layers.{}.mlp_norm.*": ["transformer.layer.{}.output_layer_norm.*"],
    },
    pooler={},
    mlm={
        "mlm_head.dense.*": ["vocab_transform.*"],
        "mlm_head.norm.*": ["vocab_layer_norm.*"],
        "mlm_head.bias": ["vocab_projector.bias"],
    },
    classify={"pooler.*": ["pre_classifier.*"], "task_head.*": ["classifier.*"]},
    choice={"pooler.*": ["pre_classifier.*"], "task_head.*": ["classifier.*"]},
    tied={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    config={
        "vocab_size": "vocab_size",
        "layers": "n_layers",
        "hidden": "dim",
        "heads": "n_heads",
        "intermediate": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "activation": "activation",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "head_dropout": "seq_classif_dropout",
        "initializer_range": "initializer_range",
    },
    form="distilbert",
    model="DistilBert",
    fixed={"token_types": 0, "layer_norm_eps": 1e-12, "pooler": "relu"},
    defaults={
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "head_dropout": 0.2,
        "initializer_range": 0.02,
    },
)

# not a family of Hugging Face: the public code of Min et al. 2019
PLUS = Family(
    name="PLUS-TFM",
    prefix="",
    encoder={
        "encoder.embeddings.word.weight": ["embed.tok_embed.weight"],
        "encoder.embeddings.position.weight": ["embed.pos_embed.weight"],
        "encoder.embeddings.segment.weight": ["embed.seg_embed.weight"],
        "encoder.embeddings.norm.*": ["embed.norm.*"],
        "encoder.layers.{}.attention.qkv.*": [
            "blocks.{}.attn.proj_q.*",
            "blocks.{}.attn.proj_k.*",
            "blocks.{}.attn.proj_v.*",
        ],
        "encoder.layers.{}.attention.out.*": ["blocks.{}.proj.*"],
        "encoder.layers.{}.attention_norm.*": ["blocks.{}.norm1.*"],
        "encoder.layers.{}.mlp.up.*": ["blocks.{}.pwff.fc1.*"],
        "encoder.layers.{}.mlp.down.*": ["blocks.{}.pwff.fc2.*"],
        "encoder.layers.{}.mlp_norm.*": ["blocks.{}.norm2.*"],
    },
    pooler={},
    mlm={
        "mlm_head.dense.*": ["fc_lm.*"],
        "mlm_head.norm.*": ["norm_lm.*"],
        "mlm_head.bias": ["decoder_bias"],
    },
    pair={"pair_head.*": ["cls.*"]},
    classify={"task_head.*": ["cls.*"]},
    tied={"decoder.weight": "embed.tok_embed.weight"},
    config={},
)

_MODERN_HEAD = {
    "pooler.*": ["head.dense.*"],
    "pooler.norm.*": ["head.norm.*"],
    "task_head.*": ["classifier.*"],
}
MODERNBERT = Family(
    name="modernbert",
    prefix="model.",
    encoder={
        "encoder.embeddings.word.weight": ["embeddings.tok_embeddings.weight"],
        "encoder.embeddings.norm.*": ["embeddings.norm.*"],
        "encoder.layers.{}.attention_norm.*": ["layers.{}.attn_norm.*"],  # not in the first layer
        "encoder.layers.{}.attention.qkv.*": ["layers.{}.attn.Wqkv.*"],
        "encoder.layers.{}.attention.out.*": ["layers.{}.attn.Wo.*"],
        "encoder.layers.{}.mlp_norm.*": ["layers.{}.mlp_norm.*"],
        "encoder.layers.{}.mlp.up.*": ["layers.{}.mlp.Wi.*"],
        "encoder.layers.{}.mlp.down.*": ["layers.{}.mlp.Wo.*"],
        "encoder.final_norm.*": ["final_norm.*"],
    },
    pooler={},
    mlm={
        "mlm_head.dense.*": ["head.dense.*"],
        "mlm_head.norm.*": ["head.norm.*"],
        "mlm_head.bias": ["decoder.bias"],
    },
    classify=_MODERN_HEAD,
    span=_MODERN_HEAD,
    tag=_MODERN_HEAD,
    choice=_MODERN_HEAD,
    tied={"decoder.weight": "embeddings.tok_embeddings.weight"},
    config={
        "vocab_size": "vocab_size",
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "layer_norm_eps": "norm_eps",
        "activation": "hidden_activation",
        "dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
        "head_dropout": "classifier_dropout",
        "initializer_range": "initializer_range",
    },
    form="modernbert",
    model="ModernBert",
    fixed={
        "token_types": 0,
        "positions": "rotary",
        "norm": "pre",
        "first_norm": False,
        "gated": True,
        "bias": False,
        "pooler": "norm",
    },
    free=("rotary_base", "local_rotary_base", "window", "global_every", "pooling"),
    required={
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    defaults={
        "layer_norm_eps": 1e-5,
        "activation": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "head_dropout": 0.0,
        "initializer_range": 0.02,
        "max_positions": 8192,
    },
)
ESM = Family(
    name="esm",  # ESM-2 (Lin et al. 2023)
    prefix="esm.",
    encoder={
        **_BERT_LAYERS,
        "encoder.embeddings.word.weight": ["embeddings.word_embeddings.weight"],
        "encoder.layers.{}.attention_norm.*": ["encoder.layer.{}.attention.LayerNorm.*"],
        "encoder.layers.{}.mlp_norm.*": ["encoder.layer.{}.LayerNorm.*"],
        "encoder.final_norm.*": ["encoder.emb_layer_norm_after.*"],
    },
    pooler={"pooler.*": ["pooler.dense.*"]},
    mlm=ROBERTA.mlm,
    classify=ROBERTA.classify,
    contact={"contact_head.*": ["contact_head.regression.*"]},
    tied={"lm_head.decoder.weight": "embeddings.word_embeddings.weight"},
    config={
        ours: theirs
        for ours, theirs in _CONFIG.items()
        if ours not in ("token_types", "head_dropout")
    },
    form="esm",
    model="Esm",
    buffer="rotary_embeddings.inv_freq",
    fixed={
        "token_types": 0,
        "positions": "rotary",
        "norm": "pre",
        "embedding_norm": False,
        "activation": "gelu",
    },
    free=("rotary_base", "rotary_precision", "zeroed_token"),
    required={"hidden_act": "gelu", "emb_layer_norm_before": False, "is_folding_model": False},
    defaults={
        "layer_norm_eps": 1e-12,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
        "max_positions": 1026,
    },
)

FAMILIES = {
    family.name: family
    for family in (
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        CAMEMBERT,
        ALBERT,
        DISTILBERT,
        MODERNBERT,
        ESM,
    )
}


def expand(table: Table, layers: int) -> Table:
    """The table with `{}` and `*` expanded: one entry for each weight of each layer."""
    full = {}
    for ours, theirs in table.items():
        kinds = ("weight", "bias") if "*" in ours else ("",)
        numbers = range(layers) if "{}" in ours else range(1)
        for kind in kinds:
            for layer in numbers:
                name = ours.replace("*", kind).format(layer)
                full[name] = [their.replace("*", kind).format(layer) for their in theirs]
    return full
