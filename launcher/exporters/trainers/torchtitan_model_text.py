"""The model in the module that the torchtitan export writes, as text: forward multipliers and initial values.

After the decision's numbers and before the run (torchtitan_text.py). Written against torchtitan's public classes;
nothing of theirs is copied.
"""

MODEL = '''

class MultEmbedding(Embedding):
    """A token embedding whose output is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.multiplier


class MultLinear(Linear):
    """A linear map whose input is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * self.multiplier)


class ScaledAttention(GQAttention):
    """Attention with its own scale of q . k."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        scale: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scaling = config.scale


<<ATTENTION>>class ScaledBlock(Llama3TransformerBlock):
    """A Llama 3 block whose branches are multiplied before they join the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, x: torch.Tensor, attention_masks: object, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), attention_masks, positions) * self.multiplier
        return x + self.feed_forward(self.ffn_norm(x)) * self.multiplier


class FrozenModel(Llama3Model):
    """Starts from the initial values of (seed, name), whatever the number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        with torch.no_grad():
            for fqn, parameter in self.named_parameters():
                parameter.copy_(initial_value(canonical_fqn(fqn), parameter))


def initial_value(fqn: str, parameter: torch.Tensor) -> torch.Tensor:
    """Ones for norm gains (std 0), else normal(0, init_std) drawn on the CPU from a seed of (SEED, name)."""
    init_std = next(group["init_std"] for group in GROUPS if re.search(group["pattern"], fqn))
    if init_std == 0:
        return torch.ones_like(parameter)
    name = fqn.replace(".qkv_linear.", ".")
    seed = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    full = (torch.randn(parameter.shape, generator=generator) * init_std).to(parameter.device)
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return full


def linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features)


def norm(width: int = WIDTH) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=NORM_EPS)


def block() -> ScaledBlock.Config:
    head_dim = WIDTH // NUM_HEADS
    return ScaledBlock.Config(
        multiplier=RESIDUAL_MULTIPLIER,
        attention_norm=norm(),
        attention=ScaledAttention.Config(
            n_heads=NUM_HEADS,
            n_kv_heads=NUM_KV_HEADS,
            dim=WIDTH,
            qkv_linear=QKVLinear.Config(
                head_dim=head_dim, wq=linear(WIDTH, WIDTH), wkv=linear(WIDTH, NUM_KV_HEADS * head_dim)
            ),
            wo=linear(WIDTH, WIDTH),
            qk_norm=norm(head_dim) if QK_NORM else None,
            inner_attention=<<INNER_ATTENTION>>,
            rope=CosSinRoPE.Config(dim=head_dim, <<ROPE_LENGTH>>=SEQ_LEN, theta=ROPE_BASE),
            scale=ATTENTION_SCALE,
        ),
        ffn_norm=norm(),
        feed_forward=FeedForward.Config(
            w1=linear(WIDTH, FFN_WIDTH), w2=linear(FFN_WIDTH, WIDTH), w3=linear(WIDTH, FFN_WIDTH)
        ),
    )


def model() -> FrozenModel.Config:
    return FrozenModel.Config(
        dim=WIDTH,
        vocab_size=VOCAB_SIZE,
        enable_weight_tying=TIED,
        tok_embeddings=MultEmbedding.Config(
            num_embeddings=VOCAB_SIZE, embedding_dim=WIDTH, multiplier=EMBEDDING_MULTIPLIER
        ),
        layers=[block() for _ in range(NUM_LAYERS)],
        norm=norm(),
        lm_head=MultLinear.Config(in_features=WIDTH, out_features=VOCAB_SIZE, multiplier=OUTPUT_MULTIPLIER),
    )
'''
