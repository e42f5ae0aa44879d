"""The demo's decoder: every cut of it computes the same, from what its pools hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from l3client.demo.decoder import (
    GroupedAttention,
    LatentAttention,
    LatentConfig,
    ModelConfig,
    Rotation,
    Weights,
    causal_attention,
    cut_for,
    random_tokens,
)
from l3client.demo.deployment import Deployment, Rank
from l3store.layout.shape import Range

PAGE = 16
PAGES = 14
CHUNK = 48
# Tokens of the prompt: neither a multiple of the page nor of the chunk.
PROMPT = 150
ONE_STAGE = (Range(0, 6),)
CUTS = {
    "tp2": (2, ONE_STAGE),
    "tp4-pp2": (4, (Range(0, 3), Range(3, 6))),
    "tp8": (8, ONE_STAGE),
    "tp16-replicated": (16, ONE_STAGE),
    "uneven-pp3": (1, (Range(0, 1), Range(1, 4), Range(4, 6))),
    "tp2-uneven-pp2": (2, (Range(0, 4), Range(4, 6))),
}
GQA = ModelConfig(layers=6, d_model=64, q_heads=16, kv_heads=8, head_dim=8, d_ff=128, vocab=300)
MLA = ModelConfig(
    layers=6, d_model=64, q_heads=16, head_dim=8, d_ff=128, vocab=300, latent=LatentConfig(kv_lora_rank=24, rope_dim=8)
)
MODELS = {"gqa": Weights.generate(GQA), "mla": Weights.generate(MLA)}
TOKENS = random_tokens(GQA, PROMPT, seed=5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they gain, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(MODELS))
def weights(request: pytest.FixtureRequest) -> Weights:
    return MODELS[request.param]


def deploy(weights: Weights, tp: int = 1, stages: Sequence[Range] = ONE_STAGE, chunk: int = CHUNK) -> Deployment:
    return Deployment(weights, tp=tp, stages=stages, num_pages=PAGES, page_size=PAGE, chunk=chunk)


def pages(seed: int) -> list[int]:
    """Pages for the prompt and some 50 tokens more, in no order."""
    return [int(page) for page in torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))[:13]]


def slots(page_ids: Sequence[int], count: int) -> Tensor:
    return torch.tensor([page_ids[at // PAGE] * PAGE + at % PAGE for at in range(count)])


def paired(source: Rank, target: Rank) -> list[tuple[Tensor, Tensor]]:
    """What ``target`` holds, as (the source's tensor cut to it, its own); the source holds the whole model."""
    pairs = []
    for whole, own in zip(source.pool, target.pool, strict=True):
        for layer, store in zip(target.layers, own, strict=True):
            held = whole[layer]
            pairs.append((held if target.heads is None else held[:, target.heads.start : target.heads.end], store))
    return pairs


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("cut", list(CUTS))
def test_a_cut_gives_the_logits_and_the_kv_of_the_whole_model(weights: Weights, cut: str) -> None:
    whole = deploy(weights)
    expected = whole.forward(TOKENS, start=0, page_ids=pages(1), every_position=True)
    assert 1.0 < float(expected.std()) < 10.0
    tp, stages = CUTS[cut]
    other = deploy(weights, tp, stages)
    assert [(rank.stage, rank.tp_rank, rank.layers) for rank in other.ranks] == [
        (stage, tp_rank, layers) for stage, layers in enumerate(stages) for tp_rank in range(tp)
    ]
    logits = other.forward(TOKENS, start=0, page_ids=pages(2), every_position=True)
    assert difference(logits, expected) < 1e-4
    here, there = slots(pages(1), PROMPT), slots(pages(2), PROMPT)
    for rank in other.ranks:
        for held, own in paired(whole.ranks[0], rank):
            assert difference(own[there], held[here]) < 1e-4


@pytest.mark.parametrize("cut", list(CUTS))
def test_kv_copied_from_another_cut_gives_the_same_next_tokens(weights: Weights, cut: str) -> None:
    source = deploy(weights)
    expected = source.greedy(TOKENS, 8, page_ids=pages(1))
    tp, stages = CUTS[cut]
    target = deploy(weights, tp, stages)
    cached = PROMPT // PAGE * PAGE
    here, there = slots(pages(1), cached), slots(pages(3), cached)
    for rank in target.ranks:
        for held, own in paired(source.ranks[0], rank):
            own[there] = held[here]
    found = target.greedy(TOKENS, 8, page_ids=pages(3), cached=cached)
    assert found.tokens == expected.tokens
    assert difference(found.logits, expected.logits) < 1e-4


def test_ranks_that_hold_the_same_heads_hold_the_same_bytes() -> None:
    replicated = deploy(MODELS["gqa"], 16)
    assert [rank.heads for rank in replicated.ranks] == [Range(r // 2, r // 2 + 1) for r in range(16)]
    replicated.forward(TOKENS, start=0, page_ids=pages(1))
    latent = deploy(MODELS["mla"], 4)
    assert all(rank.heads is None for rank in latent.ranks)
    latent.forward(TOKENS, start=0, page_ids=pages(1))
    at = slots(pages(1), PROMPT)
    for a, b in [(replicated.ranks[6], replicated.ranks[7]), (latent.ranks[0], latent.ranks[3])]:
        for mine, other in zip(a.pool, b.pool, strict=True):
            assert all(torch.equal(x[at], y[at]) for x, y in zip(mine, other, strict=True))


def test_pools_have_the_shapes_of_their_kind() -> None:
    rank = deploy(MODELS["gqa"], 4, (Range(0, 4), Range(4, 6))).ranks[-1]
    assert rank.heads == Range(6, 8)
    assert [tuple(t.shape) for t in (*rank.k, *rank.v)] == [(PAGES * PAGE, 2, 8)] * 4
    assert rank.latent == ()
    row = deploy(MODELS["mla"], 4, (Range(0, 4), Range(4, 6))).ranks[-1]
    assert [tuple(t.shape) for t in row.latent] == [(PAGES * PAGE, 32)] * 2
    assert row.k == row.v == ()


def test_chunks_and_single_steps_equal_one_shot(weights: Weights) -> None:
    expected = deploy(weights, chunk=PROMPT).forward(TOKENS, start=0, page_ids=pages(1), every_position=True)
    chunked = deploy(weights, chunk=37)
    assert difference(chunked.forward(TOKENS, start=0, page_ids=pages(1), every_position=True), expected) < 1e-4
    stepped = deploy(weights)
    last = stepped.forward(TOKENS[:-20], start=0, page_ids=pages(1))
    assert last.shape == (1, GQA.vocab)
    steps = [stepped.forward(TOKENS[at : at + 1], start=at, page_ids=pages(1)) for at in range(PROMPT - 20, PROMPT)]
    assert difference(torch.cat([last, *steps]), expected[-21:]) < 1e-4


def test_a_later_token_does_not_reach_back(weights: Weights) -> None:
    expected = deploy(weights).forward(TOKENS, start=0, page_ids=pages(1), every_position=True)
    changed = [*TOKENS[:100], (TOKENS[100] + 1) % GQA.vocab, *TOKENS[101:]]
    logits = deploy(weights).forward(changed, start=0, page_ids=pages(1), every_position=True)
    assert difference(logits[:100], expected[:100]) < 1e-4
    assert all(difference(logits[at], expected[at]) > 1e-2 for at in range(100, PROMPT))


@pytest.mark.parametrize("latent", [None, LatentConfig(kv_lora_rank=24, rope_dim=8)], ids=["gqa", "mla"])
def test_order_matters_in_a_single_layer(latent: LatentConfig | None) -> None:
    # Without RoPE one layer sees a set: the last token's logits would stay the same.
    config = ModelConfig(layers=1, d_model=64, q_heads=16, head_dim=8, d_ff=128, vocab=300, latent=latent)
    model = Weights.generate(config)
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:24]]
    before, after = (
        deploy(model, stages=(Range(0, 1),)).forward(tokens, start=0, page_ids=pages(1))
        for tokens in (TOKENS[:24], swapped)
    )
    assert difference(before, after) > 1e-2


def test_rotation_makes_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 32, generator=generator)

    def score(query_at: int, key_at: int) -> float:
        turned = [Rotation.at(Range(at, at + 1), dim=32, theta=10_000.0)(x) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)
    assert score(4000, 3990) == pytest.approx(score(10, 0), abs=1e-4)
    assert abs(score(10, 0) - score(11, 0)) > 1e-2


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_attention_equals_torch(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, 6, 8, generator=generator)
    k = torch.randn(12, 3, 8, generator=generator)
    v = torch.randn(12, 3, 4, generator=generator)
    mask = torch.ones(tokens, 12, dtype=torch.bool).tril(12 - tokens)
    k_each, v_each = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
    expected = functional.scaled_dot_product_attention(q.transpose(0, 1), k_each, v_each, attn_mask=mask)
    assert difference(causal_attention(q, k, v), expected.transpose(0, 1)) < 1e-5


def test_latent_attention_equals_its_absorbed_form() -> None:
    attention = MODELS["mla"].layers[0].attention
    assert isinstance(attention, LatentAttention)
    x = torch.randn(20, MLA.d_model, generator=torch.Generator().manual_seed(3))
    rotation = Rotation.at(Range(0, 20), dim=8, theta=MLA.rope_theta)
    (rows,) = attention.rows(x, rotation)
    q = torch.einsum("tm,hdm->thd", x, attention.q)
    absorbed = torch.cat((torch.einsum("thd,hdr->thr", q[..., :8], attention.up_k), rotation(q[..., 8:])), dim=-1)
    scores = torch.einsum("thr,sr->hts", absorbed, rows) / math.sqrt(16)
    probabilities = (scores + torch.full((20, 20), -math.inf).triu(1)).softmax(-1)
    mixed = torch.einsum("hts,sr,hdr->thd", probabilities, rows[:, :24], attention.up_v)
    expected = torch.einsum("thd,mhd->tm", mixed, attention.o)
    assert difference(attention.partial(x, rotation, [rows]), expected) < 1e-4


def test_attention_reads_the_pool(weights: Weights) -> None:
    deployment = deploy(weights, 2, (Range(0, 3), Range(3, 6)))
    page_ids = pages(1)
    deployment.forward(TOKENS, start=0, page_ids=page_ids)

    def logits() -> Tensor:
        return deployment.forward(TOKENS[-1:], start=PROMPT - 1, page_ids=page_ids)

    expected = logits()
    (unused,) = set(range(PAGES)) - set(page_ids)
    damage(deployment, unused)
    assert torch.equal(logits(), expected)
    for page in page_ids[: PROMPT // PAGE]:
        intact = [store.clone() for store in all_stores(deployment)]
        damage(deployment, page)
        assert difference(logits(), expected) > 1e-2
        for store, copy in zip(all_stores(deployment), intact, strict=True):
            store.copy_(copy)
        assert torch.equal(logits(), expected)


def all_stores(deployment: Deployment) -> list[Tensor]:
    return [store for rank in deployment.ranks for component in rank.pool for store in component]


def damage(deployment: Deployment, page: int) -> None:
    """Move the values of one page's rows by one, in every layer: plausible bytes in the wrong place."""
    # Whole rows in another order would not do: attention is a sum over them, and K carries its position already.
    for store in all_stores(deployment):
        store[page * PAGE : (page + 1) * PAGE] = store[page * PAGE : (page + 1) * PAGE].roll(1, dims=-1)


def test_unwritten_kv_is_noticed(weights: Weights) -> None:
    deployment = deploy(weights, 2)
    page_ids = pages(1)
    deployment.forward(TOKENS, start=0, page_ids=page_ids)
    with pytest.raises(RuntimeError, match=r"positions \[149, 150\) read KV"):
        deployment.forward(
            TOKENS[-1:],
            start=PROMPT - 1,
            page_ids=[*page_ids[:3], *set(range(PAGES)).difference(page_ids), *page_ids[4:]],
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("latent", [None, MLA.latent], ids=["gqa", "mla"])
def test_kv_rests_in_its_dtype(latent: LatentConfig | None, dtype: torch.dtype) -> None:
    sizes = {"layers": 6, "d_model": 64, "q_heads": 16, "head_dim": 8, "d_ff": 128, "vocab": 300}
    model = Weights.generate(ModelConfig(**sizes, latent=latent, kv_dtype=dtype))
    exact = deploy(MODELS["gqa" if latent is None else "mla"])
    rounded = deploy(model)
    expected = exact.forward(TOKENS, start=0, page_ids=pages(1), every_position=True)
    logits = rounded.forward(TOKENS, start=0, page_ids=pages(1), every_position=True)
    assert {store.dtype for store in all_stores(rounded)} == {dtype}
    assert logits.dtype == torch.float32
    assert difference(logits, expected) > 1e-4
    assert float((logits - expected).square().mean().sqrt()) < 0.3
    at = slots(pages(1), PROMPT)
    assert torch.equal(rounded.ranks[0].pool[0][0][at], exact.ranks[0].pool[0][0][at].to(dtype))


def test_greedy_is_deterministic_and_varied(weights: Weights) -> None:
    first = deploy(weights, 2).greedy(TOKENS, 32, page_ids=pages(1))
    again = deploy(Weights.generate(weights.config), 2).greedy(TOKENS, 32, page_ids=pages(1))
    assert first.tokens == again.tokens
    assert torch.equal(first.logits, again.logits)
    assert first.logits.shape == (32, GQA.vocab)
    assert len(set(first.tokens)) > 12
    other = deploy(weights, 2).greedy(random_tokens(GQA, PROMPT, seed=6), 32, page_ids=pages(1))
    assert other.tokens != first.tokens
    top = first.logits.sort(descending=True).values
    assert first.margin == pytest.approx(float((top[:, 0] - top[:, 1]).min()))


def test_greedy_tokens_are_the_best_of_one_shot(weights: Weights) -> None:
    found = deploy(weights).greedy(TOKENS, 5, page_ids=pages(1))
    everything = [*TOKENS, *found.tokens]
    logits = deploy(weights).forward(everything, start=0, page_ids=pages(1), every_position=True)
    assert difference(logits[PROMPT - 1 : -1], found.logits) < 1e-4
    assert tuple(logits[PROMPT - 1 : -1].argmax(-1).tolist()) == found.tokens


def test_shards_are_views_of_one_copy() -> None:
    model = MODELS["gqa"]
    rank = deploy(model, 4, CUTS["tp4-pp2"][1]).ranks[-1]
    whole, part = model.layers[5], rank.shards[2]
    assert isinstance(whole.attention, GroupedAttention)
    assert isinstance(part.attention, GroupedAttention)
    for full, shard in (
        (whole.attention.q, part.attention.q),
        (whole.attention.k, part.attention.k),
        (whole.attention.o, part.attention.o),
        (whole.mlp.gate, part.mlp.gate),
        (whole.mlp.down, part.mlp.down),
    ):
        assert shard.numel() * 4 == full.numel()
        assert shard.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


def test_weights_follow_the_seed() -> None:
    same, other = (Weights.generate(ModelConfig(layers=1, seed=seed)) for seed in (1, 2))
    assert torch.equal(same.head, Weights.generate(ModelConfig(layers=1, seed=1)).head)
    assert not torch.equal(same.head, other.head)


@pytest.mark.parametrize(
    "stages",
    [(), (Range(0, 3),), (Range(1, 6),), (Range(0, 3), Range(4, 6)), (Range(0, 4), Range(3, 6)), (Range(0, 7),)],
    ids=["none", "short", "late", "gap", "overlap", "long"],
)
def test_stages_must_tile_the_model(stages: tuple[Range, ...]) -> None:
    with pytest.raises(ValueError, match="do not cover 6 layers"):
        deploy(MODELS["gqa"], stages=stages)


@pytest.mark.parametrize(
    ("kv_heads", "tp", "message"),
    [(8, 3, "does not divide 16 query heads"), (8, 32, "does not divide 16"), (4, 0, "no rank 0 among 0")],
)
def test_a_cut_must_divide_the_model(kv_heads: int, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_for(ModelConfig(kv_heads=kv_heads), tp=tp, rank=0)


def test_kv_heads_must_divide_or_replicate() -> None:
    config = ModelConfig(q_heads=12, kv_heads=6, d_ff=144)
    with pytest.raises(ValueError, match="tp 4 does not divide 6 KV heads"):
        cut_for(config, tp=4, rank=0)
    config = ModelConfig(q_heads=12, kv_heads=4, d_ff=144)
    with pytest.raises(ValueError, match="tp 6 cannot replicate 4 KV heads"):
        cut_for(config, tp=6, rank=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"q_heads": 16, "kv_heads": 5}, "do not share"),
        ({"head_dim": 7}, "is odd"),
        ({"layers": 0}, "positive"),
    ],
)
def test_sizes_must_fit_together(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not torch\.int8"):
        ModelConfig(kv_dtype=torch.int8)
    with pytest.raises(ValueError, match="rope_dim even"):
        LatentConfig(rope_dim=5)


@pytest.mark.parametrize(
    ("tokens", "start", "page_ids", "message"),
    [
        ([], 0, [0], "nothing to compute"),
        ([1], -1, [0], "nothing to compute"),
        ([300], 0, [0], "vocabulary of 300"),
        ([1], 0, [PAGES], "distinct and below"),
        ([1], 0, [-1], "distinct and below"),
        ([1], 0, [2, 2], "distinct and below"),
        ([1], PAGE, [3], "do not reach position 16"),
    ],
)
def test_forward_refuses_what_it_cannot_place(tokens: list[int], start: int, page_ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deploy(MODELS["gqa"]).forward(tokens, start=start, page_ids=page_ids)


@pytest.mark.parametrize(
    ("count", "cached", "message"), [(1, 150, "leave nothing"), (1, -1, "leave"), (0, 0, "number")]
)
def test_greedy_refuses_what_it_cannot_start(count: int, cached: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deploy(MODELS["gqa"]).greedy(TOKENS, count, page_ids=pages(1), cached=cached)
