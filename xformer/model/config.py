"""What a model is: its shape and its behaviour."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from xformer.config import Settings

# the settings that a transformer has no use for, and those that every architecture has
HILBERT_CNN = ("kmer", "letters")
COMMON = ("architecture", "vocab_size", "max_positions", "dropout", "head_dropout")


class ModelConfig(Settings):
    """Shape and behaviour of a model."""

    architecture: Literal["transformer", "hilbert_cnn"] = "transformer"
    """An encoder of BERT's family, or the convolutional network for DNA (Yin et al. 2018); the
    latter predicts classes and scores, and has of these keys only `kmer`, `letters`, `vocab_size`,
    `max_positions`, `head_dropout` and `dropout`."""
    kmer: int = Field(4, ge=1, le=6)
    """Letters that hilbert_cnn reads as one word; 4^kmer channels."""
    letters: tuple[int, ...] = ()
    """Ids of the letters that hilbert_cnn's words are made of; empty takes the tokenizer's A, C, G
    and T. A word with any other letter is all zero."""
    vocab_size: int = Field(0, ge=0, lt=2**31)
    """Pieces in the embedding table; 0 takes the tokenizer's."""
    layers: int = Field(12, ge=1)
    """Number of transformer layers."""
    hidden: int = Field(768, ge=1, lt=2**24)
    """Width of the hidden states."""
    embedding: int = Field(0, ge=0, lt=2**24)
    """Width of the embeddings, projected to `hidden` (ALBERT); 0 takes `hidden`, unprojected."""
    heads: int = Field(12, ge=1, lt=2**24)
    """Attention heads a layer; must divide `hidden`."""
    intermediate: int = Field(3072, ge=1, lt=2**24)
    """Inner width of the feed-forward part."""
    max_positions: int = Field(512, ge=1, lt=2**31)
    """Longest row in tokens, special ones included."""
    positions: Literal["learned", "sinusoidal"] = "learned"
    """A table of position vectors, or sines and cosines (Vaswani et al. 2017, section 3.5)."""
    first_position: int = Field(0, ge=0, lt=2**31)
    """Row of the position table that a row's first token takes (RoBERTa: 2)."""
    token_types: int = Field(2, ge=0, lt=2**31)
    """Segment embeddings: 2 tells the texts of a pair apart, 1 is the same for all (RoBERTa), 0
    has none (DistilBERT)."""
    shared_layers: bool = False
    """One set of weights for all layers (ALBERT)."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual sum (BERT) or before each part (pre-LN)."""
    norm_form: Literal["variance", "deviation"] = "variance"
    """LayerNorm divides by the square root of the variance, or of the deviation (PLUS)."""
    layer_norm_eps: float = Field(1e-12, gt=0)
    """Epsilon of every LayerNorm."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward part and of the MLM head."""
    pooler: Literal["tanh", "relu", "none"] = "tanh"
    """Activation of the pooler, under a task head (DistilBERT: relu); none: heads see the first
    token as it is (PLUS)."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on embeddings and on the output of each part."""
    head_dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout before a head of classes or scores; absent: `dropout`."""
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on attention probabilities."""
    dropout_form: Literal["bert", "roberta", "albert", "distilbert"] = "bert"
    """Where dropout falls. All families drop where BERT does, with these exceptions. RoBERTa also
    drops before the pooler of a head. ALBERT does not drop the output of the feed-forward part,
    but drops before a head of pairs. DistilBERT does not drop the output of attention, and uses
    `dropout` before heads of spans and words."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of fresh weights."""

    @property
    def width(self) -> int:
        """Width of the embeddings, E."""
        return self.embedding or self.hidden

    @property
    def before_head(self) -> float:
        """Dropout before a head of classes or scores."""
        return self.dropout if self.head_dropout is None else self.head_dropout

    @property
    def stored_layers(self) -> int:
        """Layers that have weights of their own."""
        return 1 if self.shared_layers else self.layers

    @model_validator(mode="after")
    def _one_architecture(self) -> ModelConfig:
        cnn = self.architecture == "hilbert_cnn"
        for name, field in type(self).model_fields.items():
            known = name in COMMON or (name in HILBERT_CNN) == cnn
            if not known and getattr(self, name) != field.default:
                raise ValueError(
                    f"model.{name} has no meaning with model.architecture={self.architecture}"
                )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden % self.heads:
            raise ValueError(
                f"model.hidden={self.hidden} is no multiple of model.heads={self.heads}"
            )
        return self
