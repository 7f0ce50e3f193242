"""The settings of a model: its shape and its behaviour."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from xformer.config import Settings

# the settings of the convolutional network only, and those of every architecture
HILBERT_CNN = ("kmer", "letters")
COMMON = ("architecture", "vocab_size", "max_positions", "dropout", "head_dropout")
# settings that a run with init= may change
DROPOUT = ("dropout", "attention_dropout", "head_dropout", "dropout_form")
# settings that files of earlier versions do not have
NEWER = (
    *("rotary_base", "local_rotary_base", "rotary_precision", "window", "global_every"),
    *("first_norm", "embedding_norm", "gated", "bias", "zeroed_token", "pooling"),
)


class ModelConfig(Settings):
    """Shape and behaviour of a model."""

    architecture: Literal["transformer", "hilbert_cnn"] = "transformer"
    """An encoder of BERT's family, or the convolutional network for DNA (Yin et al. 2018). The
    latter predicts classes and scores. It uses only these keys: `kmer`, `letters`, `vocab_size`,
    `max_positions`, `head_dropout` and `dropout`."""
    kmer: int = Field(4, ge=1, le=6)
    """Number of letters in a word of hilbert_cnn, which has 4^kmer input channels."""
    letters: tuple[int, ...] = ()
    """Ids of the letters in the words of hilbert_cnn. Empty: the ids of A, C, G and T in the
    tokenizer. A word with any other letter is 0 in every input channel."""
    vocab_size: int = Field(0, ge=0, lt=2**31)
    """Pieces in the embedding table. 0 takes the size of the tokenizer's vocabulary."""
    layers: int = Field(12, ge=1, lt=2**12)
    """Number of transformer layers."""
    hidden: int = Field(768, ge=1, lt=2**24)
    """Width of the hidden states."""
    embedding: int = Field(0, ge=0, lt=2**24)
    """Width of the embeddings, which are projected to `hidden` (ALBERT). 0 takes `hidden`, without
    a projection."""
    heads: int = Field(12, ge=1, lt=2**24)
    """Attention heads in a layer; must divide `hidden`."""
    intermediate: int = Field(3072, ge=1, lt=2**24)
    """Inner width of the feed-forward network."""
    max_positions: int = Field(512, ge=1, lt=2**31)
    """Length of the longest row in tokens, special tokens included."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """Position vectors from a learned table, or sines and cosines (Vaswani et al. 2017, section
    3.5). rotary adds none, and rotates queries and keys by their positions (Su et al. 2021)."""
    rotary_base: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies in layers that attend to the whole row."""
    local_rotary_base: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies in layers with a window."""
    rotary_precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type to which the rotary frequencies are rounded (ESM-2, as it was published: float16)."""
    window: int = Field(0, ge=0, lt=2**30)
    """Tokens on each side that a token attends to in a layer with a window. 0: no layer has one."""
    global_every: int = Field(1, ge=1)
    """With 3, layers 0, 3, 6, ... attend to the whole row, and the others have a window
    (ModernBERT). With 1, no layer has a window."""
    first_position: int = Field(0, ge=0, lt=2**31)
    """Index in the position table of a row's first token (RoBERTa: 2)."""
    token_types: int = Field(2, ge=0, lt=2**31)
    """Number of segment embeddings: 2 for the two texts of a pair, 1 for all tokens (RoBERTa), 0
    for none (DistilBERT)."""
    shared_layers: bool = False
    """One set of weights for all layers (ALBERT)."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual sum (BERT), or before attention and MLP (pre-LN)."""
    first_norm: bool = True
    """LayerNorm before the attention of the first layer, if `norm` is pre (ModernBERT: false)."""
    embedding_norm: bool = True
    """LayerNorm after the embeddings (ESM-2: false)."""
    norm_form: Literal["variance", "deviation"] = "variance"
    """LayerNorm divides by the square root of the variance, or of the standard deviation (PLUS)."""
    layer_norm_eps: float = Field(1e-12, gt=0)
    """Epsilon of every LayerNorm."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward network and of the MLM head."""
    gated: bool = False
    """Gates in the feed-forward network (GeGLU, Shazeer 2020): its first matrix gives two vectors
    of width `intermediate`, and the first of them, activated, is multiplied by the second."""
    bias: bool = True
    """Biases in the layers, in every LayerNorm, in the pooler and before the decoder (ModernBERT:
    false). The decoder and the other heads always have one."""
    zeroed_token: int | None = Field(None, ge=0)
    """Id of a token whose embedding is replaced by zeros: the mask token of ESM-2. The other
    embeddings of a row are multiplied by 0.88 / (their share of the row's tokens). By default there
    is no such token."""
    pooling: Literal["first", "mean"] = "first"
    """What a head for classes, scores or multiple choice reads of a row, through the pooler: the
    last hidden state of its first token, or the mean over all its tokens."""
    pooler: Literal["tanh", "relu", "norm", "none"] = "tanh"
    """Activation of the pooler below a task head (DistilBERT: relu). norm: `activation`, then
    LayerNorm (ModernBERT). Without a pooler (none) heads read the pooled state itself (PLUS)."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on embeddings, and on the outputs of attention and MLP."""
    head_dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout before the heads for classes, scores, words and multiple choice (`dropout_form` has
    exceptions). By default it equals `dropout`."""
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on attention probabilities."""
    dropout_form: Literal["bert", "roberta", "albert", "distilbert", "modernbert", "esm"] = "bert"
    """Where dropout is applied: as in BERT, with these exceptions. roberta also applies it before
    the pooler of a head for classes or scores, and its rate before multiple choice is `dropout`.
    albert omits it on the output of the feed-forward network, and adds it before the sentence-pair
    head of pre-training. distilbert omits it on the output of attention, adds it before a span
    head, and its rate before the head for words is `dropout`. modernbert applies it inside the
    feed-forward network instead of after it, and uses `attention_dropout` on the output of
    attention. esm is as roberta, but omits it on embeddings, and the rate before heads is
    `dropout` by default."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of fresh weights."""

    @property
    def width(self) -> int:
        """Width of the embeddings, E."""
        return self.embedding or self.hidden

    @property
    def before_head(self) -> float:
        """The value of `head_dropout`, or `dropout` if it is not set."""
        return self.dropout if self.head_dropout is None else self.head_dropout

    def has_window(self, layer: int) -> bool:
        """Whether the attention of this layer, numbered from 0, has a window."""
        return layer % self.global_every > 0

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
                    f"model.{name} cannot be set with model.architecture={self.architecture}; "
                    "leave it out"
                )
        return self

    @model_validator(mode="after")
    def _fields_fit(self) -> ModelConfig:
        size, rest = divmod(self.hidden, self.heads)
        if rest:
            raise ValueError(
                f"model.hidden={self.hidden} is not a multiple of model.heads={self.heads}"
            )
        if self.positions == "rotary" and size % 2:
            raise ValueError(
                f"model.positions=rotary needs heads of even size; model.hidden={self.hidden} and "
                f"model.heads={self.heads} make them {size}"
            )
        if (self.window > 0) != (self.global_every > 1):
            raise ValueError(
                f"model.window={self.window} does not fit model.global_every={self.global_every}: "
                "give a window and how often a layer has none, or neither"
            )
        if not self.first_norm and (self.norm == "post" or self.shared_layers):
            raise ValueError(
                "model.first_norm=false needs model.norm=pre and layers with weights of their own"
            )
        return self
