"""How many sequences and cells share a forward, by length, memory, mode and family."""

from types import SimpleNamespace

import pytest

from sink_lens.edits.metrics import logit_difference, loss, sink_mass
from sink_lens.engine import plan
from sink_lens.engine.needs import Needs
from sink_lens.engine.packs import fill_packs
from sink_lens.engine.plan import bytes_per_token, choose_plan

READ = (sink_mass(0),)


def cut(lens, tokens, *, n_cells=1000, metrics=READ):
    found = choose_plan(lens, tokens, Needs.of_metrics(metrics, lens=lens), n_cells=n_cells)
    assert found.path == "blocks"
    return found.prompts, found.pack


@pytest.mark.parametrize(
    ("lengths", "n_cells", "expected"),
    [
        ((12,) * 4, 1000, (4, 10)),  # 512 tokens a forward on a CPU: 4 x 12 x 10 = 480
        ((12, 5, 7), 1000, (3, 14)),  # padding is run: 3 x 12 x 14 = 504
        ((12,) * 4, 3, (4, 3)),  # no more than there are
        ((12,) * 60, 1000, (42, 1)),  # 42 x 12 = 504
        ((256, 256), 1000, (2, 1)),
    ],
)
def test_a_forward_holds_as_much_as_a_cpu_makes_use_of(
    lens_of, tokens_of, lengths, n_cells, expected
):
    assert cut(lens_of("llama"), tokens_of(lengths), n_cells=n_cells) == expected


def test_memory_bounds_a_forward_and_one_sequence_always_runs(lens_of, tokens_of, monkeypatch):
    lens, tokens = lens_of("llama"), tokens_of((12,) * 4)
    each = bytes_per_token(lens, 12, Needs.of_metrics([sink_mass(0)], lens=lens))

    def free(n_tokens):
        memory = SimpleNamespace(available=4 * n_tokens * each)  # a quarter of it is used
        monkeypatch.setattr(plan.psutil, "virtual_memory", lambda: memory)

    free(100)
    assert cut(lens, tokens) == (4, 2)  # 96 tokens
    free(30)
    assert cut(lens, tokens) == (2, 1)
    free(0)
    assert cut(lens, tokens) == (1, 1)


def test_forwards_run_side_by_side_on_the_cores_of_a_cpu(lens_of, tokens_of, monkeypatch):
    lens, tokens = lens_of("llama"), tokens_of((12,) * 4)
    needs = Needs.of_metrics(READ, lens=lens)

    def lanes(n_threads, n_cells):
        monkeypatch.setattr(plan.torch, "get_num_threads", lambda: n_threads)
        return choose_plan(lens, tokens, needs, n_cells=n_cells).lanes

    # 10 cells a forward
    assert [lanes(2, 1000), lanes(2, 10), lanes(2, 11), lanes(4, 1000), lanes(64, 1000)] == [
        2,
        1,
        2,
        4,
        8,
    ]
    each = bytes_per_token(lens, 12, needs)
    memory = SimpleNamespace(
        available=4 * 1100 * each
    )  # a quarter of it is used: two forwards of 480 tokens
    monkeypatch.setattr(plan.psutil, "virtual_memory", lambda: memory)
    assert lanes(4, 1000) == 2


def test_the_memory_of_a_token_by_hand(lens_of):
    lens = lens_of("llama")
    # d_model 48, d_mlp 80, 4 heads of 12, 12 positions: 10 x 48 + 4 x 80 + 6 x 48 + 4 x 4 x 12 = 1280 floats
    assert bytes_per_token(lens, 12, Needs.of_metrics([sink_mass(0)], lens=lens)) == 4 * 1280
    assert (
        bytes_per_token(lens, 12, Needs.of_metrics([loss()], lens=lens)) == 4 * 1280
    )  # logits exist a few at a time
    needs = Needs.of_metrics([logit_difference(1, 2), loss()], lens=lens)
    assert bytes_per_token(lens, 12, needs) == 4 * (1280 + 3 * 300)


def test_cells_of_a_mixture_of_experts_share_forwards_too(lens_of, tokens_of):
    assert (
        cut(lens_of("gpt_oss"), tokens_of((12,) * 4))
        == cut(lens_of("llama"), tokens_of((12,) * 4))
        == (4, 10)
    )


@pytest.mark.parametrize(
    ("begins", "most", "expected"),
    [
        ([0, 0, 0], 2, [2, 1]),
        ([0, 5, 5, 9, 9], 2, [3, 2]),  # 10 + 5 + 5 of 20 rows; 1 + 1
        ([4, 4, 4], 1, [1, 1, 1]),  # 6 and 6 are more than 10
        ([9] * 25, 1, [10, 10, 5]),
    ],
)
def test_cells_share_a_forward_as_long_as_their_rows_are_not_more_than_those_of_whole_cells(
    begins, most, expected
):
    packs = fill_packs(range(len(begins)), size=lambda cell: 10 - begins[cell], most=10 * most)
    assert [len(pack) for pack in packs] == expected
    assert sum(packs, ()) == tuple(range(len(begins)))
